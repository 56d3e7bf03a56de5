"""The audit passes what is lossless, and catches what is not, on a tiny real model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from enumerating import cut
from small import noised, tiny_llama

from outrider import drafters
from outrider.backends.torch import load_target
from outrider.backends.torch import sampling as tensors
from outrider.backends.torch import verify as in_tensors
from outrider.backends.torch.session import TreeSession
from outrider.budgets.budgeter import FixedBudget
from outrider.commands.audit import document, show
from outrider.core import sampling, verify
from outrider.core.protocols import Drafter, Drafting, Round, Target
from outrider.core.tree import best_of, from_template, template
from outrider.core.types import Budget, DraftTree, Question, Rows, Verdict
from outrider.engine import Batch
from outrider.llm import LLM
from outrider.params import InputError, Sampling
from outrider.proofs import audit, enumeration
from outrider.proofs import samples as draws
from outrider.proofs.gtest import detectable, g_test, holm

VOCAB = 11
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8], [5, 6, 7, 5, 6, 7, 5]]
HOT = Sampling(1.0)


@dataclass
class Tiny:
    target: Target
    noisy: str

    def llm(self, drafter: Any = "lookup") -> LLM:
        spec = f"model:{self.noisy}" if drafter == "model" else drafter
        made = drafters.load(spec, self.target) if isinstance(spec, str) else spec
        return LLM(self.target, None, made, "tiny", str(drafter) if isinstance(drafter, str) else "a drafter")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    model = tiny_llama(VOCAB, initializer_range=0.35)
    folder = tmp_path_factory.mktemp("noisy")
    noised(model, 0.5).save_pretrained(folder)
    return Tiny(load_target(model), str(folder))


@pytest.fixture(scope="module")
def distributions() -> tuple[enumeration.Exact, ...]:
    return enumeration.exact()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, distributions: tuple[enumeration.Exact, ...]) -> None:
    """The exact distributions are computed once for all tests."""
    monkeypatch.setattr(audit, "exact", lambda seed, tensors: distributions)


def deviations(tiny: Tiny, drafter: Any, rule: str, params: Sampling, samples: int = 1000, shape: Any = None) -> float:
    """The p-value of one prompt's pairs under one sampling."""
    engine = tiny.llm(drafter).engine(rule, FixedBudget(16, 3, shape))
    with torch.no_grad():
        cells = draws.exact_cells(engine.target.model, PROMPTS[0], params, samples)  # type: ignore[attr-defined]
        counts = torch.zeros(len(cells.expected), dtype=torch.float64)
        for first in range(0, samples, 1000):
            for pair in draws.pairs(engine, PROMPTS[0], params, range(first, first + 1000)):
                counts[cells.of(*pair)] += 1
    return g_test(counts, cells.expected)[1]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("drafter", "rule"), [("lookup", "coupled"), ("suffix", "rejection"), ("model", "block")])
