"""Models and tokenizers by name (`names.py`), by transformers' own loading code; one sentence where it fails."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel

from ... import hub, names
from ...core.protocols import Target
from ...names import Place
from ...params import InputError, first_line, out_of_memory
from . import gguf, sizes, spread, vocabulary
from .hf import HFTarget
from .mark import mark_of
from .module import ModuleTarget
from .seq2seq import SeqTarget
from .validate import ensure, ensure_native

logger = logging.getLogger(__name__)
HALF = (torch.bfloat16, torch.float16)
MEMORY = 0.25  # of this machine's, that a model may take to compute in float32 where 16 bits would be slow
ACCESS = "revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download", "proxies"
LENIENT = {"ignore_mismatched_sizes": True}  # tensors of another shape are reported, and refused by name here


def load_target(
    model: Any,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    processes: int = 1,
    drafting: bool = False,
    **options: Any,
) -> HFTarget | SeqTarget:
    """A target that runs a stock model's own forward.

    Args:
        model: a name (`names.find`), or a transformers model in memory, which keeps its precision and place.
        dtype: auto, float32, bfloat16, ... of a model that is loaded by name.
        device: of the same.
        trust_remote_code: run code that comes with the model.
        processes: how many hold the model together, each a part (`spread.py`).
        drafting: it is a draft model, which may have a draft vocabulary (`vocabulary.py`).
        options: for `from_pretrained` (quantization_config, revision, ...).

    Raises:
        InputError: in one sentence, why the model cannot be had or cannot be a target. A family that our tests do not
            prove is proved here, once for each configuration, and refused if a tree is not exact on it.
    """
    if processes < 1:
        raise InputError(f"processes (--target-parallel) must be at least 1, not {processes}")
    if isinstance(model, PreTrainedModel):
        if processes > 1:
            raise InputError(f"processes={processes} is for models that are loaded by name; leave it out")
        stock, mark = model, mark_of(model)
    elif isinstance(model, str | Path | Place):
        stock = from_pretrained(model, dtype, device, trust_remote_code, options, processes)
        mark = mark_of(stock) if processes == 1 else ""
        if drafting:
            vocabulary.cut(stock)
        if dtype == "auto":
            stock = widened(stock)
    else:
        raise InputError(f"a model is a name, a folder or a transformers model, not {type(model).__name__}")
    if not hasattr(stock, "generate") or stock.get_output_embeddings() is None:
        raise InputError(f"{type(stock).__name__} is not a language model: it has no head to write tokens with")
    if not isinstance(getattr(stock.get_output_embeddings(), "weight", None), torch.Tensor):
        raise InputError(f"the head of this {type(stock).__name__} is not a matrix, as a language model's is")
    if stock.config.is_encoder_decoder:
        encoding = SeqTarget(stock)
        if stock is not model:
            sizes.try_out(encoding, model)
        return encoding
    target = HFTarget(stock)
    target.mark = mark
    if stock is not model and processes == 1:
        sizes.try_out(target, model)
    if not target.family.proved:
        ensure(target)
    return target


def target_of(model: PreTrainedModel) -> Target:
    """The target of a transformers model in memory, which keeps its precision and place: in native passes where they
    serve it, else in its own forward. Its weights may change; see `module.py`.

    Raises:
        InputError: it cannot be a target.
    """
    try:
        target = ModuleTarget(model)
    except InputError:
        return load_target(model)
    return target if ensure_native(target) else load_target(model)


def widened(stock: Any) -> Any:
    """The model in float32, if this processor has no products in 16 bits and memory allows it; else as it is.

    Without them torch multiplies 16-bit matrices row by row: a pass over 16 nodes of SmolLM2 takes eight times as long
    as one over a single node.
    """
    if stock.device.type != "cpu" or stock.dtype not in HALF or getattr(stock, "is_quantized", False):
        return stock
    if multiplies_halves() or 4 * stock.num_parameters() > MEMORY * physical_memory():
        return stock
    logger.info("this processor has no products in %s, so the model computes in float32", stock.dtype)
    return stock.float()


def multiplies_halves() -> bool:
    """Has this processor products in 16 bits? True for builds of torch that do not say."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported() or torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return True


