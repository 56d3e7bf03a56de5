"""Drafters as vLLM's custom class, called as vLLM calls it: they draft what our engine drafts after the same text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from mamba_world import TEXTS, VOCAB, small_target
from small import tree_of
from transformers import LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM
from vllm_world import Scheduler, config

import outrider
from outrider import drafters
from outrider.budgets.budgeter import FixedBudget
from outrider.core.protocols import Drafter, Drafting, Round
from outrider.core.tree import check, from_lists
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters import _chain
from outrider.engine import Engine, generate
from outrider.engine.request import Request
from outrider.integrations.vllm import Proposer
from outrider.params import InputError

TOKENS, NEW = 4, 40
PLAIN = ["lookup", "suffix", "ngram", "none"]
SPECS = [[spec] for spec in PLAIN] + [
    ["model:DRAFT"], ["model:DRAFT?tree=chain"], ["mamba:MAMBA"], ["mamba:MAMBA?tree=chain"], ["suffix", "model:DRAFT"],
    ["lookup", "mamba:MAMBA"],
]  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Any:
    return small_target()


@pytest.fixture(scope="module")
def models(target: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Draft models: the target's own weights, shaken a little, and a Mamba-2 that knows nothing."""
    place = tmp_path_factory.mktemp("drafts")
    own = LlamaForCausalLM(target.model.config).double()
    own.load_state_dict(target.model.state_dict())
    torch.manual_seed(5)
    with torch.no_grad():
        for p in own.parameters():
            p += 0.03 * torch.randn_like(p)
    own.save_pretrained(place / "draft")
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.4}
    made = Mamba2ForCausalLM(Mamba2Config(**sizes, num_heads=8, head_dim=4, state_size=4, n_groups=1)).double()
    made.save_pretrained(place / "mamba")
    return {"DRAFT": str(place / "draft"), "MAMBA": str(place / "mamba")}


@pytest.fixture(scope="module")
def stories(target: Any) -> list[list[int]]:
    """Prompts, each with what the target writes after it."""
    outputs = outrider.load(target.model, "none").generate(TEXTS, max_new_tokens=NEW)
    return [[*prompt, *output.tokens] for prompt, output in zip(TEXTS, outputs, strict=True)]


def named(specs: list[str], models: dict[str, str]) -> list[str]:
    for name, folder in models.items():
        specs = [spec.replace(name, folder) for spec in specs]
    return specs


@dataclass
class Recorder(Drafter):
    """A drafter that writes down every chain with the length of the text that it was drafted from."""

    inner: Drafter
    taps: tuple[int, ...] = ()
    chains: list[tuple[int, list[int]]] = field(default_factory=list)

    def open(self, prompts: Any, capacity: int) -> Any:
        return Recording(self.inner.open(prompts, capacity), self.chains)


@dataclass
class Recording(Drafting):
    inner: Drafting
    chains: list[tuple[int, list[int]]]

    def observe(self, round: Round) -> None:
        self.inner.observe(round)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        tree = self.inner.propose(rows, budget)
        check(tree)
        self.chains.append((rows.start[0] + 1, tree.tokens[0, 1 : int(tree.size[0])].tolist()))
        return tree

    def select(self, index: Any) -> None:
        self.inner.select(index)

    def join(self, other: Drafting) -> None:
        raise AssertionError("one text is decoded alone")


def ours(target: Any, specs: list[str], prompt: list[int]) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """The text that our engine writes, and the chains that it drafted."""
    recorder = Recorder(_chain.of(drafters.load(specs, target), TOKENS))
    engine = Engine.of(target, recorder, FixedBudget(TOKENS + 1, TOKENS))
    (*_, last) = generate(engine, [Request(prompt, 0, NEW)])
    return [*prompt, *last.row.output], recorder.chains


@pytest.mark.parametrize("specs", SPECS, ids="+".join)
def test_chains_are_those_of_our_own_engine(specs: list[str], target: Any, models: dict[str, str]) -> None:
    """Round for round, also where confidences are learnt on the way."""
    accepted = drafted = 0
    for prompt in TEXTS:
        text, chains = ours(target, named(specs, models), prompt)
        play = Scheduler(Proposer(config(target, named(specs, models), TOKENS)), [text])
        play.come(0, len(prompt))
        while play.at[0] + TOKENS + 1 < len(text):
            play.step()
        expected = dict(chains)
        assert len(play.drafts) > 5
        for _, length, chain in play.drafts:
            if len(prompt) + NEW - length > TOKENS:  # at its end our engine drafts no more than fits
                assert chain == expected[length]
        accepted, drafted = accepted + play.accepted, drafted + sum(len(c) for _, _, c in play.drafts)
    assert drafted > 20 or specs == ["none"]
    assert accepted > 10 or specs in (["none"], ["ngram"]) or "MAMBA" in specs[0]


