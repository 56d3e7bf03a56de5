"""Model files read in place: the same as their own readers' content, and one sentence for whatever is damaged."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from safetensors.torch import save_file

from outrider.backends.native.files import KINDS, ModelFile, open_gguf, open_safetensors
from outrider.params import InputError


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file with a value of every type and tensors of three kinds."""
    path = tmp_path / "some.gguf"
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_uint8("t.u8", 200)
    out.add_int8("t.i8", -100)
    out.add_uint16("t.u16", 60000)
    out.add_int16("t.i16", -30000)
    out.add_uint32("t.u32", 4_000_000_000)
    out.add_int32("t.i32", -2_000_000_000)
    out.add_uint64("t.u64", 1 << 63)
    out.add_int64("t.i64", -(1 << 62))
    out.add_float32("t.f32", 0.5)
    out.add_float64("t.f64", 1e300)
    out.add_bool("t.bool", True)
    out.add_string("t.string", "grün 🚀")
    out.add_array("t.strings", ["a", "", "▁b"])
    out.add_array("t.ints", [1, -2, 3])
    out.add_array("t.floats", [0.5, -1.5])
    random = np.random.default_rng(0)
    out.add_tensor("full", random.normal(size=(3, 64)).astype(np.float32))
    out.add_tensor("half", random.normal(size=(2, 5)).astype(np.float16))
    of = gguf.GGMLQuantizationType.Q8_0
    out.add_tensor("blocks", gguf.quants.quantize(random.normal(size=(4, 64)).astype(np.float32), of), raw_dtype=of)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def same(file: ModelFile, path: Path) -> None:
    reader = gguf.GGUFReader(path)
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert theirs.keys() == file.metadata.keys()
    for name, value in theirs.items():
        ours = file.metadata[name]
        assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == value, name
    assert [tensor.name for tensor in reader.tensors] == list(file.tensors)
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.kind.name == tensor.tensor_type.name
        assert list(ours.shape) == [int(n) for n in tensor.shape][::-1]
        assert ours.rows.tobytes() == tensor.data.tobytes()


def test_a_file_holds_what_gguf_py_reads_in_it(written: Path) -> None:
    same(open_gguf(written), written)


def test_the_table_of_kinds_is_gguf_pys() -> None:
    for number, kind in KINDS.items():
        theirs = gguf.GGMLQuantizationType(number)
        assert (theirs.name, GGML_QUANT_SIZES[theirs]) == (kind.name, (kind.elements, kind.bytes))


def test_a_truncated_file_is_one_sentence_wherever_it_ends(written: Path, tmp_path: Path) -> None:
    full, cut = written.read_bytes(), tmp_path / "cut.gguf"
    for size in [*range(0, 400), *range(400, len(full) - 64, 37)]:
        cut.write_bytes(full[:size])
        with pytest.raises(InputError, match=r"damaged or cut off|is empty|does not begin") as refused:
            open_gguf(cut)
        assert "\n" not in str(refused.value)


