"""Sharded training: FSDP2 (`fully_shard`) over all processes. accelerate's own path falls back to replicas on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def sharded(objective: nn.Module) -> None:
    """Shard the parameters that learn, in place: every one becomes a DTensor over a mesh of all processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    kind = next(objective.parameters()).device.type
    mesh = init_device_mesh(kind, (torch.distributed.get_world_size(),))
    fully_shard(objective, mesh=mesh)
    whole = [name for name, p in objective.named_parameters() if not isinstance(p, DTensor)]
    assert not whole, f"these parameters were not sharded: {', '.join(whole)}"


def state(objective: nn.Module, optimiser: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole states of module and optimiser, as one process would have them (on the first process; else empty)."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    return get_state_dict(objective, optimiser, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def restore(objective: nn.Module, optimiser: Any, found: dict[str, Any]) -> None:
    """Load full state dicts into the sharded module and optimiser."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        objective, optimiser, model_state_dict=found["module"], optim_state_dict=found["optimiser"], options=options
    )
