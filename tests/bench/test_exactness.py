"""Texts with drafts against texts without: which drafters, temperatures and batches, and one run on the demo target."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # where its scripts find one another

import exactness  # noqa: E402
from outrider.names import Place, best  # noqa: E402


def test_all_kinds_of_drafters_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness.names, "_smollm2", lambda: Place("smollm2", "", drafter=best("smollm2")))
    results = exactness.drafters("smollm2")  # without its file, which would be converted
    assert results[-2:] == ["eagle3:smollm2/eagle3", "suffix+eagle3:smollm2/eagle3"]
    assert "mamba:demo?vocab=text" in results
    assert "lookup+suffix+ngram" in results
    assert exactness.drafters("demo")[-2:] == ["eagle:demo/hass", "suffix+eagle:demo/hass"]


def test_a_model_for_which_none_ships_has_those_of_every_model() -> None:
    assert exactness.drafters(str(ROOT)) == [*exactness.DRAFTERS]


@pytest.mark.parametrize("count", range(1, 9))
def test_each_drafter_meets_every_temperature_and_batch(count: int) -> None:
    names = [str(i) for i in range(count)]
    met = {exactness.plan(group, names) for group in range(9 * count)}
    assert met == set(product(names, exactness.TEMPERATURES, exactness.BATCHES))
    early = {exactness.plan(group, names)[:2] for group in range(3 * count)}
    assert early == set(product(names, exactness.TEMPERATURES)), "every temperature in its first three groups"


@pytest.mark.trained
def test_the_texts_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a run that was stopped goes on where it was."""
    asked, out = tmp_path / "prompts.jsonl", tmp_path / "made" / "exactness.jsonl"
    asked.write_text("".join(json.dumps(f"Once there were {i} birds") + "\n" for i in range(24)), encoding="utf-8")
    drafters = ["eagle:demo/hass", "suffix + eagle:demo/hass", "model:demo?vocab=text"]

    def run(texts: int) -> list[dict]:
        options = ["demo", "--prompts", asked, "--texts", texts, "--tokens", 6, "--out", out, "--drafters", *drafters]
        monkeypatch.setattr(sys, "argv", ["exactness.py", *map(str, options)])
        exactness.main()
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]

    first = run(8)
    assert [line["drafter"] for line in first] == drafters[:1]
    lines = run(20)
    assert lines[:1] == first
    assert [(line["drafter"], line["texts"]) for line in lines] == list(zip(drafters, (8, 8, 4), strict=True))
    assert all(line["equal"] == line["texts"] for line in lines)
    assert all(line["tau"] > 1 for line in lines[:2]), "drafts were made and taken"
    said = capsys.readouterr().out.splitlines()
    assert said[-4:] == [
        "eagle:demo/hass: 8 of 8", "suffix + eagle:demo/hass: 8 of 8", "model:demo?vocab=text: 4 of 4",
        "20 of 20 texts equal, token for token",
    ]  # fmt: skip
