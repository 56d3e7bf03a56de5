"""Models and tokenizers from a hub id or a folder, by transformers' own loading code; one sentence where it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel

from ..types import InputError
from .hf import HFTarget
from .seq2seq import SeqTarget
from .validate import ensure


def load_target(
    model: Any,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    **options: Any,
) -> HFTarget | SeqTarget:
    """A target from a hub id, a folder, or a transformers model in memory (which keeps its precision and place).

    `options` go to `from_pretrained` (quantization_config, revision, ...). A family that our tests do not prove is
    proved here, once for each configuration, and refused with the reason if a tree is not exact on it.
    """
    if isinstance(model, PreTrainedModel):
        stock = model
    elif isinstance(model, str | Path):
        stock = from_pretrained(str(model), dtype, device, trust_remote_code, options)
    else:
        raise InputError(f"a model is a hub id, a folder or a transformers model, not {type(model).__name__}")
    if not hasattr(stock, "generate") or stock.get_output_embeddings() is None:
        raise InputError(f"{type(stock).__name__} is not a language model: it has no head to write tokens with")
    if stock.config.is_encoder_decoder:
        return SeqTarget(stock)
    target = HFTarget(stock)
    if not target.family.proved:
        ensure(target)
    return target


def load_tokenizer(where: str | Path | None, trust_remote_code: bool = False) -> Any:
    """The model's own tokenizer; None for a model in memory that came from nowhere."""
    if not where:
        return None
    try:
        return AutoTokenizer.from_pretrained(str(where), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{where} has no tokenizer that transformers can load ({_first_line(error)})") from None


def from_pretrained(where: str, dtype: Any, device: str, trust: bool, options: dict[str, Any]) -> PreTrainedModel:
    """The stock model of a hub id or folder, of any kind that transformers knows; one sentence where it fails."""
    if Path(where).exists():
        _check_folder(Path(where))
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = _first_line(error)
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own; pass trust_remote_code=True only if you trust its author"
        raise InputError(f"{where} cannot be loaded: {reason}") from None
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if type(config) not in kind._model_mapping and not trust:
        raise InputError(f"{where} is a {config.model_type}, which is no language model that transformers knows")
    try:
        stock, found = kind.from_pretrained(
            where, dtype=dtype, trust_remote_code=trust, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise InputError(f"{where} cannot be loaded: {_first_line(error)}") from None
    except Exception as error:  # safetensors raises a type of its own for truncated files
        if "safetensor" not in type(error).__name__.lower():
            raise
        raise InputError(f"the weights of {where} are damaged ({_first_line(error)}); fetch them again") from None
    lacking = sorted(found["missing_keys"])
    if lacking:  # transformers would fill them with random numbers
        raise InputError(
            f"the weights of {where} lack {len(lacking)} tensors, {lacking[0]} among them; fetch them again"
        )
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return stock if getattr(stock, "hf_device_map", None) else stock.to(place)


def _check_folder(folder: Path) -> None:
    """What a folder must hold, said before transformers says it at length."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json; it is not the folder of a model")
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InputError(f"{folder}/config.json is not valid JSON; fetch it again") from None
    if not any(folder.glob("*.safetensors")):
        legacy = any(folder.glob("*.bin"))
        hint = "it has only a pickle; convert it to safetensors" if legacy else "fetch model.safetensors too"
        raise InputError(f"{folder} has a config but no safetensors weights; {hint}")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
