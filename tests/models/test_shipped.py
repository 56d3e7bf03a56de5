"""The drafters that ship: the demo's load by name, draft for their target, and change nothing; all have cards."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.models import Models
from outrider.budgets.budgeter import FixedBudget
from outrider.checkpoints import native, read
from outrider.params import InputError

DEMO = Path(str(files("outrider"))) / "demo"
KEPT = sorted(file.parent for file in Path(__file__).resolve().parents[2].glob("drafters/*/config.json"))
# SPEC -> tokens per round that it must reach at least, on texts that it should know
SPECS = {"medusa:demo": 1.5, "hydra:demo": 1.7, "eagle:demo": 2.0, "eagle:demo/hass": 2.0, "eagle3:demo": 2.0,
         "block:demo": 1.5, "mamba:demo": 1.7, "model:demo/llama": 1.5}  # fmt: skip


OPTIONS = {t: {"temperature": t, "max_new_tokens": 24, "seed": 3} for t in (0.0, 1.0)}


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.fixture(scope="module")
def prompts(models: Models) -> list[list[int]]:
    """The end of the first held-out prompt of every domain."""
    rows = [json.loads(line) for line in (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    first = {row["domain"]: row for row in reversed(rows)}
    return [models.llm().encode(row.get("messages") or row["text"])[-160:] for row in first.values()]


@pytest.fixture(scope="module")
def plain(models: Models, prompts: list[list[int]]) -> dict[float, list[list[int]]]:
    """What the target writes alone, by temperature."""
    return {t: [text.tokens for text in models.llm().generate(prompts, **options)] for t, options in OPTIONS.items()}


@pytest.mark.parametrize("spec", SPECS)
def test_drafts_for_the_demo_target(models: Models, prompts: list[list[int]], plain: Any, spec: str) -> None:
    llm = models.with_drafter("plain", spec)
    for temperature, options in OPTIONS.items():
        texts = llm.generate(prompts, budget=FixedBudget(16, 5), **options)
        assert [t.tokens for t in texts] == plain[temperature]
        tau = sum(t.usage.new_tokens - 1 for t in texts) / sum(t.usage.rounds for t in texts)
        assert tau > SPECS[spec], f"T = {temperature}"


@pytest.mark.parametrize("spec", SPECS)
def test_has_a_card(spec: str) -> None:
    name = spec.partition(":")[2].removeprefix("demo").strip("/") or spec.partition(":")[0]
    assert_is_a_card((DEMO / name / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["eagle3", "hass", "medusa"])
def test_has_a_card_for_smollm2(name: str) -> None:
    card = (DEMO.parent / "smollm2" / name / "README.md").read_text(encoding="utf-8")
    assert_is_a_card(card)
    for task in ("MT-bench", "HumanEval", "GSM8K", "Alpaca", "CNN/DailyMail", "Natural Questions"):
        assert task in card


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_what_is_kept_beside_the_package_has_a_card_and_whole_weights(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert_is_a_card(card)
    assert "base_model: " in card
    checkpoint = read(folder)
    native.check(checkpoint, folder)
    assert checkpoint.mark
    assert (folder / "model.safetensors").stat().st_size < 60e6


def assert_is_a_card(card: str) -> None:
    for part in ("license:", "Data.", "seed", "held-out" if "held-out" in card else "Held out", "tau"):
        assert part in card


def test_all_weights_are_small() -> None:
    size = sum(file.stat().st_size for file in DEMO.rglob("*.safetensors"))
    assert size < 60e6


def test_what_ships_needs_no_method(models: Models) -> None:
    named, full = (models.with_drafter("plain", spec).drafter for spec in ("demo/hass", "eagle:demo/hass"))
    assert type(named) is type(full)
    with pytest.raises(InputError, match=r"no 'nothing' for demo is installed; there are .*hass"):
        models.with_drafter("plain", "demo/nothing")
    with pytest.raises(InputError, match="name the method, as in model:demo/draft"):
        models.with_drafter("plain", "demo/draft")
