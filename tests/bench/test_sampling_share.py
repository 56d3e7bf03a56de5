"""What sampling costs: distributions over larger vocabularies, shares and bars, and one run on the demo target."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # where its scripts find one another

import sampling  # noqa: E402
from outrider.core.sampling import distribution  # noqa: E402
from outrider.engine import Batch  # noqa: E402


def test_a_larger_vocabulary_has_the_same_distribution_and_no_equal_logits() -> None:
    logits = 3 * np.random.default_rng(0).standard_normal((2, 1000)).astype(np.float32)
    wide = sampling.extended(logits, 3500)
    assert wide.shape == (2, 3500)
    assert (wide[:, :1000] == logits).all()
    shares = [0.01, 0.1, 0.5, 0.9, 0.99]
    assert np.allclose(np.quantile(wide, shares, 1), np.quantile(logits, shares, 1), atol=0.3)
    assert all(len(np.unique(row)) == 3500 for row in wide)
    nuclei = [(distribution(x, sampling.SETTINGS[sampling.BARRED]) > 0).sum() for x in (logits[0], wide[0])]
    assert nuclei[1] / nuclei[0] == pytest.approx(3.5, rel=0.25), "as much wider as it is larger"


def test_a_vocabulary_of_its_own_size_is_as_it_is() -> None:
    logits = np.random.default_rng(1).standard_normal((2, 1000), np.float32)
    assert (sampling.extended(logits, 1000) == logits).all()


def test_a_share_is_that_of_draw_and_pass() -> None:
    result = sampling.Found(9, 1, "T=0", [900.0, 1000.0, 5000.0], [8.0, 9.0, 90.0])
    assert result.share == pytest.approx(0.1)


def test_bars_are_for_one_setting_and_two_sizes() -> None:
    def result(rows: int, setting: str, draw: float) -> sampling.Found:
        return sampling.Found(9, rows, setting, [draw], [1.0])

    report = sampling.bars(
        [
            result(1, sampling.BARRED, 60.0), result(8, sampling.BARRED, 900.0), result(32, sampling.BARRED, 60.0),
            result(1, "T=1", 900.0),
        ]
    )  # fmt: skip
    assert [line.rpartition(": ")[2] for line in report] == ["DOES NOT HOLD", "holds"]
    assert report[0].startswith("T=1, top-p 0.9, 9 tokens, 1 row: 5.7% of a round, at most 5%")


@pytest.mark.trained
def test_every_setting_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is timed is the engine's own draw, of other distributions and at other positions each time."""
    judged: dict[tuple[int, int, str], list[list[int]]] = {}

    def judge(batch, question):  # type: ignore[no-untyped-def]
        verdict = Batch.judge(batch, question)
        case = len(question.rows), question.logits.shape[-1], repr(question.rows.sampling[0])
        judged.setdefault(case, []).append(verdict.next)
        return verdict

    monkeypatch.setattr(sampling, "Batch", type("Noted", (Batch,), {"judge": judge}))
    monkeypatch.setattr(sampling, "WARM", 1)
    out = tmp_path / "made" / "sampling.json"
    arguments = ["demo", "--vocabularies", "4096", "9000", "--rows", "1", "4", "--repeats", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["sampling.py", *arguments])
    sampling.main()
    report = json.loads(out.read_text(encoding="utf-8"))["found"]
    cells = [(row["rows"], row["vocabulary"], row["setting"]) for row in report]
    assert cells == [(b, v, setting) for v in (4096, 9000) for b in (1, 4) for setting in sampling.SETTINGS]
    assert all(len(row["draw_us"]) == len(row["pass_ms"]) == 3 and 0 < row["share"] < 1 for row in report)
    assert set(judged) == {(b, v, repr(sampling.SETTINGS[setting])) for b, v, setting in cells}
    assert all(len(tokens) == 4 and len(set(map(tuple, tokens))) > 1 for tokens in judged.values())
    assert capsys.readouterr().out.count("of a round, at most") == 2


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sampling.py", "demo", "--rows", "0"])
    with pytest.raises(SystemExit) as ended:
        sampling.main()
    assert ended.value.code == 2
    assert "at least 1" in capsys.readouterr().err