@pytest.mark.parametrize("specs", SPECS, ids="+".join)
def test_rows_that_come_go_and_change_places(
    specs: list[str], target: Any, models: dict[str, str], stories: list[list[int]]
) -> None:
    """Two stories are equal, so that rows cannot be distinguished by their texts, and need not be."""
    pinned = [s + ("&" if "?" in s else "?") + "scale=1" if ":" in s else s for s in named(specs, models)]
    play = Scheduler(Proposer(config(target, pinned, TOKENS)), [*stories, stories[0]])
    play.come(0, len(TEXTS[0]))
    play.step(reading=[0])
    play.step()
    play.come(1, len(TEXTS[1]))
    play.come(3, len(TEXTS[0]))
    play.step(reading=[2])
    play.step()
    play.swap(0, 2)
    play.step()
    play.leave(0)
    play.come(2, len(TEXTS[2]))
    play.step()
    play.swap(0, 1)
    play.step()
    play.swap(0, 2)
    play.leave(1)
    play.step()
    play.leave(0)
    play.leave(0)
    play.step()
    play.come(1, len(TEXTS[1]))
    play.step()
    play.step()
    assert len(play.drafts) > 14
    if len(specs) > 1:  # a mix learns how often its parts are right, so a fresh one may choose otherwise
        return
    for story, length, chain in play.drafts:
        if chain or length > len(TEXTS[story % 3]):
            alone = Scheduler(Proposer(config(target, pinned, TOKENS)), play.stories)
            alone.come(story, length - 1)
            alone.step()
            assert alone.drafts == [(story, length, chain)]


def test_skipped_steps_are_caught_up(target: Any) -> None:
    """Near the end of its context vLLM skips the proposer; chains may also be cut on their way, or not be used."""
    story = [1, 2, 3, 4, 5] * 12
    play = Scheduler(Proposer(config(target, "lookup", TOKENS)), [story])
    play.come(0, 8)
    play.step()
    assert play.chains == [story[9:13]]
    play.at[0] += 3
    play.chains = [[]]
    play.step()
    assert play.chains == [story[13:17]]
    play.chains = [play.chains[0][:2]]
    play.step()
    assert play.at == [16]
    assert play.chains == [story[16:20]]


def test_the_end_of_the_context(target: Any) -> None:
    story = [1, 2, 3] * 9
    for context in range(12, 20):
        play = Scheduler(Proposer(config(target, "lookup", TOKENS, context)), [story], context)
        play.come(0, 10)
        play.step()
        assert len(play.chains[0]) == max(0, min(TOKENS, context - 11 - 1)), context


def test_refusals(target: Any) -> None:
    for drafter in (None, 7, [], [""], {"lookup": 1}):
        with pytest.raises(InputError, match="name a drafter in vLLM's additional config"):
            Proposer(config(target, drafter, TOKENS))
    with pytest.raises(InputError, match="there is no drafter"):
        Proposer(config(target, "nothing", TOKENS)).load_model()
    with pytest.raises(InputError, match="outrider export"):
        Proposer(config(target, "lookahead", TOKENS)).load_model()


@pytest.mark.parametrize("spec", ["eagle:demo", "eagle3:demo", "medusa:demo", "hydra:demo", "eagle:demo/hass"])
@pytest.mark.trained
def test_drafters_of_hidden_states_are_refused(spec: str) -> None:
    shipped = outrider.load("demo", "none").target
    with pytest.raises(InputError, match="outrider export"):
        Proposer(config(shipped, spec, TOKENS)).load_model()
    with pytest.raises(InputError, match="outrider export"):
        Proposer(config(shipped, ["lookup", spec], TOKENS)).load_model()


def test_the_spine_of_a_tree() -> None:
    # 9 -> 5 (.6) -> 6 (.5) and 9 -> 8 (.7): worths 1.1 and .7; the second row has the longer second path
    tree = from_lists(
        [
            ([9, 5, 8, 6], [0, 0, 0, 1], [0.0, *map(math.log, (0.6, 0.7, 0.5))]),
            ([4, 1, 2], [0, 0, 0], [0.0, -2.0, -1.0]),
        ]
    )
    made, where = _chain.spine(tree)
    check(made)
    assert made.tokens.tolist() == [[9, 5, 6], [4, 2, 0]]
    assert made.size.tolist() == [3, 2]
    assert where == [[0, 1, -1, 2], [0, -1, 1]]
    plain, _ = _chain.spine(tree_of([[9, 5, 8, 6, 7]], [[0, 0, 0, 1, 2]]))
    assert plain.tokens.tolist() == [[9, 5, 6]], "without values the longest path, of several the first"
