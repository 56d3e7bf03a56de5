"""What a command line names, as rows of the table: drafters by rules by budgets by variants, and peers beside them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import parse_qsl

from ..bandit import MOST, BanditBudget, parse, shape_of
from ..bandit import nodes as nodes_of
from ..budget import AdaptiveBudget, Budgeter, FixedBudget
from ..types import LOSSY, RULES, InputError
from . import peers
from .types import PLAIN, Method

BUDGETS = r"adaptive|\d+x\d+|\d+(?:,\d+)*(?: [\d,]+)*(?: none)?"
OPTIONS = ("epsilon", "delta")  # of the rule typical


def rows(
    drafters: Sequence[str],
    rules: Sequence[str],
    budgets: Sequence[str],
    variants: Sequence[str],
    others: Sequence[str],
) -> list[Method]:
    """The grid. Plain decoding of every variant comes first: speeds are ratios to the first row."""
    found = [Method(PLAIN, variant=v) for v in variants]
    found += [peers.method(p) for p in others if p != PLAIN]
    found += [
        Method(spec, rule, budget, variant, label=label)
        for label, spec, budget_alone, rule_alone in map(labelled, drafters)
        if spec != PLAIN
        for rule in ([rule_alone] if rule_alone else rules)
        for budget in ([budget_alone] if budget_alone else budgets)
        for variant in variants
    ]
    for method in found:
        budget_of(method.budget)
        rule_of(method.rule)
    names = [m.name for m in found]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InputError(f"two methods are called {twice[0]!r}; give one of them a label, as in LABEL=SPEC")
    return found


def labelled(text: str) -> tuple[str, str, str, str]:
    """[LABEL=]SPEC[@BUDGET][@RULE] in its four parts; a budget or rule of its own stands for the command's.

    >>> labelled("HASS=eagle:demo/hass@16x6@rejection")
    ('HASS', 'eagle:demo/hass', '16x6', 'rejection')
    """
    named = re.fullmatch(r"([^=?:]+)=(.+)", text)
    label, spec = (named[1].strip(), named[2]) if named else ("", text)
    own = {"budget": "", "rule": ""}
    while found := re.fullmatch(rf"(.+)@(?:(?P<budget>{BUDGETS})|(?P<rule>(?:{'|'.join(RULES)})(?:\?.*)?))", spec):
        spec = found[1]
        own |= {k: v for k, v in found.groupdict().items() if v}
    return label, spec, own["budget"], own["rule"]


def at(temperature: float, rows: Sequence[Method]) -> tuple[Method, ...]:
    """The rows that are worth measuring: at 0 all lossless rules write the same text, and one stands for them: coupled
    where it is among them, else the first."""
    if temperature > 0:
        return tuple(rows)
    first: dict[tuple[str, ...], Method] = {}
    for m in sorted(filter(lossless, rows), key=lambda m: m.rule != "coupled"):
        first.setdefault((m.peer, m.spec, m.budget, m.variant), m)
    return tuple(m for m in rows if m in first.values())


def lossless(method: Method) -> bool:
    return method.rule.partition("?")[0] not in LOSSY


def rule_of(text: str) -> tuple[str, dict[str, float]]:
    """`typical?epsilon=0.09&delta=0.3` -> its name and the engine's parameters."""
    name, _, query = text.partition("?")
    if name not in RULES:
        raise InputError(f"there is no rule {name!r}; choose from {', '.join(RULES)}")
    options = dict(parse_qsl(query, keep_blank_values=True))
    wrong = [k for k in options if name != "typical" or k not in OPTIONS]
    if wrong:
        raise InputError(f"the rule {name} has no option {wrong[0]!r}; only typical has some: epsilon and delta")
    try:
        return name, {k: float(v) for k, v in options.items()}
    except ValueError:
        raise InputError(f"{text!r}: epsilon and delta are numbers, as in typical?epsilon=0.09&delta=0.3") from None


def budget_of(text: str) -> Budgeter:
    """`adaptive`, `16x6` (nodes with the root, depth), a shape `3,2,1`, or a bandit over several: `3,2,1 2,1 none`."""
    if text == "adaptive":
        return AdaptiveBudget()
    if size := re.fullmatch(r"(\d+)x(\d+)", text):
        nodes, depth = map(int, size.groups())
        if nodes < 2 or depth < 1:
            raise InputError(f"a budget of {text} drafts nothing; give at least 2x1")
        return FixedBudget(nodes, depth)
    arms = parse(text) if re.fullmatch(r"[\d,\s]+(none)?", text) else ()
    if len(arms) == 1 and arms[0]:
        shape = shape_of(arms[0])
        if min(shape) < 1 or nodes_of(shape) > MOST:
            raise InputError(f"a shape has 1 or more children at every depth and at most {MOST} nodes, not {text}")
        return FixedBudget(nodes_of(shape), len(shape), shape=shape)
    if len(arms) > 1:
        return BanditBudget(arms)
    raise InputError(
        f"a budget is adaptive, NODESxDEPTH as in 16x6, a shape as in 3,2,1, or several for a bandit, not {text!r}"
    )