def test_a_mutated_header_is_read_or_refused_in_one_sentence(written: Path, tmp_path: Path) -> None:
    """2,000 mutations: bytes, and lengths and counts that promise more than the file has."""
    full, path = written.read_bytes(), tmp_path / "other.gguf"
    header = len(full) - sum(-(-tensor.data.size // 32) * 32 for tensor in open_gguf(written).tensors.values())
    random = np.random.default_rng(1)
    refused = 0
    for i in range(2000):
        bytes_ = bytearray(full)
        at = int(random.integers(4, header))
        if i % 3 == 0:
            struct.pack_into("<Q", bytes_, min(at, header - 8), int(random.integers(0, 1 << 63)))
        else:
            bytes_[at] = int(random.integers(0, 256))
        path.write_bytes(bytes_)
        said = refusal(path)
        refused += said is not None
        assert "\n" not in (said or "")
    assert 100 < refused < 2000


def split(folder: Path) -> list[Path]:
    """A file in three parts, as `llama-gguf-split` names them."""
    out = gguf.GGUFWriter(str(folder / "it.gguf"), "llama", split_max_tensors=1)
    out.add_string("t.string", "all of it")
    for i, name in enumerate("abc"):
        out.add_tensor(name, np.full((2, 4), i, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return sorted(folder.glob("it-*-of-00003.gguf"))


@pytest.mark.parametrize("asked", [0, 2])
def test_a_file_in_parts_is_read_whole(tmp_path: Path, asked: int) -> None:
    file = open_gguf(split(tmp_path)[asked])
    assert file.metadata["t.string"] == "all of it"
    values = {name: float(tensor.array().max()) for name, tensor in file.tensors.items()}
    assert values == {"a": 0.0, "b": 1.0, "c": 2.0}


def test_parts_that_are_missing_renamed_or_the_same_are_named(tmp_path: Path) -> None:
    first, second, third = split(tmp_path)
    kept = third.read_bytes()
    third.write_bytes(second.read_bytes())
    assert "holds b, as another part does" in (refusal(first) or "")
    third.unlink()
    assert "it-00003-of-00003.gguf is not beside it" in (refusal(second) or "")
    third.write_bytes(kept)
    assert refusal(first) is None
    assert "one of 3 parts" in (refusal(first.rename(tmp_path / "model.gguf")) or "")


def refusal(path: Path) -> str | None:
    """What is said of a file, whose tensors lie within it if nothing is."""
    try:
        file = open_gguf(path)
    except InputError as error:
        return str(error)
    assert all(tensor.data.size <= path.stat().st_size for tensor in file.tensors.values())
    return None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b[:4] + struct.pack("<I", 9) + b[8:], "its version is 9"),
        (lambda b: b"GGML" + b[4:], "does not begin with the letters GGUF"),
        (lambda b: b[:8] + struct.pack("<Q", 1 << 40) + b[16:], "1099511627776 tensors, more than fit"),
    ],
)
def test_a_broken_file_is_refused_in_a_sentence(written: Path, change: Callable[[bytes], bytes], words: str) -> None:
    written.write_bytes(change(written.read_bytes()))
    with pytest.raises(InputError, match=words):
        open_gguf(written)


def test_a_tensor_that_is_misplaced_or_there_twice_is_refused(written: Path) -> None:
    """The entry of `half`: its name (of the length of `full`), its rank, two sizes, its kind, its offset."""
    full = written.read_bytes()
    entry = full.index(b"half", full.index(b"full"))
    at = entry + 4 + 4 + 2 * 8 + 4
    (offset,) = struct.unpack_from("<Q", full, at)
    for place, change, words in (
        (at, struct.pack("<Q", offset + 1), "'half' lies outside the file"),
        (at, struct.pack("<Q", 1 << 40), "'half' lies outside the file"),
        (entry, b"full", "'full' stands in it twice"),
    ):
        written.write_bytes(full[:place] + change + full[place + len(change) :])
        with pytest.raises(InputError, match=words):
            open_gguf(written)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_are_the_tensors_that_were_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.randn(3, 4).to(dtype), "b": torch.randn(5).to(dtype)}
    save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    file = open_safetensors(tmp_path / "m.safetensors")
    assert file.metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        assert file.tensors[name].shape == tuple(tensor.shape)
        assert file.tensors[name].data.tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def edited(header: dict[str, Any]) -> bytes:
    import json

    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], "more": 1}, "b": []},
        {"a": {"dtype": "F32", "shape": [4, 5], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [64, 128]}},
        {"a": {"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]}},
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"a": {"dtype": "Q4", "shape": [16], "data_offsets": [0, 64]}},
    ],
)
def test_a_wrong_safetensors_header_is_refused(tmp_path: Path, header: dict[str, Any]) -> None:
    (tmp_path / "m.safetensors").write_bytes(edited(header))
    with pytest.raises(InputError, match="damaged or cut off"):
        open_safetensors(tmp_path / "m.safetensors")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_file_that_memory_cannot_map_is_not_called_unreadable(tmp_path: Path) -> None:
    script = """
import resource, sys
from outrider.backends.native.files import open_gguf
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
try:
    open_gguf(sys.argv[1])
except MemoryError:
    print("memory")
"""
    file = tmp_path / "m.gguf"
    with file.open("wb") as made:
        made.truncate(64 << 20)
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=False)
    assert done.stdout == "memory\n", done.stderr
