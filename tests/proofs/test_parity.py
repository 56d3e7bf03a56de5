"""The parity certificate, held against an engine that the tests write themselves (support/parity_world.py)."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from parity_world import HIDDEN, NEW, PROMPTS, TOKENS, VOCAB, block_at, drafter_at, engine, parallel_at, target_at
from safetensors.torch import load_file, save_file

from outrider import load
from outrider.params import InputError
from outrider.proofs import parity, vllm, vllm_decode

Events = Generator[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_at(tmp_path_factory.mktemp("parity") / "target")


@pytest.fixture(scope="module")
def drafter(model: Path) -> Path:
    return drafter_at(model.parent / "drafter")


def certify(
    model: Path, drafter: Path | str, decode: vllm.Decode = engine, prompts: list[list[int]] = PROMPTS
) -> parity.Certificate:
    def loaded(spec: Any) -> Any:
        return load(str(model), spec, dtype="float32")

    (result,) = parity.certify(loaded, [str(drafter)], model, prompts, decode, TOKENS, NEW)
    return result


def test_an_equal_engine_agrees_round_for_round(model: Path, drafter: Path) -> None:
    result = certify(model, drafter)
    assert result.passed
    assert not result.splits
    assert result.same_rounds == len(PROMPTS), "every count is equal, not merely within an interval"
    assert [p.ours for p in result.places] == [p.theirs for p in result.places]
    assert result.places[0].ours.hits > 5, "something is accepted, or nothing is tested"
    assert result.places[0].ours.trials > result.places[0].ours.hits
    assert result.tau_ours == result.tau_theirs > 1
    assert result.written == NEW * len(PROMPTS)
    assert "all 16 texts are identical" in result.sentence


@pytest.mark.parametrize("kind", ["causal", "open", "parallel"])
def test_drafts_of_one_pass_agree_round_for_round(model: Path, kind: str) -> None:
    """Block drafters as DFlash, and P-EAGLE: what the exported folder drafts by hand, from the whole text each time."""
    folder = model.parent / kind
    made = parallel_at(folder) if kind == "parallel" else block_at(folder, kind == "causal")
    jobs: list[dict[str, Any]] = []
    result = certify(model, made, lambda job: engine(jobs.append(job) or job))  # type: ignore[func-returns-value]
    assert result.passed
    assert not result.splits
    assert result.same_rounds == len(PROMPTS)
    assert [p.ours for p in result.places] == [p.theirs for p in result.places]
    assert result.places[0].ours.hits > 5, "something is accepted, or nothing is tested"
    remaining = jobs[0]["context"] - max(map(len, PROMPTS))
    assert remaining >= NEW - 2 + 2 * TOKENS + 1, "vLLM drafts zeros where this chain and the next do not fit"


def test_one_round_more_shows_where_the_text_is_the_same(model: Path, drafter: Path) -> None:
    """No interval of rates would: counts of exported drafters are held against each other as they are."""

    def other(job: dict[str, Any]) -> Events:
        for event in engine(job):
            if "texts" in event and any(event["accepted_at"][3]):
                counts = event["accepted_at"][3]
                counts[sum(map(bool, counts)) - 1] -= 1  # one token less in one round, at the deepest place
            yield event

    result = certify(model, drafter, other)
    assert all(place.agrees for place in result.places)
    assert (result.uneven, result.same_rounds, result.same_text) == ([3], len(PROMPTS) - 1, True)
    assert not result.passed
    assert "acceptance DIFFERS" in result.sentence
    result = certify(model, "lookup", other)
    assert 3 in result.uneven
    assert result.passed, "what learns as it goes may differ within the intervals"


@pytest.mark.parametrize("spec", ["suffix", "lookup + ngram"])
def test_a_drafter_inside_agrees(model: Path, spec: str) -> None:
    result = certify(model, spec)
    assert result.passed
    assert result.method == "custom_class"
    assert result.places[0].ours.hits > 5
    most = result.same_rounds > len(PROMPTS) * 3 // 4
    assert most or "+" in spec, "the slow engine forgets what its drafter has learnt, which tells most in a mix"
    with pytest.raises(InputError, match="outrider export"):
        certify(model, "lookahead")


def test_another_drafter_or_text_shows(model: Path, drafter: Path) -> None:
    def shifted(job: dict[str, Any]) -> Events:
        """vLLM would read a damaged folder without a word: here, fc's halves are swapped."""
        file = Path(job["runs"][1]["speculative"]["model"]) / "model.safetensors"
        tensors = load_file(file)
        tensors["fc.weight"] = tensors["fc.weight"].roll(HIDDEN, 1)
        save_file({k: t.contiguous() for k, t in tensors.items()}, file)
        yield from engine(job)

    result = certify(model, drafter, shifted)
    assert not result.splits, "the text does not depend on the drafter"
    assert not result.same_acceptance
    assert not result.passed
    assert "acceptance DIFFERS" in result.sentence

    few = PROMPTS[:5]

    def silent(job: dict[str, Any]) -> Events:
        """A vLLM that drafted nothing is no evidence."""
        nothing = {"drafts": [0] * len(few), "accepted_at": [[0] * TOKENS] * len(few)}
        yield from ({**event, **nothing} if "texts" in event else event for event in engine(job))

    result = certify(model, drafter, silent, few)
    assert all(place.agrees for place in result.places)
    assert not result.passed
    assert "NO parity" in result.sentence

    def changed(run: int, text: int, at: int) -> vllm.Decode:
        """Another token in one text of one run."""

        def decode(job: dict[str, Any]) -> Events:
            number = -1
            for event in engine(job):
                number += "texts" in event
                if number == run and "texts" in event:
                    event["texts"][text][at] = (event["texts"][text][at] + 1) % VOCAB
                yield event

        return decode

    result = certify(model, drafter, changed(1, 1, 5), few)
    assert [(s.prompt, s.position, s.rounding) for s in result.splits] == [(1, 5, False)]
    assert result.splits[0].margin > 0.01
    assert [(s.prompt, s.position, s.rounding) for s in result.plain] == [(1, 5, False)]
    assert "1 of 5 texts differ" in result.sentence

    result = certify(model, drafter, changed(0, 2, 7), few)
    assert not result.splits
    assert [(s.prompt, s.position) for s in result.plain] == [(2, 7)]
    assert not result.passed
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
    def run(runs: list[Any]) -> list[dict[str, Any]]:
        return list(vllm.runner(script)({"runs": runs}))

    script = tmp_path / "python"
    with pytest.raises(InputError, match="make parity"):
        run([])
    script.write_text("#!/bin/sh\necho 'Traceback' >&2\necho 'ValueError: no such model' >&2\necho 'bye' >&2\nexit 3\n")
    script.chmod(0o755)
    with pytest.raises(RuntimeError, match="failed: ValueError: no such model"):
        run([])
    script.write_text("#!/bin/sh\necho '{\"done\": 0}'\necho '{\"texts\": [[1]]}'\n")
    assert run([vllm.PLAIN]) == [{"done": 0}, {"texts": [[1]]}]
    with pytest.raises(RuntimeError, match="failed: no message"):
        run([vllm.PLAIN, vllm.PLAIN])
    with pytest.raises(InputError, match="the context has 64"):
        list(
            parity.certify(lambda spec: load(str(model), spec), [str(drafter)], model, [[1] * 60], engine, TOKENS, NEW)
        )
    script = lacking(tmp_path)
    with pytest.raises(InputError, match="has no outrider, which runs inside vLLM"):
        run([vllm.inside(["lookup"], 3)])


