"""What speculation promises: the formulas of Leviathan et al. 2023, "Fast Inference from Transformers via Speculative
Decoding", and a generalisation: a verification pass that costs more than one token's.

    alpha   acceptance per token tested, E[beta]   (Definition 3.1; not accepted / drafted)
    gamma   tokens drafted per round, a chain
    c       time of one drafter step / time of one target pass over one token
    c_hat   the same ratio in arithmetic operations
    v(n)    time of a verification pass over n nodes / time of a pass over one; the paper takes v = 1

The theorems treat acceptances as independent with one rate alpha. Nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.bench import metrics
from outrider.params import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from outrider.core.types import Usage

Cost = Sequence[float] | Callable[[int], float]  # v: a list (item n - 1 is the cost of n nodes) or a function of n

MOST = 1000  # the largest gamma considered: with c = 0 more is always better


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per round, E[tau] = (1 - alpha^(gamma + 1)) / (1 - alpha): equation (1)."""
    _check(alpha, gamma)
    if alpha in (0.0, 1.0):
        return 1.0 + gamma * alpha
    return -math.expm1((gamma + 1) * math.log(alpha)) / (1 - alpha)


def speedup(alpha: float, gamma: int, c: float, verify: Cost | None = None) -> float:
    """Wall-clock improvement (1 - alpha^(gamma + 1)) / ((1 - alpha)(gamma c + 1)): Theorem 3.8.

    With a measured cost curve `verify` the 1 of the round's cost becomes v(gamma + 1) / v(1).
    """
    _check(alpha, gamma, c)
    return expected_tokens(alpha, gamma) / (gamma * c + relative(verify, gamma + 1))