def test_lossless_passes(tiny: Tiny, drafter: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    result = audit.audit(tiny.llm(drafter), rule, PROMPTS, 200, 1, 10, lambda *step: seen.append(step))
    assert result.lossless, result
    assert "lossless" in result.sentence
    assert "99 % power" in result.sentence
    assert "identical" not in result.sentence
    assert not any(e.divergences for e in result.equality)
    assert all(e.own == e.texts for e in result.equality)
    assert {e.batch for e in result.equality} == {1, 2}
    assert all(s.cells > 3 and not s.rejected for s in result.statistics)
    assert {part for part, done, of in seen if done == of} == {"equality", "samples"}
    assert json.loads(json.dumps(document(result)))["rule"] == rule
    show(result)
    assert "without a drafter" in capsys.readouterr().out


@pytest.mark.parametrize("spec", ["model", "?scale=1"])
def test_a_drafter_that_samples_is_tested_with_sampled_trees(tiny: Tiny, spec: str) -> None:
    """As users load it, calibrated, too: the rejection rules judge such trees by other formulas."""
    llm = tiny.llm(spec if spec == "model" else f"model:{tiny.noisy}{spec}")
    drafted = {rule: draws.drafts(llm.engine(rule)) for rule in ("coupled", "rejection", "block")}
    own = ("own", None)
    assert drafted == {
        "coupled": [own], "rejection": [own, ("sampled tree", (2, 2))], "block": [own, ("sampled chain", (1, 1, 1))],
    }  # fmt: skip
    assert draws.drafts(tiny.llm("lookup").engine("rejection")) == [own]


def test_model_drafter_under_coupled(tiny: Tiny) -> None:
    engine = tiny.llm("model").engine("coupled", FixedBudget(16, 4))
    with torch.no_grad():
        same = audit.equality(engine, PROMPTS, 0, 10)
    assert [e.tokens for e in same] == [10 * len(PROMPTS)] * 8
    assert not any(e.divergences for e in same)


@pytest.mark.parametrize("tensors", [False, True], ids=["reference", "tensors"])
def test_all_rules_but_typical_write_the_targets_distribution(tensors: bool) -> None:
    tvs = {(x.rule, x.draft): x.tv for x in enumeration.exact(tensors=tensors)}
    assert len(tvs) == 7
    assert all(tv < audit.EXACT for (rule, _), tv in tvs.items() if rule != "typical")
    assert tvs["typical", "deterministic tree"] > 0.1


@pytest.mark.usefixtures("quick")
def test_typical_is_lossy(tiny: Tiny) -> None:
    result = audit.audit(tiny.llm("model"), "typical", PROMPTS, 400, 0, 6)
    assert not result.lossless
    assert "LOSSY by design" in result.sentence
    assert any(s.rejected for s in result.statistics)


def test_samples_of_logits_that_are_not_finite_are_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.llm("lookup").engine("coupled", FixedBudget(16, 3))
    judged = Batch.judge
    for fine in (0, 2):  # the prompt's is not; a round's is not
        calls = iter([True] * fine)

        def spoilt(self: Batch, question: Question, calls: Iterator[bool] = calls) -> Verdict:
            verdict = judged(self, question)
            return replace(verdict, finite=[next(calls, False)] * len(verdict.finite))

        monkeypatch.setattr(Batch, "judge", spoilt)
        with torch.no_grad(), pytest.raises(InputError, match="NaN or infinite"):
            draws.pairs(engine, PROMPTS[0], Sampling(1.0), range(4))


# --- broken rules


def raw_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token drawn without temperature and top-p, as in EAGLE-1's code."""
    right = verify.distribution
    monkeypatch.setattr(verify, "distribution", lambda z, s: right(z, replace(s, temperature=1.0, top_p=1.0)))


def no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the token is drawn from p itself."""
    for rules in (verify, in_tensors):
        monkeypatch.setattr(rules, "_residual", lambda p, q: p)


@pytest.mark.parametrize(
    ("break_it", "params", "rule"),
    [(raw_logits, Sampling(0.5), "rejection"), (no_residual, HOT, "rejection"), (None, HOT, "rejection")],
)
def test_statistics_catch_a_wrong_rule(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, break_it: Callable[..., None] | None, params: Sampling, rule: str
) -> None:
    if break_it is not None:
        break_it(monkeypatch)
    p = deviations(tiny, "model", rule, params, shape=(1, 1, 1))
    assert (p < 1e-6) if break_it else (p > 1e-3)


@pytest.mark.parametrize("tensors", [False, True], ids=["reference", "tensors"])
def test_enumeration_catches_a_wrong_rule(monkeypatch: pytest.MonkeyPatch, tensors: bool) -> None:
    no_residual(monkeypatch)
    tvs = {(x.rule, x.draft): x.tv for x in audit.exact(tensors=tensors)}
    assert tvs["rejection", "sampled chain"] > 1e-3
    assert tvs["rejection", "deterministic tree"] > 1e-3
    assert tvs["block", "sampled chain"] < audit.EXACT


def test_on_a_cpu_the_rules_in_numpy_are_enumerated(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in these alone is seen, and one in the tensors, which do not serve such a target, is not."""
    monkeypatch.setattr(in_tensors, "_residual", lambda p, q: p)
    assert max(x.tv for x in audit.audit(tiny.llm(), "rejection", PROMPTS, 100, 0, 4).exact[:4]) < audit.EXACT
    monkeypatch.setattr(verify, "_residual", lambda p, q: p)
    assert not audit.audit(tiny.llm(), "rejection", PROMPTS, 100, 0, 4).lossless


@pytest.mark.process
def test_the_rules_in_numpy_are_enumerated_without_torch() -> None:
    code = "import sys; from outrider.proofs.enumeration import exact; exact(v=2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- drafts that claim what is not so


@dataclass(frozen=True)
class Bigram(Drafter):
    """A drafter with a distribution of its own, given the last token alone: sampled, or spoilt."""

    how: str  # honest | pruned | top-k
    taps: tuple[int, ...] = ()

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> Drafting:
        return BigramDrafting(self.how)


@dataclass
class BigramDrafting(Drafting):
    how: str

    def observe(self, round: Round) -> None:
        pass

    def select(self, index: Sequence[int]) -> None:
        pass

    def join(self, other: Drafting) -> None:
        pass

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        q = sampling.softmax(1.5 * np.random.default_rng(5).normal(size=(VOCAB, VOCAB)))
        first = q[list(rows.root)][:, None]
        if self.how == "top-k":
            best = np.argsort(-first[:, 0], -1, kind="stable")[:, :3]
            return replace(from_template(rows.root, best, template((3,))), q=first)
        one = sampling.sample(first, 2, rows)[:, 0]
        two = sampling.sample(q[one], 2, rows, 1).reshape(len(rows), -1)
        tree = from_template(rows.root, np.concatenate([one, two], 1), template((2, 2)))
        tree = replace(tree, q=np.concatenate([first, q[one]], 1))
        if self.how == "honest":
            return tree
        values = [[0.0] for _ in rows.root]
        for (tokens, parents, _), distributions, row in zip(tree.host, tree.q, values, strict=True):
            for token, parent in zip(tokens[1:], parents[1:], strict=True):
                row.append(row[parent] + float(np.log(distributions[parent, token])))
        return cut(tree, best_of(values, 4, 0.0, None))


@pytest.mark.parametrize("how", ["honest", "pruned", "top-k"])
def test_statistics_catch_a_wrong_draft(tiny: Tiny, how: str) -> None:
    p = deviations(tiny, Bigram(how), "rejection", HOT, 4000)
    assert (p > 1e-3) if how == "honest" else (p < 1e-6)


@pytest.mark.usefixtures("quick")
def test_the_audit_reports_its_verdicts(tiny: Tiny) -> None:
    result = audit.audit(tiny.llm(Bigram("top-k")), "rejection", PROMPTS, 400, 0, 6)
    assert not result.lossless
    assert "NOT lossless" in result.sentence
    assert any(s.rejected for s in result.statistics)


def test_equality_catches_a_wrong_mask(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    right = TreeSession.forward

    def forward(self: TreeSession, tree: DraftTree, *more: Any, **named: Any) -> Any:
        """Every node sees its elders, whether they are its ancestors or not."""
        n = tree.nodes
        seen = np.tile(np.tri(n, dtype=bool), (len(tree.size), 1, 1))
        return right(self, replace(tree, ancestors=seen), *more, **named)

    monkeypatch.setattr(TreeSession, "forward", forward)
    engine = tiny.llm("model").engine("coupled", FixedBudget(16, 4))
    with torch.no_grad():
        same = audit.equality(engine, PROMPTS, 0, 12)
    wrong = [d for e in same for d in e.divergences]
    assert wrong
    assert any(not d.within and d.margin > 1e-6 for d in wrong)
    judged = audit.judge("tiny", "model", "coupled", 0, same, (), ())
    assert not judged.lossless
    assert "NOT lossless" in judged.sentence
    assert any(e.own < e.texts for e in same)
    near = tuple(replace(e, divergences=()) for e in same)  # as if the stock model's rounding explained them
    assert audit.judge("tiny", "model", "coupled", 0, near, (), ()).lossless
    promised = audit.judge("tiny", "model", "coupled", 0, near, (), (), bits=True)
    assert not promised.lossless, "where bits are promised nothing explains another text"
    assert "without a drafter" in promised.sentence
    assert (promised.bits, judged.bits) == (True, False), "the report says what was promised"


# --- the power


def test_power_of_a_known_deviation() -> None:
    """At the TV with a stated power of 99 %, the worst-shaped deviation is detected about that often."""
    k, n, alpha = 16, 4000, 1e-3
    tv = detectable(n, k, alpha, 0.99)
    params = torch.full((k,), 1 / k, dtype=torch.float64)
    off = params + torch.tensor([1.0, -1.0] * (k // 2)) * 2 * tv / k
    g = torch.Generator().manual_seed(0)

    def result(p: torch.Tensor, runs: int = 400) -> float:
        drawn = torch.multinomial(p.expand(runs, k), n, replacement=True, generator=g)
        counts = torch.zeros(runs, k, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(runs, n).double())
        return sum(g_test(c, params)[1] < alpha for c in counts) / runs

    assert 0.97 <= result(off) <= 1.0
    assert result(params) <= 0.01
    assert detectable(220_000, 64, 1e-3, 0.99) == pytest.approx(0.01, rel=0.05)
    assert detectable(100, 1, alpha, 0.99) == 1.0


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03], 0.05) == [True, False, False]
    assert holm([0.01, 0.02, 0.03], 0.05) == [True, True, True]
    assert holm([], 0.05) == []


@pytest.mark.parametrize(
    ("params", "samples"), [(HOT, 300), (HOT, 10_000), (Sampling(0.3), 500), (Sampling(1.0, top_p=0.5), 1000)]
)
def test_a_cell_is_the_sum_of_its_pairs(tiny: Tiny, params: Sampling, samples: int) -> None:
    """Every pair goes to one cell, and a cell's probability is the sum of its pairs'."""
    model: Any = tiny.target
    sums: dict[int, float] = {}
    with torch.no_grad():
        cells = draws.exact_cells(model.model, PROMPTS[0], params, samples)
        first = tensors.distribution(model.model(torch.tensor([PROMPTS[0]])).logits[0, -1], params)
        for x in range(VOCAB):
            second = tensors.distribution(model.model(torch.tensor([[*PROMPTS[0], x]])).logits[0, -1], params)
            for y in range(VOCAB):
                cell = cells.of(x, y)
                sums[cell] = sums.get(cell, 0.0) + float(first[x] * second[y])
    assert 1 < len(cells.expected) <= draws.CELLS
    assert bool((cells.expected * samples >= draws.LEAST - 1e-9).all())
    assert [sums[i] for i in range(len(cells.expected))] == pytest.approx(cells.expected.tolist())


def test_refusals(tiny: Tiny) -> None:
    with pytest.raises(InputError, match="at least 100"):
        audit.audit(tiny.llm(), "coupled", PROMPTS, 10)
    with pytest.raises(InputError, match="at least two tokens"):
        audit.audit(tiny.llm(), "coupled", [[1]], 200)
