"""The parity certificate, held against an engine that the tests write themselves (support/parity_world.py)."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from parity_world import HIDDEN, NEW, PROMPTS, TOKENS, VOCAB, drafter_at, engine, target_at
from safetensors.torch import load_file, save_file

from outrider import load
from outrider.proofs import parity, vllm, vllm_decode
from outrider.types import InputError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_at(tmp_path_factory.mktemp("parity") / "target")


@pytest.fixture(scope="module")
def drafter(model: Path) -> Path:
    return drafter_at(model.parent / "drafter")


def certify(model: Path, drafter: Path | str, decode: vllm.Decode = engine) -> parity.Certificate:
    def loaded(spec: Any) -> Any:
        return load(str(model), spec, dtype="float32")

    (found,) = parity.certify(loaded, [str(drafter)], model, PROMPTS, decode, TOKENS, NEW)
    return found


def test_an_equal_engine_agrees_round_for_round(model: Path, drafter: Path) -> None:
    found = certify(model, drafter)
    assert found.passed
    assert not found.splits
    assert found.same_rounds == len(PROMPTS), "every count is equal, not merely within an interval"
    assert [p.ours for p in found.places] == [p.theirs for p in found.places]
    assert found.places[0].ours.hits > 5, "something is accepted, or nothing is tested"
    assert found.places[0].ours.trials > found.places[0].ours.hits
    assert found.tau_ours == found.tau_theirs > 1
    assert found.written == NEW * len(PROMPTS)
    assert "all 16 texts are identical" in found.sentence


@pytest.mark.parametrize("spec", ["suffix", "lookup + ngram"])
def test_a_drafter_inside_agrees(model: Path, spec: str) -> None:
    found = certify(model, spec)
    assert found.passed
    assert found.method == "custom_class"
    assert found.places[0].ours.hits > 5
    assert found.same_rounds == len(PROMPTS) or "+" in spec, "the slow engine's mix forgets what it has learnt"
    with pytest.raises(InputError, match="outrider export"):
        certify(model, "lookahead")


def test_another_drafter_or_text_shows(model: Path, drafter: Path) -> None:
    def shifted(job: dict[str, Any]) -> dict[str, Any]:
        """vLLM would read a damaged folder without a word: here, fc's halves are swapped."""
        file = Path(job["runs"][1]["speculative"]["model"]) / "model.safetensors"
        tensors = load_file(file)
        tensors["fc.weight"] = tensors["fc.weight"].roll(HIDDEN, 1)
        save_file({k: t.contiguous() for k, t in tensors.items()}, file)
        return engine(job)

    found = certify(model, drafter, shifted)
    assert not found.splits, "the text does not depend on the drafter"
    assert not found.same_acceptance
    assert not found.passed
    assert "acceptance DIFFERS" in found.sentence

    def silent(job: dict[str, Any]) -> dict[str, Any]:
        """A vLLM that drafted nothing, or whose counters have other names, is no evidence."""
        made = engine(job)
        nothing = {"drafts": [0] * len(PROMPTS), "accepted_at": [[0] * TOKENS] * len(PROMPTS)}
        return {**made, "runs": [{**run, **nothing} for run in made["runs"]]}

    found = certify(model, drafter, silent)
    assert found.same_acceptance
    assert not found.passed
    assert "NO parity" in found.sentence

    def wrong(job: dict[str, Any]) -> dict[str, Any]:
        made = engine(job)
        text = made["runs"][1]["texts"][1]
        text[5] = (text[5] + 1) % VOCAB
        return made

    found = certify(model, drafter, wrong)
    assert [(s.prompt, s.position, s.rounding) for s in found.splits] == [(1, 5, False)]
    assert found.splits[0].margin > 0.01
    assert [(s.prompt, s.position, s.rounding) for s in found.plain] == [(1, 5, False)]
    assert "1 of 16 texts differ" in found.sentence

    def unlike_plain(job: dict[str, Any]) -> dict[str, Any]:
        made = engine(job)
        made["runs"][0]["texts"][2][7] = (made["runs"][0]["texts"][2][7] + 1) % VOCAB
        return made

    found = certify(model, drafter, unlike_plain)
    assert not found.splits
    assert [(s.prompt, s.position) for s in found.plain] == [(2, 7)]
    assert not found.passed
    assert parity.Split(0, 0, 1e-6).rounding


