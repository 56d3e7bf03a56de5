""".gguf files as stock models, for what native passes do not serve: other architectures, which transformers' own code
reads, in minutes, at each start; devices; training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ...names import Place
from ...params import InputError, first_line
from ..native.abi import Library
from ..native.experts import Stack, apart, stacks
from ..native.families import describe
from ..native.files import ModelFile, open_gguf
from ..native.library import library
from ..native.model import Parameter, config_of, frequency_factors, kept_in, parameters, supports
from ..native.text_tokenizer import templates_of
from ..native.tokenizer import KINDS as TOKENIZERS
from ..native.tokenizer import from_gguf
from .formats import numbers


@contextmanager
def as_folder(place: Place) -> Iterator[str]:
    """A model's folder or hub id; for a .gguf file a temporary folder, for programs that read nothing else."""
    if place.gguf is None:
        yield place.where
        return
    file = Path(place.where) / place.gguf
    with TemporaryDirectory(prefix="outrider-") as folder:
        write(file, folder)
        yield folder


def write(file: str | Path, folder: str | Path) -> None:
    """The stock model of a .gguf file and its tokenizer as a folder that transformers loads."""
    read(Path(file))[0].save_pretrained(folder)
    read_tokenizer(Path(file)).save_pretrained(folder)


def read(file: Path, dtype: Any = "auto") -> tuple[Any, dict[str, Any]]:
    """The stock model of a .gguf file, its weights in `dtype`, and transformers' report of what was missing. The file
    is the model's `name_or_path`, by which its tokenizer is loaded again."""
    kind = getattr(torch, precision(file)) if dtype == "auto" else dtype
    if supports(open_gguf(file)):
        model, report = _built(open_gguf(file), getattr(torch, kind) if isinstance(kind, str) else kind)
    else:
        model, report = _dequantised(file, kind)
    model.name_or_path = model.config.name_or_path = str(file)
    return model, report


def _dequantised(file: Path, dtype: Any) -> tuple[Any, dict[str, Any]]:
    """The model as transformers reads it."""
    from transformers import AutoModelForCausalLM, GgufConfig

    with _explained(file):
        read_: Any = AutoModelForCausalLM.from_pretrained
        return read_(
            str(file.parent), gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype,
            output_loading_info=True,
        )  # fmt: skip


def _built(file: ModelFile, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """A stock model whose parameters are made of the file's blocks."""
    from transformers import AutoModelForCausalLM

    config = read_config(file.path)
    code = library("bfloat16", "bfloat16")
    parts = apart({one.name: one for one in parameters(file)})
    state = {one.name: _parameter(code, one, dtype) for one in parts.values()}
    if any(".experts." in name for name in state):
        for stack in stacks(describe(config_of(file))):
            made = [state.pop(name) for name in stack.names]
            state[stack.name] = _stacked(stack, made) if len(made) > 1 else made[0]
    with _explained(file.path):
        kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
        with _quiet():
            model, report = kind.from_pretrained(
                None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
            )
    if (factors := frequency_factors(file)) is not None:
        rotary = model.model.rotary_emb
        rotary.inv_freq.div_(torch.tensor(factors))
        rotary.original_inv_freq = rotary.inv_freq.clone()
    return model, report


def _stacked(stack: Stack, parts: list[Tensor]) -> Tensor:
    """The matrices, or biases, of all experts as transformers' module has them."""
    if not stack.in_turn:
        return torch.cat(parts).view(stack.shape)
    count = len(parts) // stack.shape[0]
    each = [torch.stack(parts[i : i + count], 1).flatten(0, 1) for i in range(0, len(parts), count)]
    return torch.stack(each).transpose(1, -1).contiguous() if each[0].dim() > 1 else torch.stack(each)


def _parameter(code: Library | None, one: Parameter, dtype: torch.dtype) -> Tensor:
    """A parameter's numbers. A bias whose elements have an order is a matrix of one column."""
    tensor, rows, width = one.tensor, one.tensor.rows, one.tensor.shape[-1]
    if len(tensor.shape) == 1 and one.order is not None:
        rows, width = rows.reshape(width, -1), 1
    kind = torch.float32 if one.shift else dtype
    made = numbers(code, tensor.kind.number, rows, width, one.order, kind).view(tensor.shape)
    made = made.T.contiguous() if one.transposed else made
    return (made + one.shift).to(dtype) if one.shift else made


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' bar of progress: nothing is read from a disk."""
    from transformers.utils import logging as theirs

    shown = theirs.is_progress_bar_enabled()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            theirs.enable_progress_bar()


def read_config(file: Path) -> Any:
    """The config of transformers that a .gguf file's metadata stand for."""
    from transformers import AutoConfig

    with _explained(file):
        if supports(open_gguf(file)):
            return AutoConfig.for_model(**config_of(open_gguf(file)))
        return AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)


def read_tokenizer(file: Path) -> Any:
    """The tokenizer of a .gguf file, chat template included."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    values = open_gguf(file).metadata
    if values.get("tokenizer.ggml.model") in TOKENIZERS:
        words = values["tokenizer.ggml.tokens"]
        names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        known = {name: values.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in names.items()}
        special = {f"{name}_token": words[i] for name, i in known.items() if i is not None and 0 <= i < len(words)}
        made = PreTrainedTokenizerFast(
            tokenizer_object=from_gguf(values), clean_up_tokenization_spaces=False, **special
        )
        made.chat_template = templates_of(values)
        return made
    with _explained(file, "has no tokenizer that transformers can read"):
        return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def precision(file: Path) -> str:
    """float32 or float16 if that is what most of the matrices are kept in, else bfloat16."""
    return kept_in(open_gguf(file))


@contextmanager
def _explained(file: Path, fault: str = "is damaged or cut off") -> Iterator[None]:
    """Whatever a damaged file makes its readers raise, as one sentence."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        why = first_line(error)
        if "not supported" in why and "GGUF" in why:
            raise InputError(f"{file} cannot be loaded: {why}") from None
        raise InputError(f"{file} {fault} ({why}); fetch it again") from None
