"""What a command line names becomes the rows of a table, or one sentence that says what to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from itertools import product
from types import ModuleType
from typing import Any

import pytest

from outrider import InputError, plugins
from outrider.bench import methods, peers
from outrider.bench.methods import VARIANTS
from outrider.bench.models import Models
from outrider.bench.types import Answer, Ask, Method, Peer
from outrider.budgets.adaptive import AdaptiveBudget
from outrider.budgets.bandit import BanditBudget
from outrider.budgets.budgeter import FixedBudget
from outrider.params import RULES


def rows(
    drafters: Sequence[str] = ("lookup",), rules: Sequence[str] = ("coupled",), budgets: Sequence[str] = ("auto",),
    variants: Sequence[str] = ("plain",), others: Sequence[str] = (),
) -> list[Method]:  # fmt: skip
    grid = [Method("none", variant=variant) for variant in variants]
    for text in drafters:
        rest = product(rules, budgets, variants)
        mine = (Method(**{"rule": r, "budget": b, "variant": v, **methods.parts(text)}) for r, b, v in rest)
        grid += dict.fromkeys(mine)
    return methods.table(grid, others)


def one_sentence(error: pytest.ExceptionInfo[InputError]) -> str:
    said = str(error.value)
    assert said
    assert "\n" not in said
    assert ". " not in said
    assert not said.endswith(".")
    return said


# -- the grid ----------------------------------------------------------------------------------------------------------


def test_plain_decoding_comes_first_then_peers_then_drafters() -> None:
    results = rows(["lookup", "eagle:demo"], variants=["plain", "int8"], others=["transformers"])
    assert [m.name for m in results] == [
        "none", "none, int8", "transformers", "lookup", "lookup, int8", "eagle:demo", "eagle:demo, int8",
    ]  # fmt: skip
    assert [m.plain for m in results] == [True, True, *[False] * 5]
    assert [m.peer for m in results] == ["outrider", "outrider", "transformers", *["outrider"] * 4]


def test_every_drafter_meets_every_rule_budget_and_variant() -> None:
    grid = ["lookup", "suffix"], ["coupled", "rejection"], ["auto", "16x6", "3,2"], ["plain", "eager"]
    results = rows(*grid)
    assert [(m.spec, m.rule, m.budget, m.variant) for m in results[2:]] == list(product(*grid))
    assert [(m.spec, m.variant) for m in results[:2]] == [("none", "plain"), ("none", "eager")]
    names = [m.name for m in results]
    assert len(set(names)) == len(names) == 26
    assert names[2:6] == ["lookup", "lookup, eager", "lookup, 16x6", "lookup, 16x6, eager"]
    assert "suffix, rejection, 3,2, eager" in names


def test_names_are_unique_over_a_large_grid() -> None:
    drafters = ["lookup", "lookup?ngram=2", "mine=lookup", "eagle:demo/hass", "eagle:demo?tree=chain", "mamba:demo"]
    rules = [*RULES, "typical?epsilon=0.2", "typical?epsilon=0.2&delta=0.1"]
    names = [m.name for m in rows(drafters, rules, ["auto", "16x6", "6x16", "3", "3,2 none"], VARIANTS)]
    assert len(set(names)) == len(names) == len(VARIANTS) * (1 + 6 * 6 * 5)


def test_another_variant_is_always_named() -> None:
    """A name belongs to one method in every run of a folder."""
    assert [m.name for m in rows(variants=["int8"])] == ["none, int8", "lookup, int8"]


def test_plain_decoding_that_is_named_is_there_once() -> None:
    assert [m.name for m in rows(["none", "lookup"])] == ["none", "lookup"]
    assert [m.name for m in rows([])] == ["none"]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"drafters": ["lookup", "lookup"]}, "lookup"), ({"drafters": ["a=lookup", "a=suffix"]}, "a"),
        ({"drafters": ["none=lookup"]}, "none"),
        ({"drafters": ["transformers=lookup"], "others": ["transformers"]}, "transformers"),
        ({"others": ["transformers?cache=static"] * 2}, "transformers?cache=static"),
        ({"drafters": ["lookup", "lookup, 4x2=suffix"], "budgets": ["auto", "4x2"]}, "lookup, 4x2"),
    ],
)  # fmt: skip
def test_two_methods_of_one_name_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match="give one of them a label, as in LABEL=SPEC") as error:
        rows(**options)
    assert one_sentence(error).startswith(f"two methods are called {name!r};")


@pytest.mark.parametrize(
    "options",
    [
        {"rules": ["quick"]}, {"budgets": ["much"]}, {"others": ["vllm"]}, {"rules": ["coupled", "block?x=1"]},
        {"variants": ["compile"]}, {"variants": ["int4"]}, {"drafters": ["lookup@adaptive"]},
    ],
)  # fmt: skip
def test_rows_look_at_every_word(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        rows(**options)


# -- labels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "label", "spec", "budget", "rule"),
    [
        ("lookup", "", "lookup", "", ""),
        ("eagle:DIR?tree=chain", "", "eagle:DIR?tree=chain", "", ""),
        ("lookup?ngram=3&tokens=10", "", "lookup?ngram=3&tokens=10", "", ""),
        ("model:org/name?depth=6", "", "model:org/name?depth=6", "", ""),
        ("eagle:runs/lr=1e-3", "", "eagle:runs/lr=1e-3", "", ""),
        ("mine=lookup", "mine", "lookup", "", ""),
        ("my own=eagle:DIR?tree=chain&depth=3", "my own", "eagle:DIR?tree=chain&depth=3", "", ""),
        ("a=b=c", "a", "b=c", "", ""),
        ("lookup@16x6", "", "lookup", "16x6", ""),
        ("lookup@auto", "", "lookup", "auto", ""),
        ("lookup@3,2,1 2,1 none", "", "lookup", "3,2,1 2,1 none", ""),
        ("lookup@3,2 2,1 paper@rejection", "", "lookup", "3,2 2,1 paper", "rejection"),
        ("lookup@block", "", "lookup", "", "block"),
        ("lookup@typical?epsilon=0.2&delta=0.1", "", "lookup", "", "typical?epsilon=0.2&delta=0.1"),
        ("HASS=eagle:demo/hass@16x6@rejection", "HASS", "eagle:demo/hass", "16x6", "rejection"),
        ("eagle:demo?depth=4@rejection@16x6", "", "eagle:demo?depth=4", "16x6", "rejection"),
        ("chain=eagle:DIR?depth=4@1,1,1", "chain", "eagle:DIR?depth=4", "1,1,1", ""),
        ("eagle:me@home/dir", "", "eagle:me@home/dir", "", ""),
        ("eagle:me@home/dir@8x4", "", "eagle:me@home/dir", "8x4", ""),
        ("a@b=lookup", "a@b", "lookup", "", ""),
    ],
)
def test_the_parts_of_a_drafter(text: str, label: str, spec: str, budget: str, rule: str) -> None:
    given = methods.parts(text)
    assert (given.get("label", ""), given["spec"]) == (label, spec)
    assert (given.get("budget", ""), given.get("rule", "")) == (budget, rule)
    made = rows([text])[-1]
    assert (made.label, made.spec, made.budget, made.rule) == (label, spec, budget or "auto", rule or "coupled")
    assert made.name.startswith(label or spec)


def test_a_label_stands_for_the_spec_and_not_for_the_rest() -> None:
    results = rows(["mine=eagle:DIR?tree=chain"], ["coupled", "rejection"], ["4x2"])
    assert [m.name for m in results] == ["none", "mine, 4x2", "mine, rejection, 4x2"]


def test_a_budget_of_its_own_stands_for_all() -> None:
    results = rows(["lookup@8x4", "suffix"], budgets=["auto", "3,2"])
    assert [(m.spec, m.budget) for m in results[1:]] == [("lookup", "8x4"), ("suffix", "auto"), ("suffix", "3,2")]
    with pytest.raises(InputError, match="2 to 256 nodes"):
        rows(["lookup@1x4"])


def test_a_rule_of_its_own_stands_for_all() -> None:
    results = rows(["lookup@block", "suffix"], ["coupled", "rejection"])
    assert [(m.spec, m.rule) for m in results[1:]] == [
        ("lookup", "block"), ("suffix", "coupled"), ("suffix", "rejection"),
    ]  # fmt: skip
    with pytest.raises(InputError, match="has no option 'epsilon'; it has none"):
        rows(["lookup@block?epsilon=1"])


# -- rules -------------------------------------------------------------------------------------------------------------


def test_rules() -> None:
    for rule in RULES:
        assert methods.rule_of(rule) == (rule, {})
    assert methods.rule_of("typical?epsilon=0.09&delta=.3") == ("typical", {"epsilon": 0.09, "delta": 0.3})
    assert methods.rule_of("typical?delta=1") == ("typical", {"delta": 1.0})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("greedy", "there is no rule 'greedy'; choose one of coupled, rejection, block, typical"),
        ("", "there is no rule ''; choose one of coupled"),
        (
            "coupled?epsilon=0.1",
            "'coupled?epsilon=0.1' has no option 'epsilon'; it has none",
        ),
        ("typical?alpha=0.1", "has no option 'alpha'; it has epsilon, delta"),
        ("typical?epsilon=much", "epsilon must be a number, not 'much'"),
        ("typical?epsilon", "epsilon must be a number, not ''"),
    ],
)
def test_rules_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        methods.rule_of(text)
    assert words in one_sentence(error)


def test_only_exact_methods_are_lossless() -> None:
    assert [methods.lossless(Method("x", rule)) for rule in RULES] == [True, True, True, False]
    assert not methods.lossless(Method("x", "typical?epsilon=0.3"))
    assert methods.lossless(peers.method("transformers"))


def test_at_zero_one_lossless_rule_stands_for_all() -> None:
    result = rows(["lookup", "mine=suffix"], RULES, ["auto", "8x4"], ["plain", "int8"], ["transformers"])
    assert methods.at(0.7, result) == tuple(result)
    cold = methods.at(0.0, result)
    assert [m.name for m in cold] == [m.name for m in rows(
        ["lookup", "mine=suffix"], ["coupled"], ["auto", "8x4"], ["plain", "int8"], ["transformers"])]  # fmt: skip
    only = methods.at(0.0, rows(rules=["rejection", "block"]))
    assert [(m.spec, m.rule) for m in only] == [("none", "coupled"), ("lookup", "rejection")], "none of them is lost"
    assert [m.spec for m in methods.at(0.0, rows(rules=["typical?epsilon=0.3"]))] == ["none"]


# -- budgets -----------------------------------------------------------------------------------------------------------


def test_budgets() -> None:
    assert isinstance(methods.budget_of("auto"), AdaptiveBudget)
    assert methods.budget_of("auto") is not methods.budget_of("auto"), "each method learns for itself"
    assert methods.budget_of("16x6") == FixedBudget(16, 6)
    assert methods.budget_of("2x1") == FixedBudget(2, 1)
    assert methods.budget_of("3,2,1") == FixedBudget(1 + 3 + 6 + 6, 3, shape=(3, 2, 1))
    assert methods.budget_of("16") == FixedBudget(17, 1, shape=(16,)), "sixteen children"
    bandit = methods.budget_of("3,2,1 2,1 none")
    assert isinstance(bandit, BanditBudget)
    assert bandit.arms == ((0, (3, 2, 1)), (0, (2, 1)), (0, ()))


@pytest.mark.parametrize(
    "text",
    ["", " ", "much", "16x", "x6", "1x6", "0x0", "16x0", "-3x2", "3,,2", "3,", "0", "3,0", "1.5", "3;2",
     "2,1 2,1", "2,1 0", "1:3,2 2:2,1", "99,99"],
)  # fmt: skip
def test_budgets_that_are_refused(text: str) -> None:
    with pytest.raises(InputError) as error:
        methods.budget_of(text)
    one_sentence(error)


# -- peers -------------------------------------------------------------------------------------------------------------


def test_peers_are_the_files_but_our_own() -> None:
    assert "transformers" in peers.names()
    assert "outrider" not in peers.names()
    assert peers.method("transformers?cache=static") == Method("transformers?cache=static", peer="transformers")
    assert peers.method("transformers:org/name?lookup=4").peer == "transformers"
    assert peers.method("transformers").name == "transformers"


@pytest.mark.parametrize("spec", ["vllm", "outrider", "", "transformer:x", "a=transformers"])
def test_an_unknown_peer_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match=r"there is no peer '.*'; choose one of .*transformers") as error:
        peers.method(spec)
    one_sentence(error)


@dataclass(frozen=True)
class Echo:
    """Answers each prompt with its last token."""

    models: Models
    path: str | None
    times: int
    loud: bool

    def run(self, prompts: Sequence[Sequence[int]], ask: Ask) -> Answer:
        return Answer([[p[-1]] * min(self.times, ask.limit) for p in prompts])


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package beside ours, with a peer in it."""

    def load(models: Models, path: str | None = None, times: int = 1, loud: bool = False) -> Echo:
        return Echo(models, path, times, loud)

    module: Any = ModuleType("echo_peer")
    module.load = load
    monkeypatch.setitem(sys.modules, "echo_peer", module)
    point = EntryPoint("echo", "echo_peer", plugins.GROUPS["peers"])

    def entry_points(*, group: str) -> list[EntryPoint]:
        return [point] if group == "outrider.bench.peers" else []

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    monkeypatch.setattr(plugins, "_read", plugins._read.__wrapped__)  # nothing of it is kept