def test_vllm_ends_when_its_reader_has_gone(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/id\necho '{{\"done\": 0}}'\nexec sleep 600\n")
    script.chmod(0o755)
    events = vllm.runner(script)({"runs": [vllm.PLAIN]})
    assert next(events) == {"done": 0}
    events.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "id").read_text()), 0)


def lacking(folder: Path) -> Path:
    """A Python that finds no module."""
    script = folder / "bare"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    return script


def test_progress_is_reported(model: Path, drafter: Path) -> None:
    progress: list[tuple[str, int]] = []
    specs = [str(drafter), "lookup"]
    results = parity.certify(
        lambda spec: load(str(model), spec, dtype="float32"), specs, model, PROMPTS, engine, TOKENS, NEW, "vllm",
        lambda doing, texts: progress.append((doing, texts)),
    )  # fmt: skip
    first, _ = next(results), progress.clear()
    assert first.drafter == str(drafter)
    assert first.passed
    assert [c.drafter for c in results] == ["lookup"]
    assert [doing for doing, n in progress if not n] == [
        "starting vLLM with lookup (2 of 2)", "decoding with lookup (2 of 2) in vLLM",
    ]  # fmt: skip
    texts = len(PROMPTS)
    assert [one for one in progress if one[1]] == [
        ("decoding with lookup (2 of 2) in vLLM", texts), *[("decoding with lookup (2 of 2) in Outrider", 1)] * texts,
    ]  # fmt: skip


def test_the_script_under_vllms_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a vLLM of our own making: what it is called with, in which groups, and how its counts are read."""
    asked: list[dict[str, Any]] = []
    make = types.SimpleNamespace

    class LLM:
        def __init__(self, target: str, **options: Any):
            asked.append({**options, "target": target})

        def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
            """Every prompt's first token is how many rounds accept two tokens."""
            assert len(prompts) <= asked[-1]["max_num_seqs"] == 16
            counts = [make(histogram=[1, 1, p["prompt_token_ids"][0]]) for p in prompts]
            if "per_request_spec_decode_metrics" not in asked[-1]:
                counts = [None] * len(prompts)
            ids = [[*p["prompt_token_ids"], params["max_tokens"]] for p in prompts]
            return [make(outputs=[make(token_ids=i, spec_decode_metrics=c)]) for i, c in zip(ids, counts, strict=True)]

    fake = types.SimpleNamespace(LLM=LLM, SamplingParams=lambda **options: options, __version__="0.0")
    monkeypatch.setitem(sys.modules, "vllm", fake)  # type: ignore[arg-type]
    runs = [vllm.PLAIN, vllm.inside(["lookup"], 2)]
    prompts = [[i] for i in range(20)]
    job = {"target": "t", "prompts": prompts, "max_new_tokens": 7, "context": 9, "runs": runs}
    events: list[dict[str, Any]] = []
    vllm_decode.main(job, events.append)
    assert [event.get("done") for event in events] == [0, 16, 20, None] * 2
    plain, result = events[3], events[7]
    assert plain["texts"] == result["texts"] == [[i, 7] for i in range(20)]
    assert plain["drafts"] == [0] * 20
    assert plain["accepted_at"] == [[]] * 20
    assert result["drafts"] == [2 + i for i in range(20)]
    assert result["accepted_at"] == [[1 + i, i] for i in range(20)]
    assert asked[0]["speculative_config"] is None
    assert asked[1]["speculative_config"] == {
        "method": "custom_class", "model": "outrider.integrations.vllm.Proposer", "num_speculative_tokens": 2,
    }  # fmt: skip
    assert asked[1]["additional_config"] == {"outrider": ["lookup"]}
    assert asked[1]["dtype"] == "float32"
    assert vllm.exported("eagle3", "d", 3, True)["speculative"]["parallel_drafting"] is True
    assert vllm.exported("eagle3", "d", 3, True)["rows"] == 1
    assert vllm.exported("block", "d", 3, False)["speculative"]["method"] == "dflash"
