"""Mutated model files: a model is made of them, or they are refused in one sentence."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import write
from small import BASE, build
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.backends.native import library as native
from outrider.backends.native.files import open_gguf
from outrider.backends.native.target import load
from outrider.backends.native.text_tokenizer import load_tokenizer
from outrider.params import InputError

pytestmark = pytest.mark.skipif(
    native.library("bfloat16", "bfloat16") is None, reason="native passes want a compiler and x86 with AVX2"
)
COUNT = 150  # mutations of each file


def tried(place: Path) -> str | None:
    """What is said of a model's files; None: they were loaded, and texts can be read."""
    try:
        target, tokenizer = load(place), load_tokenizer(place)
        tokens = tokenizer.encode("the text")
        if tokens and max(tokens) < target.vocab:
            list(target.open(8).prefill([tokens]))
        assert isinstance(target.mark, str)
    except InputError as error:
        return sentence(error)
    return None


def sentence(error: InputError) -> str:
    assert str(error)
    assert "\n" not in str(error)
    return str(error)


@pytest.fixture(scope="module")
def wide() -> Any:
    torch.manual_seed(3)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"vocab_size": 128, "num_hidden_layers": 1, "bos_token_id": 1, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **sizes, **more})).eval()


def mutations(full: bytes, header: int, seed: int) -> Iterator[bytes]:
    """Bytes, lengths and counts of the header that are others, bytes of the weights that are others, files cut off."""
    dice = np.random.default_rng(seed)
    for i in range(COUNT):
        made = bytearray(full)
        at = int(dice.integers(4, header - 8))
        if i % 5 == 0:
            struct.pack_into("<Q", made, at, int(dice.integers(0, 1 << 63)))
        elif i % 5 == 1:
            struct.pack_into("<I", made, at, int(dice.integers(0, 1 << 10)))
        elif i % 5 == 2:
            made[at] = int(dice.integers(0, 256))
        elif i % 5 == 3:
            for place in dice.integers(header, len(full), 500):
                made[int(place)] = int(dice.integers(0, 256))
        else:
            made = made[: int(dice.integers(0, len(full)))]
        yield bytes(made)


@pytest.mark.parametrize("kind", ["F16", "Q4_1", "Q8_0", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_gguf_files(tmp_path: Path, wide: Any, kind: str) -> None:
    file = write(tmp_path / "m.gguf", wide, kind)
    assert tried(file) is None
    full = file.read_bytes()
    header = len(full) - sum(-(-tensor.data.size // 32) * 32 for tensor in open_gguf(file).tensors.values())
    said = []
    for i, mutated in enumerate(mutations(full, header, len(full))):
        other = tmp_path / f"{i}.gguf"  # another one each time: files that are mapped must not be written
        other.write_bytes(mutated)
        said.append(tried(other))
        other.unlink()
    assert COUNT // 5 < sum(one is not None for one in said) < COUNT


def test_folders(tmp_path: Path) -> None:
    """Values of config.json, and the header of the weights."""
    build("qwen3", torch.bfloat16, hidden_size=64, intermediate_size=96, head_dim=32).save_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    full = (tmp_path / "m" / "model.safetensors").read_bytes()
    (size,) = struct.unpack_from("<Q", full)
    values: list[Any] = [None, -1, 0, 7, 1 << 70, 0.5, float("nan"), "x", [], {}, True, ["x"], {"rope_type": "yarn"}]
    said = []
    for i, (name, value) in enumerate((name, value) for name in config for value in values):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | {name: value}))
        (folder / "model.safetensors").symlink_to(tmp_path / "m" / "model.safetensors")
        said.append(loaded(folder))
    assert len(said) // 5 < sum(one is not None for one in said) < len(said)
    for i, mutated in enumerate(mutations(full, size, 7)):
        folder = tmp_path / f"w{i}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes(mutated)
        loaded(folder)


def loaded(folder: Path) -> str | None:
    """What is said of a folder's model; None: it was loaded, and reads a text."""
    try:
        target = load(folder)
        list(target.open(8).prefill([[1, 2, 3]]))
    except InputError as error:
        return sentence(error)
    return None