def physical_memory() -> int:
    """Bytes of this machine's memory; 0 where that is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def load_tokenizer(
    model: str | Path | Place | None, trust_remote_code: bool = False, options: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """The model's own tokenizer; None for a model in memory that came from nowhere. Raises InputError without one.

    options: of `from_pretrained`; those that name a revision, an access or a cache are the tokenizer's too.
    """
    if not model:
        return None
    place = names.find(model)
    if place.gguf:
        return gguf.read_tokenizer(Path(place.where) / place.gguf)
    access = _access(place, options)
    try:
        return AutoTokenizer.from_pretrained(place.where, trust_remote_code=trust_remote_code, **access)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = _damaged(place.where) or f"{place.name} has no tokenizer to be loaded: {first_line(error)}"
        raise InputError(_hinted(reason, place)) from None


def from_pretrained(
    model: str | Path | Place, dtype: Any, device: str, trust: bool, options: dict[str, Any], processes: int = 1
) -> PreTrainedModel:
    """The stock model of a name, of any kind that transformers knows; one sentence where it fails.

    dtype "auto": the precision of the weights, but float32 for the demo's. device "auto": this process's GPU, where
    there is one. `processes`: how many hold the model together.
    """
    place = names.find(model)
    dtype = place.dtype if dtype == "auto" else dtype
    if processes > 1:
        options = {**options, "distributed_config": spread.config_for(processes, device)}
        if place.gguf:
            raise InputError(f"{place.name} is a .gguf file, which cannot be spread; name a folder of safetensors")
    if place.gguf:
        stock, report = gguf.read(Path(place.where) / place.gguf, dtype)
    else:
        stock, report = _read(place, dtype, trust, options, processes)
    if place.gguf and (others := sorted(report.get("unexpected_keys", ()))):
        raise InputError(f"{place.name} has {others[0]}, which no model of its family reads; take another file of it")
    lacking = sorted(report["missing_keys"])
    if lacking:  # transformers would fill them with random numbers
        raise InputError(
            f"the weights of {place.name} lack {len(lacking)} tensors, {lacking[0]} among them; fetch them again"
        )
    if mismatched := sorted(report.get("mismatched_keys", ())):
        name, there, wanted = mismatched[0]
        raise InputError(
            f"the weights of {place.name} do not have the shapes that its config.json says: {name} is "
            f"{list(there)}, not {list(wanted)}; fetch both again"
        )
    if processes > 1:
        spread.gather(stock)
        return stock
    return stock if getattr(stock, "hf_device_map", None) else stock.to(spread.own_device(device))


def _read(place: Place, dtype: Any, trust: bool, options: dict[str, Any], processes: int) -> Any:
    """The model of a folder or hub id, and the report of loading its files."""
    where, name = place.where, place.name
    if Path(where).exists():
        _check_folder(Path(where))
    access = _access(place, options)
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust, **access)
    except StrictDataclassError as error:
        raise InputError(f"{where}/config.json is damaged: {' '.join(str(error).split())[:200]}") from None
    except Exception as error:  # a wrong field may make its readers raise anything
        if out_of_memory(error):
            raise
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            reason = "it needs code of its own; allow that (--trust-remote-code) only if you trust its author"
        raise InputError(_hinted(f"{name} cannot be loaded: {reason}", place)) from None
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if type(config) not in kind._model_mapping and not trust:
        raise InputError(f"{name} is a {config.model_type}, which is no language model that transformers knows")
    if processes > 1:
        spread.check(config, name, processes)
    if Path(where).exists() and not trust:
        sizes.check(config, Path(where), kind)
    try:
        return kind.from_pretrained(
            where, dtype=dtype, trust_remote_code=trust, output_loading_info=True, **{**LENIENT, **access, **options}
        )
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = _damaged(where) or f"{name} cannot be loaded: {first_line(error)}"
        raise InputError(_hinted(reason, place)) from None


def _access(place: Place, options: Mapping[str, Any]) -> dict[str, Any]:
    """How the files of a model are read: by what of its options concerns that, or after a look whether the hub can be
    reached, from its cache alone. Raises InputError as `hub.ensure`."""
    access = {name: options[name] for name in ACCESS if name in options}
    if not access and not hub.ensure(place.where, place.hint):
        access["local_files_only"] = True
    return access


def _damaged(where: str) -> str | None:
    """The file of a folder that is to blame: JSON that is none, or weights that cannot be opened."""
    for file in sorted(Path(where).glob("*.json")) if Path(where).is_dir() else ():
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            return f"{file} is not valid JSON ({first_line(error)}); fetch it again"
    for file in sorted(Path(where).glob("*.safetensors")) if Path(where).is_dir() else ():
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{file} is damaged ({first_line(error)}); fetch it again"
    return None


def _hinted(sentence: str, place: Place) -> str:
    return f"{sentence}; {place.hint}" if place.hint else sentence


def _check_folder(folder: Path) -> None:
    """What a folder must hold, said before transformers says it at length."""
    names.check_folder(folder)
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise InputError(f"{folder}/config.json is not valid JSON; fetch it again") from None
    if not any(folder.glob("*.safetensors")):
        legacy = any(folder.glob("*.bin"))
        hint = "it has only a pickle; convert it to safetensors" if legacy else "fetch model.safetensors too"
        raise InputError(f"{folder} has a config but no safetensors weights; {hint}")


def eos_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a text: the generation config's, else the tokenizer's."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = getattr(tokenizer, "eos_token_id", None) if ends is None else ends
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def origin_of(model: Any) -> Place | None:
    """Where a transformers model came from: a folder or a hub id; None where it was made in memory."""
    return place_of(str(model.config._name_or_path or ""))


def place_of(name: str) -> Place | None:
    """The place that transformers names so: a .gguf file, a folder or a hub id, and nothing that ships."""
    if name.lower().endswith(names.GGUF):
        return names.find(name)
    return Place(name, name) if name else None


def save_pretrained(model: Any, folder: str | Path) -> None:
    """`model.save_pretrained`, with OSError where the system refuses to write, as on a full disk."""
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(first_line(error)) from None


def save_tokenizer(model: Any, folder: str | Path) -> None:
    """Save into `folder` the tokenizer of the place that a model was loaded from; a warning where there is none."""
    try:
        if (tokenizer := load_tokenizer(origin_of(model))) is not None:
            tokenizer.save_pretrained(folder)
    except InputError as error:
        logger.warning("%s is saved without a tokenizer: %s", folder, error)