@pytest.mark.usefixtures("echo")
def test_another_package_may_bring_a_peer() -> None:
    assert {"echo", "transformers"} <= set(peers.names())
    assert peers.names() == sorted(peers.names())
    models, (_, row, _) = Models(), rows(others=["echo:some/where?times=3&loud=true"])
    assert (row.peer, row.spec, row.plain) == ("echo", "echo:some/where?times=3&loud=true", False)
    made = peers.load(row, models)
    assert isinstance(made, Peer)
    assert made == Echo(models, "some/where", 3, True)
    assert made.run([[4, 5]], Ask(8, 0.0, (1,), frozenset())).tokens == [[5, 5, 5]]
    assert peers.load(peers.method("echo"), models) == Echo(models, None, 1, False)


@pytest.mark.usefixtures("echo")
def test_options_of_a_peer() -> None:
    for spec, words in {
        "echo?often=3": "'echo?often=3' has no option 'often'; it has times, loud",
        "echo?models=3": "'echo?models=3' has no option 'models'; it has times, loud",
        "echo?times=many": "'echo?times=many': times must be a whole number, not 'many'",
    }.items():
        with pytest.raises(InputError) as error:
            peers.load(peers.method(spec), Models())
        assert one_sentence(error) == words


@pytest.mark.parametrize(
    ("text", "spec", "variant", "name"),
    [
        ("lookup@int8", "lookup", "int8", "lookup, int8"),
        (
            "eagle:DIR@16x6@native@rejection",
            "eagle:DIR",
            "native",
            "eagle:DIR, rejection, 16x6, native",
        ),
        ("none@native", "none", "native", "none, native"),
        ("eagle:me@int9", "eagle:me@int9", "plain", "eagle:me@int9"),
    ],
)
def test_a_variant_of_the_target_is_a_part_of_a_method(text: str, spec: str, variant: str, name: str) -> None:
    result = methods.parse(text)
    assert (result.spec, result.variant, result.name) == (spec, variant, name)
    assert [m.variant for m in methods.table([result], []) if m.plain] == [variant], (
        "plain decoding of the same weights"
    )


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(
        InputError, match="no variant 'int4' of a target; choose one of plain, eager, full, int8"
    ) as error:
        methods.table([Method("lookup", variant="int4")], [])
    one_sentence(error)
