"""What a command line names, as methods: drafters with their budget, rule and variant of the target, and peers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from ..budgets import OF_A_BANDIT
from ..budgets import parse as parse_budget
from ..params import LOSSY, RULES, InputError
from . import peers
from .types import PACKED, PLAIN, Method

if TYPE_CHECKING:
    from ..budgets.budgeter import Budgeter

VARIANTS = ("plain", "eager", *PACKED)  # eager: stock passes, not compiled
BUDGETS = r"adaptive|auto|none|\d+x\d+|\d+(?:,\d+)*(?: [\d,]+)*(?: none)?(?: [a-z]+=[\w.]+)*"
NO_FIELD = "".join(rf"(?<! {name})" for name in OF_A_BANDIT)  # behind a shape, where no label ends
OPTIONS = ("epsilon", "delta")  # of the rule typical
ENDING = re.compile(
    rf"(.+)@(?:(?P<budget>{BUDGETS})|(?P<rule>(?:{'|'.join(RULES)})(?:\?.*)?)"
    rf"|(?P<variant>{'|'.join(map(re.escape, VARIANTS))}))"
)


def parts(text: str) -> dict[str, str]:
    """The fields of a `Method` that `[LABEL=]SPEC[@BUDGET][@RULE][@VARIANT]` names, in any order behind the SPEC.

    >>> parts("HASS=eagle:demo/hass@16x6@rejection")
    {'label': 'HASS', 'budget': '16x6', 'rule': 'rejection', 'spec': 'eagle:demo/hass'}
    """
    named = re.fullmatch(rf"([^=?:]+){NO_FIELD}=(.+)", text)
    fields, spec = ({"label": named[1].strip()}, named[2]) if named else ({}, text)
    endings: dict[str, str] = {}
    while match := ENDING.fullmatch(spec):
        spec = match[1]
        endings |= {k: v for k, v in match.groupdict().items() if v}
    order = ("budget", "rule", "variant")
    return {**fields, **{k: endings[k] for k in order if k in endings}, "spec": spec}


def parse(text: str) -> Method:
    """The method that `[LABEL=]SPEC[@BUDGET][@RULE][@VARIANT]` names."""
    return Method(**parts(text))


def table(drafters: Sequence[Method], others: Sequence[str]) -> list[Method]:
    """All methods: plain decoding of every variant that occurs, the peers' SPECs, then the drafters.

    Raises InputError for a budget, rule, variant or peer that does not exist, and for two methods of one name.
    """
    variants = dict.fromkeys(m.variant for m in drafters) or ("plain",)
    rows = [Method(PLAIN, variant=v) for v in variants]
    rows += [peers.method(p) for p in others if p != PLAIN]
    rows += [m for m in drafters if m.spec != PLAIN]
    for method in rows:
        check_budget(method.budget)
        rule_of(method.rule)
        check_variant(method.variant)
    names = [m.name for m in rows]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InputError(f"two methods are called {twice[0]!r}; give one of them a label, as in LABEL=SPEC")
    return rows


def at(temperature: float, rows: Sequence[Method]) -> tuple[Method, ...]:
    """The methods to measure at a temperature: at 0 all lossless rules write the same text, so one is enough."""
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
    name, _, query = text.partition("?")
    if name not in RULES:
        raise InputError(f"there is no rule {name!r}; choose from {', '.join(RULES)}")
    options = dict(parse_qsl(query, keep_blank_values=True))
    wrong = [k for k in options if name != "typical" or k not in OPTIONS]
    if wrong:
        raise InputError(f"the rule {name} has no option {wrong[0]!r}; only typical has options: epsilon and delta")
    try:
        return name, {k: float(v) for k, v in options.items()}
    except ValueError:
        raise InputError(f"{text!r}: epsilon and delta are numbers, as in typical?epsilon=0.09&delta=0.3") from None


def check_variant(variant: str) -> None:
    """Raise InputError where a target has no such variant."""
    if variant not in VARIANTS:
        raise InputError(f"there is no variant {variant!r} of a target; choose from {', '.join(VARIANTS)}")


def check_budget(text: str) -> None:
    """Raise InputError where a method cannot have this budget: it has one drafter, so nothing to choose among."""
    if ":" in text:
        raise InputError(f"the budget {text!r} chooses among drafters, but a method has only one")
    parse_budget(text)


def budget_of(text: str) -> Budgeter:
    """A fresh budget; see `outrider.budgets.parse`."""
    check_budget(text)
    return parse_budget(text)
