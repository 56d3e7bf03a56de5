"""Every drafter on every kind of target: with drafts the text is that without them, token for token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import contract_weights
import pytest
import torch
from contract_world import NAMES, PROMPTS, needs, outputs
from gguf_files import write
from restless import Restless
from small import VOCAB, build

from outrider import drafters
from outrider.backends.native import library as native
from outrider.backends.native.target import load
from outrider.backends.torch import load_target
from outrider.backends.torch.module import ModuleTarget
from outrider.core.protocols import Drafter, Target
from outrider.core.types import Budget
from outrider.engine import Engine, Request
from outrider.params import Sampling

STOCK, NATIVE = 32, 128  # hidden sizes: native passes read heads of 32
SIZES = {
    "hidden_size": NATIVE, "intermediate_size": 160, "head_dim": 32, "max_position_embeddings": 256,
    "initializer_range": 0.1,
}  # fmt: skip
ALONE = {"num_key_value_heads": None, "head_dim": None}  # keys for every head
SCALED = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}
HALF, WHOLE = torch.bfloat16, torch.float32


def stock(name: str, **more: Any) -> Callable[[Path], Target]:
    """transformers' own forward, in float64."""
    return lambda folder: load_target(build(name, **more))


def made(name: str, dtype: torch.dtype, **more: Any) -> Any:
    return build(name, dtype, **{k: v for k, v in {**SIZES, **more}.items() if v is not None})


def files(name: str, dtype: torch.dtype, **more: Any) -> Callable[[Path], Target]:
    """Native passes over safetensors."""

    def loaded(folder: Path) -> Target:
        made(name, dtype, **more).save_pretrained(folder)
        return load(folder)

    return loaded


def blocks(kind: str, dtype: str, weights: str = "full") -> Callable[[Path], Target]:
    """Native passes over a GGUF file."""
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}  # wide enough for blocks of 256
    return lambda folder: load(write(folder / "m.gguf", made("llama", WHOLE, **sizes), kind), dtype, weights)


STOCKS = {
    **{name: stock(name) for name in ("llama", "qwen3", "gpt_neox", "gemma3", "mixtral", "gpt2", "granite")},
    "llama with a tied head": stock("llama", tie_word_embeddings=True),
}
NATIVES = {
    "phi3, bfloat16": files("phi3", HALF, head_dim=None),
    "gemma2, float32": files("gemma2", WHOLE, **SCALED),
    "gpt2, float32": files("gpt2", WHOLE, **ALONE, intermediate_size=None),
    "cohere2, bfloat16": files("cohere2", HALF, head_dim=None),
    "phi, float32": files("phi", WHOLE, **ALONE),
    "llama in memory, bfloat16": lambda folder: ModuleTarget(made("llama", HALF)),
    "llama in memory, float32": lambda folder: ModuleTarget(made("llama", WHOLE)),
    "F16 of a file, float32": blocks("F16", "float32"),
    "Q4_K of a file, bfloat16": blocks("Q4_K", "bfloat16"),
    "Q8_0 of a file, integer products": blocks("Q8_0", "bfloat16", "native"),
}
Text = list[list[int]]
# Trees, chains, and rounds without drafts, in which more tokens come together than are read one by one.
BUDGETS = Budget(12, 4), Budget(4, 8, shape=(1, 1, 1)), *[Budget(1, 0)] * 5
COMPILED = {*contract_weights.MAKERS} - {"eagle", "peagle"}  # beside native targets; heads with a bias have no EAGLE


class Case:
    """A target, and what it writes without drafts, by rule."""

    def __init__(self, target: Target, folder: Path):
        self.target, self.folder = target, folder
        self.plain = {rule: self.texts(drafters.load("none", target), rule) for rule in ("coupled", "rejection")}

    def texts(self, drafter: Drafter, rule: str) -> Text:
        """Rows that end at their own time and are followed by others. Under `rejection`, texts depend on drafts where
        they are sampled."""
        heats = (0.0, 0.7, 1.0) if rule == "coupled" else (0.0,)
        requests = [Request(p, i, 18 + i, Sampling(heats[i % len(heats)])) for i, p in enumerate(PROMPTS[:3])]
        engine = Engine.of(self.target, drafter, Restless(BUDGETS), rule)
        return [row.output for row in outputs(engine, requests, batch_size=2)]


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param in NATIVES and native.library("float32", "float32") is None:
        pytest.skip("native passes need AVX2 or NEON, and a compiler")
    place = tmp_path_factory.mktemp("target")
    target = {**STOCKS, **NATIVES}[request.param](place)
    build("llama").save_pretrained(place / "draft")
    for name, make in contract_weights.MAKERS.items():
        make(place / f"draft-{name}", VOCAB, target.hidden)
    return Case(target, place / "draft")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [*STOCKS, *NATIVES], indirect=True)
def test_drafts_change_no_text(case: Case, name: str) -> None:
    drafter = drafters.load(needs(name, str(case.folder)), case.target)
    if name in COMPILED:
        assert (getattr(drafter.uncalibrated, "compiled", None) is not None) is (case.target.hidden > STOCK)
    assert case.texts(drafter, "coupled") == case.plain["coupled"]


@pytest.mark.parametrize("name", [*contract_weights.MAKERS, "model"])
@pytest.mark.parametrize("case", ["llama", *NATIVES], indirect=True)
def test_rejection_at_temperature_zero_changes_no_text(case: Case, name: str) -> None:
    drafter = drafters.load(needs(name, str(case.folder)), case.target)
    assert case.texts(drafter, "rejection") == case.plain["rejection"]
