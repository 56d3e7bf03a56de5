"""Every method trains on, and drafts for, targets of several families: two steps, and the text is plain decoding's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf_files
import pytest
import torch
from compiled_code import needs_code
from safetensors.torch import load_file
from small import build
from training_world import RECIPE

from outrider import drafters
from outrider.backends.native.target import NativeTarget, load
from outrider.backends.torch import HFTarget
from outrider.backends.torch.module import ModuleTarget, checkpoint_of
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Target
from outrider.engine import Engine, Request, generate
from outrider.params import InputError, Sampling
from outrider.training import features, loop, objectives
from outrider.training.data import Document, pack
from outrider.training.features import see


def documents() -> list[Document]:
    g = torch.Generator().manual_seed(2)
    made = [tuple(torch.randint(1, 97, (20,), generator=g).tolist()) for _ in range(12)]
    return [Document(tokens, (True,) * 20, f"{i:02d}") for i, tokens in enumerate(made)]


def text(target: Target, spec: str, temperature: float) -> list[int]:
    budget = FixedBudget(12, 4)
    engine = Engine(target, drafters.load(spec, target), budget, GumbelNoise(target.vocab))
    for piece in generate(engine, [Request([5, 6, 7, 8], 3, 20, Sampling(temperature))]):
        row = piece.row
    return row.output


@pytest.mark.parametrize("method", ["eagle", "eagle3", "block"])
@pytest.mark.parametrize("name", ["gpt2", "bloom", "gpt_neo", "mpt"])
def test_a_layer_is_as_wide_as_those_of_configs_with_other_names(name: str, method: str) -> None:
    target = HFTarget(build(name, torch.float32))
    options = {"taps": (0, 1, 2)} if method in ("eagle3", "block") else {}
    shape = objectives.build(method, target, documents(), options).net.config.layer
    assert shape.heads == target.model.config.num_attention_heads > 1
    assert shape.heads * shape.head_dim == target.hidden


@needs_code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("draft_vocab", [40, 0])
@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle", "hass", "eagle3", "block"])
def test_compiled_passes_stop_no_gradient(method: str, draft_vocab: int, dtype: torch.dtype) -> None:
    """Rows of the head are fast products while it drafts, and no gradient passes through these."""
    size = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    model, batch = build("llama", dtype, **size), pack(documents(), 64)
    options = {"draft_vocab": draft_vocab} | ({"taps": (0, 1, 2)} if method in ("eagle3", "block") else {})
    options |= {"share_head": True} if method == "medusa" else {}
    results = []
    native = [NativeTarget(checkpoint_of(model), str(dtype).removeprefix("torch."))]
    for target in (HFTarget(model), ModuleTarget(model), *native):
        torch.manual_seed(3)
        objective = objectives.build(method, target, documents(), options).train()
        seen = see(HFTarget(model), batch, objective.taps)
        loss, weight, _ = objective(batch, seen, 1)
        (loss / weight).backward()
        results.append({name: p.grad for name, p in objective.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    assert any(bool(grad.any()) for grad in results[0].values())
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, rtol=1e-4, atol=1e-6)
        for result in results[2:]:  # in bfloat16 its logits are rounded elsewhere
            far = 1e-4 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(result[name], grad, rtol=far, atol=far * float(grad.abs().max()))


@needs_code
@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle", "hass", "eagle3", "block"])
def test_drafters_learn_from_the_weights_that_they_draft_for(tmp_path: Path, method: str) -> None:
    """Those of a .gguf file, multiplied as integers; features that full weights gave are not taken for theirs."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    file = gguf_files.write(tmp_path / "m.gguf", build("llama", torch.float32, **sizes), "Q4_1")
    target, full = load(file, way="native"), load(file)
    assert target.integers
    assert features.fingerprint(target) != features.fingerprint(full)
    options = {"taps": (0, 1, 2)} if method in ("eagle3", "block") else {}
    recipe = replace(RECIPE, method=method, steps=2, evaluate=2, prompts=1, options=options)
    result = loop.train(target, documents(), tmp_path / "run", recipe, quiet=True)
    assert text(target, str(result.folder), 0.0) == text(target, "none", 0.0)
    with pytest.raises(InputError, match="another target"):
        loop.train(full, documents(), tmp_path / "run", recipe, quiet=True)


@pytest.mark.parametrize("method", ["medusa", "medusa2", "hydra", "eagle", "hass", "eagle3"])
def test_targets_in_half_precision(tmp_path: Path, method: str) -> None:
    """The drafter learns in float32 all the same, or small updates would be lost."""
    target = HFTarget(build("llama", torch.bfloat16))
    options = {"taps": (0, 1, 2)} if method == "eagle3" else {}
    recipe = replace(RECIPE, method=method, steps=2, evaluate=2, prompts=1, options=options)
    result = loop.train(target, documents(), tmp_path, recipe, quiet=True)
    kinds = {t.dtype for t in load_file(result.folder / "model.safetensors").values() if t.is_floating_point()}
    assert kinds == {torch.float32}
    assert result.best == result.best


FAMILIES = [(family, False) for family in ("llama", "qwen3", "gpt_neox", "gemma3", "mixtral")]


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle", "hass", "eagle3"])
@pytest.mark.parametrize(("family", "tied"), [*FAMILIES, ("llama", True), ("gemma3", True)])
def test_trains_and_drafts(tmp_path: Path, family: str, method: str, tied: bool) -> None:
    """A tied head is its target's embedding, which Gemma scales; else families do not differ in it."""
    if tied and method in ("hass", "hydra"):
        pytest.skip("as eagle and medusa: the head is used in the same way")
    target = HFTarget(build(family, torch.float32, tie_word_embeddings=tied))
    options = {"taps": (0, 1, 2)} if method == "eagle3" else {}
    recipe = replace(RECIPE, method=method, steps=2, evaluate=2, prompts=1, options=options)
    result = loop.train(target, documents(), tmp_path, recipe, quiet=True)
    for temperature in (0.0, 1.0):
        assert text(target, str(result.folder), temperature) == text(target, "none", temperature)
