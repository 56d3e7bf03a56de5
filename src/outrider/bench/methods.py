"""Methods from their spelling on the command line: drafters with budget, rule and variant of the target, and peers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..budgets import parse as parse_budget
from ..budgets.budgeter import Budgeter
from ..params import LOSSY, RULES, InputError, check_rule
from . import peers
from .types import EAGER, PLAIN, VARIED, Method

VARIANTS = ("plain", EAGER, *VARIED)
BUDGETS = r"adaptive|auto|none|\d+x\d+|\d+(?:,\d+)*(?: [\d,]+)*(?: none)?(?: paper)?"
ENDING = re.compile(
    rf"(.+)@(?:(?P<budget>{BUDGETS})|(?P<rule>(?:{'|'.join(RULES)})(?:\?.*)?)"
    rf"|(?P<variant>{'|'.join(map(re.escape, VARIANTS))}))"
)


def parts(text: str) -> dict[str, str]:
    """The fields of a `Method` that `[LABEL=]SPEC[@BUDGET][@RULE][@VARIANT]` names, in any order after the SPEC.

    >>> parts("HASS=eagle:demo/hass@16x6@rejection")
    {'label': 'HASS', 'rule': 'rejection', 'budget': '16x6', 'spec': 'eagle:demo/hass'}
    """
    named = re.fullmatch(r"([^=?:]+)=(.+)", text)
    fields, spec = ({"label": named[1].strip()}, named[2]) if named else ({}, text)
    endings: dict[str, str] = {}
    while match := ENDING.fullmatch(spec):
        spec = match[1]
        endings |= {k: v for k, v in match.groupdict().items() if v}
    return {**fields, **endings, "spec": spec}


def parse(text: str) -> Method:
    """The method that `[LABEL=]SPEC[@BUDGET][@RULE][@VARIANT]` names."""
    return Method(**parts(text))


def table(drafters: Sequence[Method], others: Sequence[str]) -> list[Method]:
    """All methods: plain decoding of every variant in use, the peers, then the drafters.

    Raises InputError for an unknown budget, rule, variant or peer, and for two methods with the same name.
    """
    variants = dict.fromkeys(m.variant for m in drafters) or ("plain",)
    rows = [Method(PLAIN, variant=v) for v in variants]
    rows += [peers.method(p) for p in others if p != PLAIN]
    rows += [m for m in drafters if m.spec != PLAIN]
    for method in rows:
        budget_of(method.budget)
        rule_of(method.rule)
        if method.variant not in VARIANTS:
            raise InputError(f"there is no variant {method.variant!r} of a target; choose one of {', '.join(VARIANTS)}")
    names = [m.name for m in rows]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InputError(f"two methods are called {twice[0]!r}; give one of them a label, as in LABEL=SPEC")
    return rows


def at(temperature: float, rows: Sequence[Method]) -> tuple[Method, ...]:
    """The methods to measure at a temperature. At 0 all lossless rules give the same text, so one of them is enough."""
    if temperature > 0:
        return tuple(rows)
    first: dict[tuple[str, ...], Method] = {}
    for m in sorted(filter(lossless, rows), key=lambda m: m.rule != "coupled"):
        first.setdefault((m.peer, m.spec, m.budget, m.variant), m)
    return tuple(m for m in rows if m in first.values())


def lossless(method: Method) -> bool:
    """Whether the method's rule keeps the target's distribution."""
    return method.rule.partition("?")[0] not in LOSSY


def rule_of(text: str) -> tuple[str, dict[str, float]]:
    """`typical?epsilon=0.09&delta=0.3` as a name and the engine's parameters."""
    from ..drafters import options_of

    name, _, query = text.partition("?")
    return check_rule(name), options_of(text, query, typical if name == "typical" else lambda: None)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> None:
    """The options of the rule typical."""


def budget_of(text: str) -> Budgeter:
    """A fresh budget; see `outrider.budgets.parse`. A method has one drafter, so a choice among drafters is refused."""
    if ":" in text:
        raise InputError(f"the budget {text!r} chooses among drafters, but a method has only one")
    return parse_budget(text)
