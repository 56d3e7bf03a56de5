"""The studies behind the pages: each is a grid that `outrider.bench.run` takes; those that prepare something do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.document import Estimate, RoundTime, RunInfo
from outrider.bench.tasks import load
from outrider.bench.types import Sample, Turn
from outrider.core.types import Usage
from papers import contexts, oracles, studies
from papers.document import Cell, Document, Mean, Reliability
from papers.measure import Study, run
from papers.reliability import Bin


@pytest.mark.parametrize("name", [n for n, study in studies.STUDIES.items() if isinstance(study, Study)])
def test_every_study_is_a_grid(name: str) -> None:
    config = studies.STUDIES[name]
    assert isinstance(config, Study)
    config.check()
    assert len(config.rows()) > 1


def test_every_arm_of_a_bandit_is_a_method() -> None:
    mamba = studies.STUDIES["mamba"]
    assert isinstance(mamba, Study)
    labels = {m.label or m.spec for m in mamba.rows()}
    assert {studies.arm_of(shape) for arms in studies.BANDITS.values() for shape in arms} <= labels


def test_methods_go_by_their_labels_where_no_other_has_the_same() -> None:
    rows = [("none", ""), ("HASS, 4x3", "HASS"), ("HASS, 8x4", "HASS"), ("EAGLE, 6x5", "EAGLE")]
    cells = [Cell("t", 0.0, 1, method, label, label or method) for method, label in rows]
    run_ = RunInfo("demo", arguments={"limit": 3, "data": "/a/folder", "out": "/another"})
    results = studies.kept(Document(run_, cells=cells), "x")
    assert results["run"]["arguments"] == {"limit": 3}
    assert [c["method"] for c in results["cells"]] == ["none", "HASS, 4x3", "HASS, 8x4", "EAGLE"]


def test_a_run_beside_other_work_keeps_no_times() -> None:
    messages = Estimate(1.5, 1.4, 1.6)
    bins = Reliability(0.1, 9, [Bin(0.0, 0.1, 9, 0.05, 0.15)])
    cell = Cell("t", 0.0, 1, "HASS", speedup=messages, tau=messages, round_ms=RoundTime(1, 2, 3), reliability=bins)
    mean = Mean(0.0, 1, "HASS", speedup=messages, tokens_per_second=messages, tau=messages, round_ms=RoundTime(1, 2, 3))
    document = Document(RunInfo("smollm2"), cells=[cell], pooled=[mean], macro=[mean])
    for name in (*studies.UNTIMED, "eagle_demo"):
        result = studies.kept(document, name, timed=False)
        for row in (*result["cells"], *result["pooled"], *result["macro"]):
            assert row["tau"] == list(messages)
            assert not set(row) & {"speedup", "tokens_per_second", "round_ms"}
    assert studies.kept(document, "smollm2_confidence")["cells"][0]["reliability"]["bins"], "of confidences"
    assert studies.kept(document, "drafters")["pooled"][0]["speedup"] == list(messages)


def test_tokens_and_rounds_of_each_prompt() -> None:
    """Both turns of a prompt count together, and prompts stand in the same order for every method. Those whose plain
    text repeats itself, and those of a longer run before, are not counted in the figures either."""

    def sample(method: str, digest: int, *turns: tuple[int, int], chunk: int = 0, **more: Any) -> Sample:
        text = [5] * 60 if digest == 9 else list(range(60))
        made = [Turn([text], 1.0, 0.1, [Usage(new_tokens=n, rounds=r)]) for n, r in turns]
        return Sample("t", 0.0, 1, method, chunk, more.get("repeat", 0), 1, digest, [str(digest)], [4], made)

    samples = [
        sample(method, digest, *turns, chunk=chunk)
        for method, of in {
            "none": {7: [(9, 8), (5, 4)], 3: [(4, 3)], 9: [(9, 8)], 1: [(9, 8)]},
            "a": {7: [(9, 4), (5, 2)], 3: [(4, 3)], 9: [(90, 1)], 1: [(90, 1)]},
            "b": {3: [(4, 1)], 7: [(13, 3)], 9: [(90, 1)], 1: [(90, 1)]},
        }.items()
        for chunk, (digest, turns) in zip((0, 1, 2, 3), of.items(), strict=True)
    ]
    samples.append(sample("a", 7, (900, 1), repeat=1))
    cells = [Cell("t", 0.0, 1, "none", spec="none"), Cell("t", 0.0, 1, "a", "A"), Cell("t", 0.0, 1, "b", spec="lookup")]
    document = Document(RunInfo("smollm2", arguments={"limit": 3}), cells=cells)
    taus = studies.by_prompt(samples, document)
    assert {m: taus[m] for m in "ab"} == {"a": {"0": [[3, 3], [12, 6]]}, "b": {"0": [[3, 1], [12, 3]]}}
    messages = studies.kept(document, "smollm2_taus", {**taus, "left out": {}})
    assert messages["run"]["methods"] == {"none": taus["none"], "A": taus["a"], "lookup": taus["b"]}, "as in the report"
    assert studies.by_prompt([s for s in samples if s.digest == 9], document)["a"] == {"0": [[89, 1]]}, (
        "no other is left"
    )


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """A context beyond the demo's positions, with the demo's own drafters."""
    monkeypatch.setattr(contexts, "PLACE", tmp_path / "made")
    monkeypatch.setattr(contexts, "DOCUMENTS", tmp_path)
    for domain in contexts.DOMAINS:
        text = " ".join(f"{domain} {i} went on." for i in range(6000))
        (tmp_path / f"{domain}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    demo = dict.fromkeys(("Mamba 1.5M", "Llama 1.5M"), f"model:{contexts.DEMO / 'draft'}")
    return contexts.study(2112, demo)()


def test_a_context_beyond_the_positions_is_stretched(config: Study) -> None:
    report = json.loads((Path(str(config.model)) / "config.json").read_text())
    assert report["rope_parameters"]["factor"] == 2112 / 2048
    assert report["max_position_embeddings"] == 2112
    assert "2112-" in config.drafters[-1]
    task = load(config.tasks[0], None, config.limit)
    assert (len(task.prompts), task.cut) == (2, 2080)
    assert min(len(p.turns[0]) for p in task.prompts) == contexts.LETTERS
    assert contexts.stretched(contexts.DEMO / "target", 1024) == contexts.DEMO / "target"


@pytest.mark.slow
def test_a_study_of_contexts(config: Study, tmp_path: Path) -> None:
    small = replace(config, drafters=config.drafters[-1:], limit=1, tokens=4, out=tmp_path / "run")
    plain, eagle = run(small).cells
    assert plain.prompt_tokens == 2080
    assert eagle.memory is not None
    assert eagle.memory.drafter > 1000 * 2080 / 4
    assert eagle.same_text == 1


def test_the_oracle_has_its_configured_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "PLACE", contexts.DEMO / "target")
    monkeypatch.setattr(oracles, "ALPHAS", (0.0, 1.0))
    config = replace(oracles.study(), limit=1, repeats=1, tokens=12, peers=(), out=tmp_path, keep_loops=True)
    plain, wrong, right = run(config, **oracles.parts(config)).cells
    assert (wrong.state, right.state) == ("done", "done")
    assert wrong.tau is not None
    assert right.tau is not None
    assert wrong.tau.value == 1
    assert right.tau.value > 1.5
    assert right.same_text == plain.prompts