def operations(alpha: float, gamma: int, c_hat: float) -> float:
    """Factor of arithmetic operations (1 - alpha)(gamma c_hat + gamma + 1) / (1 - alpha^(gamma + 1)): Theorem 3.11."""
    _check(alpha, gamma, c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def relative(verify: Cost | None, nodes: int) -> float:
    """v(nodes) / v(1): the cost of a verification pass in passes over one token (1 without a curve)."""
    if verify is None:
        return 1.0
    if not callable(verify) and nodes > len(verify):
        raise InputError(
            f"the cost curve has {len(verify)} entries and a pass over {nodes} nodes was asked for; measure more"
        )
    one, many = (verify(n) if callable(verify) else verify[n - 1] for n in (1, nodes))
    if not (one > 0 and many > 0):
        raise InputError(f"a cost curve holds positive times, not {min(one, many)}")
    return many / one


def optimal_gamma(alpha: float, c: float, verify: Cost | None = None, most: int = MOST) -> int:
    """The gamma with the highest `speedup`, the smallest among equals; 0 means: do not speculate.

    With v = 1 it is above 0 exactly if alpha > c (Corollary 3.9), and the improvement has one peak. With c = 0 (or
    alpha = 1 > c) there is no peak: the answer is `most`.
    """
    _check(alpha, 0, c)
    if verify is not None:
        top = most if callable(verify) else min(most, len(verify) - 1)
        return max(range(top + 1), key=lambda gamma: speedup(alpha, gamma, c, verify))
    if c == 0 and alpha > 0:
        return most
    gamma, reach, tokens = 0, alpha, 1.0
    # One more drafted token adds reach = alpha^(gamma+1) tokens at the cost c: worth it above today's rate.
    while gamma < most and reach * (gamma * c + 1) > c * tokens:
        gamma, tokens, reach = gamma + 1, tokens + reach, reach * alpha
    return gamma


def required_alpha(gain: float, c: float, gamma: int | None = None, verify: Cost | None = None) -> float | None:
    """The smallest alpha whose promise is `gain`, for a gamma or (None) the best one; None: no alpha reaches it."""
    _check(0.0, gamma or 0, c)

    def promise(alpha: float) -> float:
        return speedup(alpha, optimal_gamma(alpha, c, verify) if gamma is None else gamma, c, verify)

    if promise(0.0) >= gain:
        return 0.0
    if promise(1.0) < gain:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if promise(middle) >= gain else (middle, high)
    return high


# ------------------------------------------------------------------------------------------------ the paper's table

# alpha, gamma -> operations, speed, assuming c = c_hat = 0 (the paper's table 1)
PAPER_TABLE = (
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
)


def table() -> list[dict[str, float]]:
    """The six rows of the paper's table, computed, beside what was published."""
    return [
        {
            "alpha": alpha, "gamma": gamma,
            "operations": operations(alpha, gamma, 0), "published_operations": ops,
            "speedup": speedup(alpha, gamma, 0), "published_speedup": gain,
        }
        for alpha, gamma, ops, gain in PAPER_TABLE
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ measured runs


@dataclass(frozen=True)
class Comparison:
    """What the theorem promised for a run, and what came out."""

    alpha: float
    gamma: int
    c: float
    measured_speedup: float | None = None
    measured_tau: float | None = None
    verify: float = 1.0  # v(gamma + 1), measured: 1 is the paper's assumption

    @property
    def tau(self) -> float:
        """Equation (1)."""
        return expected_tokens(self.alpha, self.gamma)

    @property
    def promised(self) -> float:
        """Theorem 3.8, with a verification pass that costs one."""
        return speedup(self.alpha, self.gamma, self.c)

    @property
    def promised_at_cost(self) -> float:
        """Theorem 3.8 with the verification pass at its measured cost."""
        return self.tau / (self.gamma * self.c + self.verify)

    @property
    def best_gamma(self) -> int:
        return optimal_gamma(self.alpha, self.c)

    @property
    def sentence(self) -> str:
        text = (
            f"For alpha {self.alpha:.3f}, gamma {self.gamma} and c {self.c:.3f} the theorem promises "
            f"{self.promised:.2f}x at {self.tau:.2f} tokens per round"
        )
        if self.verify != 1:
            text += f" ({self.promised_at_cost:.2f}x with a verification pass that costs {self.verify:.2f})"
        if self.measured_speedup is None:
            return text + "; the speed-up was not measured."
        text += f"; measured: {self.measured_speedup:.2f}x"
        if self.measured_tau is not None:
            text += f" at {self.measured_tau:.2f}"
        return f"{text}, {self.measured_speedup / self.promised:.0%} of the promise."

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "alpha": self.alpha, "gamma": self.gamma, "c": self.c, "verify": self.verify,
            "promised_tau": self.tau, "measured_tau": self.measured_tau,
            "promised_speedup": self.promised, "promised_speedup_at_cost": self.promised_at_cost,
            "measured_speedup": self.measured_speedup,
            "best_gamma": self.best_gamma, "best_speedup": speedup(self.alpha, self.best_gamma, self.c),
            "sentence": self.sentence,
        }  # fmt: skip


def of_rounds(usages: Sequence[Sequence[Usage]], plain_ms: float, speedup: float) -> Comparison | None:
    """What Theorem 3.8 promised for these acceptances and costs. A tree counts as a chain of its depth.

    usages: [turn of a batch of prompts][row]. plain_ms: of plain decoding's round.
    """
    all_of = [u for rows in usages for u in rows]
    rounds, drafted, tested = (sum(getattr(u, k) for u in all_of) for k in ("rounds", "drafted", "tested"))
    if not drafted or not tested or not plain_ms:
        return None
    deepest = max(len(u.tested_at) for u in all_of)
    gamma, ms = max(1, min(deepest, round(drafted / rounds))), metrics.round_ms(usages)
    return Comparison(
        sum(u.accepted for u in all_of) / tested, gamma, ms.draft / gamma / plain_ms, speedup,
        metrics.tau(usages).value, ms.verify / plain_ms,
    )  # fmt: skip


def measured(document: Any) -> Comparison:
    """A run's own numbers, out of the JSON of `outrider generate [--compare] --json`, or of one that states them.

    The latter is an object with alpha, gamma, c and optionally speedup, tau and verify. Of a run with trees, gamma is
    at most the deepest depth tested: the theorems are about chains, and a tree's alpha counts a hit among all siblings.
    """
    if isinstance(document, Mapping) and {"alpha", "gamma", "c"} <= document.keys():
        numbers = {k: document.get(k) for k in ("alpha", "gamma", "c", "speedup", "tau", "verify")}
        for name, value in numbers.items():
            if not isinstance(value, int | float) and (value is not None or name in ("alpha", "gamma", "c")):
                raise InputError(f"{name} must be a number, not {value!r}")
        alpha, gamma, c, gain, tau, verify = numbers.values()
        assert alpha is not None
        assert gamma is not None
        assert c is not None
        gamma = round(gamma)  # a mean, where it varied
        _check(alpha, gamma, c)
        return Comparison(alpha, gamma, c, gain, tau, verify or 1.0)
    return _of_usages(document, list(_usages(document)))


def _usages(document: Any) -> Iterator[Mapping[str, Any]]:
    outputs = document.get("outputs") if isinstance(document, Mapping) else None
    for output in outputs if isinstance(outputs, list) else ():
        usage = output.get("usage") if isinstance(output, Mapping) else None
        if isinstance(usage, Mapping):
            yield usage


def _of_usages(document: Any, usages: list[Mapping[str, Any]]) -> Comparison:
    def total(name: str) -> float:
        return sum(u.get(name, 0) for u in usages)

    rounds, tested, drafted = total("rounds"), total("tested"), total("drafted")
    if not tested or not total("verify_seconds"):
        raise InputError(
            "this file holds no drafted run; give the output of: outrider generate --json, or alpha, gamma and c"
        )
    deepest = max(len(u.get("tested_at", ())) for u in usages)
    gamma = max(1, min(deepest, round(drafted / rounds)))
    compared = document.get("comparison", {})
    one = verify = total("verify_seconds") / rounds
    if compared.get("prompts"):
        # With the plain run beside it, its time per token (prompt included) is the pass over one token.
        one = compared["plain_seconds"] / sum(p["tokens"] for p in compared["prompts"])
    draft = total("draft_seconds") / rounds / gamma
    tau = (total("new_tokens") - len(usages)) / rounds
    return Comparison(total("accepted") / tested, gamma, draft / one, compared.get("speedup"), tau, verify / one)


# ------------------------------------------------------------------------------------------------ plots


def plot(path: str | Path, alpha: float | None = None, c: float = 0.0, c_hat: float | None = None) -> None:
    """The paper's figures 3 and 4 side by side, as SVG, PNG or PDF by the name's ending.

    alpha: marked on every curve's axes, if given.
    c, c_hat: the costs that the speed-up and the operations are drawn for; `c` also has a curve of its best gamma.
    """
    if Path(path).suffix.lower() not in (".svg", ".png", ".pdf"):
        raise InputError(f"{path}: a plot is written as .svg, .png or .pdf")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    plot_optimal_gamma(left, tuple(sorted({*COSTS, *([c] if c > 0 else [])})))
    plot_gains(middle, speedup, "speed-up", "c", c)
    plot_gains(right, operations, "operations", "c_hat", c if c_hat is None else c_hat)
    if alpha is not None:
        left.plot([alpha], [optimal_gamma(alpha, c, most=SHOWN)], "k*", markersize=11)
        for axes in (middle, right):
            axes.axvline(alpha, color="black", linewidth=0.8, linestyle=":")
    figure.savefig(path)


COSTS = (0.01, 0.02, 0.05, 0.1, 0.2)  # of figure 3; with c = 0 more is always better, and there is no curve
SHOWN = 20  # the largest gamma of figure 3


def plot_optimal_gamma(axes: Axes, costs: Sequence[float] = COSTS) -> None:
    """Figure 3: the best gamma over alpha, a step for each whole number, one line for each c."""
    from matplotlib.ticker import MaxNLocator

    alphas = [i / 400 for i in range(400)]
    for c in costs:
        axes.step(alphas, [optimal_gamma(a, c, most=SHOWN + 1) for a in alphas], label=f"c = {c:g}", where="post")
    axes.set(xlabel="alpha", ylabel="best gamma", ylim=(0, SHOWN), title="best gamma by alpha and c")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")


def plot_gains(
    axes: Axes, gain: Callable[[float, int, float], float], what: str, of: str, cost: float = 0.0,
    gammas: Sequence[int] = (1, 2, 3, 5, 7, 10),
) -> None:  # fmt: skip
    """Figure 4: speed-up or operations over alpha at one cost, one line for each gamma."""
    alphas = [i / 200 for i in range(201)]
    for gamma in gammas:
        axes.plot(alphas, [gain(a, gamma, cost) for a in alphas], label=f"gamma = {gamma}")
    axes.set(
        xlabel="alpha", ylabel=f"{what}, times plain decoding's", title=f"{what} by alpha and gamma, {of} = {cost:g}"
    )
    axes.legend(fontsize="small")


def _check(alpha: float, gamma: int, c: float = 0.0) -> None:
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha is a probability between 0 and 1, not {alpha}")
    if gamma < 0:
        raise InputError(f"gamma is a whole number of at least 0, not {gamma}")
    if not 0 <= c < math.inf:
        raise InputError(f"a cost is a finite number of at least 0, not {c}")
