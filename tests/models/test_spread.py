"""Whether processes can hold a target together, and which device is whose; training with it is in test_distributed."""

from __future__ import annotations

from pathlib import Path

import pytest
import small
from gguf_files import write

from outrider.backends.torch import load_target, spread
from outrider.names import Place
from outrider.params import InputError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts the first of four."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


def test_it_must_be_started_as_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in spread.STARTED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="needs processes; start it with torchrun --nproc-per-node 2 -m outrider"):
        load_target(small.saved(tmp_path, "llama"), processes=2)


@pytest.mark.usefixtures("started")
def test_processes_that_cannot_form_groups_are_refused() -> None:
    with pytest.raises(InputError, match="4 processes cannot form groups of 3; start a multiple of 3"):
        load_target("demo", processes=3)
    with pytest.raises(InputError, match="leave device=cuda:1 out"):
        load_target("demo", processes=2, device="cuda:1")
    with pytest.raises(InputError, match="processes=2 is for models that are loaded by name"):
        load_target(small.build("llama"), processes=2)
    assert spread.config_for(4).tp_size == 4
    two = spread.config_for(2)
    assert two.tp_size == 2, "two groups of two, without wrappers for training"
    assert getattr(two, "dp_size", 1) == 1


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", "no plan to spread .*, a gpt2, over several processes"),
        ("llama", "the 2 key-value heads of .* cannot be spread evenly over 4 processes"),
    ],
)
def test_models_that_cannot_be_spread_are_refused(tmp_path: Path, family: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_target(small.saved(tmp_path, family), processes=4)


@pytest.mark.usefixtures("started")
def test_the_demo_has_too_few_heads() -> None:
    with pytest.raises(InputError, match="the 3 heads of demo cannot be spread evenly over 2 processes"):
        load_target("demo", processes=2)


@pytest.mark.usefixtures("started")
def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "small.gguf", small.build("llama", vocab_size=256))
    with pytest.raises(InputError, match=r"small.gguf is a .gguf file, .* name a folder"):
        load_target(Place("small.gguf", str(tmp_path), gguf=file.name), processes=2)


def test_every_process_of_a_machine_has_a_gpu_of_its_own() -> None:
    assert [spread.device_of("auto", 4, local) for local in range(4)] == [f"cuda:{i}" for i in range(4)]
    assert spread.device_of("cuda", 4, 2) == "cuda:2"
    assert spread.device_of("cuda:1", 4, 2) == "cuda:1", "asked for by name"
    assert spread.device_of("auto", 0, 1) == "cpu"
    assert spread.device_of("cpu", 4, 1) == "cpu"
    with pytest.raises(InputError, match="this machine has 2 GPUs, and process 3 needs its own"):
        spread.device_of("auto", 2, 2)
