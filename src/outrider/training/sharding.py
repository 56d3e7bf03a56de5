"""Sharded training: FSDP2 (`fully_shard`) over all processes. accelerate's own path falls back to replicas on a CPU.

Checkpoints are those of a single process: full tensors under the same names. So a run can resume with another number of
processes, sharded or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def sharded(objective: nn.Module) -> None:
    """Shard the trainable parameters in place: each becomes a DTensor over a mesh of all processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = next(objective.parameters()).device.type
    mesh = init_device_mesh(kind, (torch.distributed.get_world_size(),))
    fully_shard(objective, mesh=mesh)
    unsharded = [name for name, p in objective.named_parameters() if not isinstance(p, DTensor)]
    assert not unsharded, f"these parameters were not sharded: {', '.join(unsharded)}"


def full(state: Any, keep: bool) -> Any:
    """A state dict with full tensors in place of shards. Called by all processes.

    Args:
        state: of a module or an optimiser, sharded or not.
        keep: whether this process needs it; others get empty tensors, which take no memory.

    Returns:
        The state dict, tensors on the CPU.
    """
    if isinstance(state, DTensor):
        tensor = state.full_tensor()
        return tensor.detach().cpu() if keep else tensor.new_empty(0)
    if isinstance(state, dict):
        return {name: full(value, keep) for name, value in state.items()}
    return state


def restore(objective: nn.Module, optimiser: Any, module: dict[str, Any], moments: dict[str, Any]) -> None:
    """Load full states into module and optimiser, each tensor sharded like its parameter."""
    shape = {name: value for name, value in objective.state_dict().items() if isinstance(value, DTensor)}
    objective.load_state_dict({name: _like(value, shape.get(name)) for name, value in module.items()})
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    state = {i: {n: _like(x, parameters[i]) for n, x in of.items()} for i, of in moments["state"].items()}
    optimiser.load_state_dict({**moments, "state": state})


def _like(value: Any, other: Any) -> Any:
    if not isinstance(other, DTensor) or value.shape != other.shape:  # step counts are not sharded
        return value
    return distribute_tensor(value.to(other.device), other.device_mesh, other.placements, src_data_rank=None)
