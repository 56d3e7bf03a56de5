"""What a command line names, as rows of the table: drafters by rules by budgets by variants, and peers beside them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from ..budgets import parse
from ..budgets.shapes import read
from ..params import LOSSY, RULES, InputError
from . import peers
from .types import PACKED, PLAIN, Method

if TYPE_CHECKING:
    from ..budgets.budgeter import Budgeter

VARIANTS = ("plain", "eager", *PACKED, *(f"eager+{kind}" for kind in PACKED))  # eager does not record passes
BUDGETS = r"adaptive|auto|none|\d+x\d+|\d+(?:,\d+)*(?: [\d,]+)*(?: none)?"
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
        check_budget(method.budget)
        rule_of(method.rule)
        check_variant(method.variant)
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
    """Does the method's rule leave the law of the text as it is?"""
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


def check_variant(variant: str) -> None:
    """Raise InputError where a target has no such variant."""
    if "compile" in variant:
        rest = variant.replace("compile+", "").replace("compile", "plain")
        raise InputError(
            f"passes are recorded by default: instead of --variant {variant} say {rest}, and eager for none"
        )
    if variant not in VARIANTS:
        raise InputError(f"there is no variant {variant!r} of a target; choose from {', '.join(VARIANTS)}")


def check_budget(text: str) -> None:
    """Raise InputError where a row cannot have this budget: it has one drafter, hence nothing to choose among."""
    if ":" in text:
        raise InputError(f"the budget {text!r} chooses among drafters, and a row of the table has one")
    read(text)


def budget_of(text: str) -> Budgeter:
    """A fresh budget as a row names it; see `outrider.budgets.parse`."""
    check_budget(text)
    return parse(text)
