"""`read`: a strict parser of trained drafters' checkpoints: missing or extra tensors are errors.

Missing and unknown tensors, wrong shapes and NaN are refused by name; nothing is initialised randomly.
"""

from __future__ import annotations

from pathlib import Path

from .. import shipped
from ..core.protocols import Target
from ..params import InputError
from . import dflash, hydra, mamba, medusa, native, safeailab, speculators
from .files import Weights, folder_of, json_of, weights_of
from .parts import Bag, Checkpoint
from .target import Facts

KNOWN = "a native folder, SafeAILab's EAGLE or EAGLE-3, DFlash, DSpark, speculators, Medusa or Hydra"


def read(path: str | Path, target: Facts | Target | None = None) -> Checkpoint:
    """Load a folder or hub id. The target is needed only for layouts that depend on it.

    Raises:
        InputError: it is not known, damaged, or for another target.
    """
    try:
        return _read(path, target)
    except InputError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"the config of {path} cannot be understood: {str(error) or type(error).__name__}") from error


def _read(path: str | Path, target: Facts | Target | None) -> Checkpoint:
    folder = folder_of(path)
    facts = target if isinstance(target, Facts) or target is None else Facts.of(target)
    config = json_of(folder / "config.json")
    if "outrider_method" in config:
        return native.read(path)
    if (folder / hydra.FILE).is_file():
        return hydra.read(Bag(weights_of(folder, hydra.FILE), path), config, facts)
    if any((folder / name).is_file() for name in medusa.FILES):
        return medusa.read(weights_of(folder, *medusa.FILES), path, config, facts)
    weights = weights_of(folder)
    kind = _kind(config, weights)
    if kind == "medusa-2":
        return medusa.read(weights, path, config, facts)
    if kind is None:
        raise InputError(_refusal(path, config, weights))
    reader = {
        "speculators": speculators.read,
        "vllm-medusa": medusa.read_vllm,
        "block": dflash.read,
        "speculators-block": dflash.speculators,
        "eagle3": safeailab.eagle3,
        "eagle": safeailab.eagle,
    }[kind]
    return reader(Bag(weights, path), config, facts)


def method_of(path: str | Path) -> str | None:
    """The drafter of a folder by its config and keys alone; None for what `read` does not support."""
    folder = shipped.folder_of(path)
    if not (folder / "config.json").is_file():
        return None
    config = json_of(folder / "config.json")
    if "outrider_method" in config:
        return str(config["outrider_method"])
    if config.get("model_type") in ("mamba", "mamba2") or mamba.original(folder):
        return "mamba"
    if "outrider_stages" in config:
        return "model"
    if (folder / hydra.FILE).is_file():
        return "hydra"
    if any((folder / name).is_file() for name in medusa.FILES):
        return "medusa"
    try:
        kind = _kind(config, weights_of(folder))
    except InputError:
        return None
    return {"medusa-2": "medusa", "vllm-medusa": "medusa", "speculators": "eagle3", "speculators-block": "block"}.get(
        kind or "", kind
    )


def _kind(config: dict, weights: Weights) -> str | None:
    names = frozenset(weights)
    if "speculators_model_type" in config:
        return "speculators-block" if config["speculators_model_type"] in dflash.KINDS else "speculators"
    if dflash.is_block(config, names):
        return "block"
    if medusa.has_heads(names):
        return "medusa-2"
    if medusa.is_vllm(config, names):
        return "vllm-medusa"
    if safeailab.is_eagle3(names):
        return "eagle3"
    return "eagle" if safeailab.is_eagle(names) else None


def _refusal(path: str | Path, config: dict, weights: Weights) -> str:
    if any(name.startswith("backbone.") for name in weights):
        return f"{path} is a Mamba, which is read as it is; use it as mamba:{path}"
    if any(name.endswith(("lm_head.weight", "embed_tokens.weight", "wte.weight")) for name in weights) and any(
        ".layers." in name or ".h." in name for name in weights
    ):
        return f"{path} is a full language model; use it as model:{path}"
    some = ", ".join(sorted(weights)[:3])
    return f"{path} is not {KNOWN}: its weights begin with {some}"
