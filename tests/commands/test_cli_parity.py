"""`outrider parity` as a user calls it, on an engine that the tests write themselves in vLLM's place."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from parity_world import PROMPTS, drafter_at, engine, target_at

from outrider import cli
from outrider.params import InputError
from outrider.proofs import vllm


def test_texts_and_acceptance_are_compared_with_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm, "runner", lambda python: engine)
    monkeypatch.setattr(vllm, "check", lambda python: None)
    model, drafter = target_at(tmp_path / "target"), drafter_at(tmp_path / "drafter")
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(" ".join(map(str, p))) for p in PROMPTS[:4]))
    arguments = [
        "parity",
        str(model),
        "--drafter",
        str(drafter),
        "--drafter",
        "lookup",
        "--python",
        "none",
        "--tokens",
        "3",
    ]
    arguments += ["--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "12"]
    assert cli.main(arguments) == 0
    shown, said = capsys.readouterr()
    assert (
        f"outrider: decoding with {drafter} (1 of 2) in Outrider\noutrider: starting vLLM with lookup (2 of 2)\n"
        in said
    )
    assert "Parity with vLLM 0: all 4 texts are identical" in " ".join(shown.split())
    assert cli.main([*arguments, "--json"]) == 0
    shown, said = capsys.readouterr()
    assert "decoding" not in said
    results, inside = json.loads(shown)
    assert results["passed"]
    assert inside["passed"]
    assert (results["method"], inside["method"]) == ("eagle", "custom_class")
    assert results["plain"] == []
    assert results["acceptance"][0]["outrider"] == results["acceptance"][0]["vllm"]
    assert "torch" in results["versions"]
    for extra, sentence in ((["--to", "medusa"], "vllm and speculators"), (["--tokens", "0"], "must be at least 1")):
        assert cli.main([*arguments, *extra]) == 2
        assert sentence in capsys.readouterr().err


def test_finished_results_are_printed_when_a_later_drafter_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(job: dict[str, Any]) -> Generator[dict[str, Any]]:
        runs = (made for made in engine(job) if "texts" in made)
        yield from itertools.islice(runs, 2)  # without drafts, and with the first drafter
        raise InputError("vLLM has ended")

    monkeypatch.setattr(vllm, "runner", lambda python: failing)
    monkeypatch.setattr(vllm, "check", lambda python: None)
    model, drafter = target_at(tmp_path / "target"), drafter_at(tmp_path / "drafter")
    (tmp_path / "p.jsonl").write_text(json.dumps("1 2 3"))
    arguments = ["parity", str(model), "--drafter", str(drafter), "--drafter", "lookup", "--python", "none"]
    arguments += ["--tokens", "3", "--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "12", "--json"]
    assert cli.main(arguments) == 2
    shown, said = capsys.readouterr()
    assert "vLLM has ended" in said
    assert [one["method"] for one in json.loads(shown)] == ["eagle"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("python", "says"),
    [("no/python", "is not a working Python"), ("", "is not a working Python"), ("-", "has no vLLM")],
)
def test_a_python_without_vllm_is_refused_before_a_model_is_loaded(
    python: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The tests' own Python has no vLLM."""
    given = sys.executable if python == "-" else python or str(tmp_path)
    assert cli.main(["parity", "demo", "--drafter", "none", "--python", given]) == 2
    assert capsys.readouterr().err == f"outrider: {given} {says}; `make parity` makes an environment with vLLM\n"
