"""A target that several processes hold together: tensor parallelism by transformers, in groups of consecutive ranks.

Each process has a part of every layer, and the whole embedding and head, which drafters use. The processes of a group
must run the model together, on the same tokens.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from ...params import InputError

STARTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # what torchrun and accelerate tell a process


class Groups(DistributedConfig):
    """Groups of `tp_size` processes. transformers would wrap their copies of the model for training (FSDP); this model
    is frozen."""

    @property
    def dp_size(self) -> int:
        return 1


def config_for(size: int, device: str = "auto") -> DistributedConfig:
    """How a model is spread over groups of `size` processes.

    Args:
        size: processes of a group, at least 2.
        device: "auto", or what transformers takes anyway: the GPU of this process, or the CPU of a machine without.

    Raises:
        InputError: these processes cannot form such groups.
    """
    if any(name not in os.environ for name in STARTED):
        raise InputError(
            f"a target on {size} processes needs processes; start it with "
            f"torchrun --nproc-per-node {size} -m outrider train ..."
        )
    world = int(os.environ["WORLD_SIZE"])
    if world % size:
        raise InputError(f"{world} processes cannot form groups of {size}; start a multiple of {size}")
    has = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("auto", has):
        raise InputError(f"a target on several processes takes the {has} of each; leave device={device} out")
    if world == size:
        return DistributedConfig(tp_size=size)
    if not hasattr(DistributedConfig, "dp_size"):
        raise InputError(
            f"transformers {transformers.__version__} makes one group of all {world} processes; "
            "install 5.23 or newer for several"
        )
    return Groups(tp_size=size, dp_replicate_size=world // size)


def own_device(device: str) -> str:
    """The device that is meant by "auto" or "cuda": of several processes on a machine each has a GPU of its own.

    Raises:
        InputError: there are more processes than GPUs.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return device_of(device, count, int(os.environ.get("LOCAL_RANK", 0)))


def device_of(device: str, gpus: int, local: int) -> str:
    """The same for a machine of so many GPUs, and its process number `local`."""
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    if device != "cuda":
        return device
    if local >= gpus > 0:
        raise InputError(f"this machine has {gpus} GPU{'s' * (gpus > 1)}, and process {local + 1} needs its own")
    return f"cuda:{local}"


def check(config: Any, name: str, size: int) -> None:
    """Can a model of this config be spread over `size` processes? Raises InputError if not."""
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise InputError(f"transformers has no plan to spread {name}, a {config.model_type}, over several processes")
    heads = int(text.num_attention_heads)
    for count, kind in (
        (heads, "heads"),
        (int(getattr(text, "num_key_value_heads", None) or heads), "key-value heads"),
    ):
        if count % size:
            raise InputError(f"the {count} {kind} of {name} cannot be spread evenly over {size} processes")


def agreed(model: Any, here: bool) -> bool:
    """Is it so in every process of the group? All of them must call this."""
    mesh = model._device_mesh
    group = (mesh["tp"] if mesh.ndim > 1 else mesh).get_group()
    everywhere = torch.tensor(int(here), device=model.device)
    torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MIN, group=group)
    return bool(everywhere)


@torch.no_grad()
def gather(model: PreTrainedModel) -> None:
    """Give this process the whole embedding and head, which transformers spreads too. All processes take part."""
    from torch.distributed.tensor import DTensor

    whole: dict[Any, nn.Parameter] = {}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        spread = {name: p for name, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
        for name, p in spread.items():
            if p not in whole:  # a head may be the embedding itself
                whole[p] = nn.Parameter(p.full_tensor(), requires_grad=False)
            setattr(module, name, whole[p])
        if spread:
            vars(module).pop("forward", None)  # transformers' own, for a part