def test_intervals() -> None:
    # Newcombe (1998), "Two-sided confidence intervals for the single proportion", method 3
    for hits, trials, ends in ((81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611))):
        assert parity.Rate(hits, trials).interval == pytest.approx(ends, abs=5e-5)
    assert parity.Rate(0, 0).interval == (0.0, 1.0)
    # Newcombe (1998), table II: 56/70 against 48/80, method 10
    low, high = parity.difference(parity.Rate(56, 70), parity.Rate(48, 80))
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)
    assert parity.Place(parity.Rate(50, 100), parity.Rate(52, 100)).agrees
    assert not parity.Place(parity.Rate(50, 100), parity.Rate(80, 100)).agrees
    assert parity.Place(parity.Rate(0, 0), parity.Rate(0, 0)).agrees


def test_refusals(model: Path, drafter: Path, tmp_path: Path) -> None:
    job: dict[str, Any] = {"runs": []}
    with pytest.raises(InputError, match="make parity"):
        vllm.runner(tmp_path / "python")(job)
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'Traceback' >&2\necho 'ValueError: no such model' >&2\necho 'bye' >&2\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(RuntimeError, match="failed: ValueError: no such model"):
        vllm.runner(script)(job)
    script.write_text('#!/bin/sh\necho \'{"texts": [[1]]}\' > "$4"\n')
    assert vllm.runner(script)(job) == {"texts": [[1]]}
    with pytest.raises(InputError, match="the context has 64"):
        parity.certify(lambda spec: load(str(model), spec), [str(drafter)], model, [[1] * 60], engine, TOKENS, NEW)
    with pytest.raises(InputError, match="has no outrider, which runs inside vLLM"):
        vllm.runner(lacking(tmp_path))({"runs": [vllm.inside(["lookup"], 3)]})


def lacking(folder: Path) -> Path:
    """A Python that finds no module."""
    script = folder / "bare"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    return script


def test_the_script_under_vllms_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a vLLM of our own making: what it is asked, and how its counters are read."""
    asked: list[dict[str, Any]] = []
    counts = iter([None, (4, [3, 1]), (9, [6, 3])])

    class LLM:
        def __init__(self, target: str, **options: Any):
            asked.append({**options, "target": target})

        def get_metrics(self) -> list[Any]:
            make, now = types.SimpleNamespace, next(counts) if asked[-1]["speculative_config"] else None
            if now is None:
                return []
            return [make(name=vllm_decode.COUNTERS[0], value=now[0]), make(name=vllm_decode.COUNTERS[1], values=now[1])]

        def generate(self, prompts: list[Any], law: Any, use_tqdm: bool) -> list[Any]:
            ids = [*prompts[0]["prompt_token_ids"], law["max_tokens"]]
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=ids)])]

    fake = types.SimpleNamespace(LLM=LLM, SamplingParams=lambda **options: options, __version__="0.0")
    monkeypatch.setitem(sys.modules, "vllm", fake)  # type: ignore[arg-type]
    runs = [vllm.PLAIN, vllm.inside(["lookup"], 2)]
    job = {"target": "t", "prompts": [[1], [2]], "max_new_tokens": 7, "context": 9, "runs": runs}
    (tmp_path / "job").write_text(json.dumps(job))
    vllm_decode.main(str(tmp_path / "job"), str(tmp_path / "result"))
    plain, found = json.loads((tmp_path / "result").read_text())["runs"]
    assert plain["texts"] == found["texts"] == [[1, 7], [2, 7]]
    assert plain["drafts"] == [0, 0]
    assert plain["accepted_at"] == [[], []]
    assert found["drafts"] == [4, 5]
    assert found["accepted_at"] == [[3, 1], [3, 2]]
    assert asked[0]["speculative_config"] is None
    assert asked[1]["speculative_config"] == {
        "method": "custom_class", "model": "outrider.integrations.vllm.Proposer", "num_speculative_tokens": 2,
    }  # fmt: skip
    assert asked[1]["additional_config"] == {"outrider": ["lookup"]}
    assert asked[1]["dtype"] == "float32"
    assert vllm.exported("eagle3", "d", 3, True)["speculative"]["parallel_drafting"] is True
    assert vllm.exported("block", "d", 3, False)["speculative"]["method"] == "dflash"
