"""A drafter from elsewhere that proposes broken trees is named and refused, before any memory is read by them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_world import outputs
from safetensors.torch import load_file, save_file

import outrider
from outrider.backends.torch import sizes
from outrider.budgets.budgeter import FixedBudget
from outrider.core.protocols import Drafter, Drafting, Round
from outrider.core.tree import chain, flaw, from_lists
from outrider.core.types import Array, Budget, DraftTree, Rows
from outrider.engine import Engine
from outrider.engine.request import Request
from outrider.params import InputError
from outrider.shipped import shipped


@dataclass(frozen=True)
class Foreign(Drafter):
    """Drafts the tree [root, 5, 6, 7] in two branches, with these fields written over."""

    wrong: dict[str, Any]
    taps: tuple[int, ...] = ()

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> Drafting:
        return ForeignDrafting(self)


@dataclass
class ForeignDrafting(Drafting):
    drafter: Foreign

    def observe(self, round: Round) -> None: ...

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        tree = from_lists([([root, 5, 6, 7], [0, 0, 1, 0], [0.0] * 4) for root in rows.root], values=False)
        return replace(tree, **{name: change(getattr(tree, name)) for name, change in self.drafter.wrong.items()})

    def select(self, index: Sequence[int]) -> None: ...

    def join(self, other: Drafting) -> None: ...


def at(place: tuple[int, ...], value: Any) -> Any:
    """The same array with another value at one place of its last row."""

    def change(array: Array) -> Array:
        array = array.copy()
        array[(-1, *place)] = value
        return array

    return change


BROKEN = {
    "a huge token": ({"tokens": at((2,), 10**11)}, "token lies outside the vocabulary of 97"),
    "the vocabulary's size": ({"tokens": at((2,), 97)}, "token lies outside the vocabulary of 97"),
    "a negative token": ({"tokens": at((1,), -1)}, "token lies outside the vocabulary of 97"),
    "another root": ({"tokens": at((0,), 4)}, "root is not the last token"),
    "a parent after its child": ({"parents": at((1,), 2)}, "a node comes before its parent"),
    "its own parent": ({"parents": at((2,), 2)}, "a node comes before its parent"),
    "a huge parent": ({"parents": at((3,), 10**9)}, "a node comes before its parent"),
    "a negative parent": ({"parents": at((3,), -2)}, "a node comes before its parent"),
    "another parent": ({"parents": at((2,), 0)}, "depth is not its parent's plus one"),
    "a depth too many": ({"depths": at((3,), 2)}, "depth is not its parent's plus one"),
    "a negative depth": ({"depths": at((3,), -5)}, "depth is not its parent's plus one"),
    "a huge depth": ({"depths": at((3,), 10**6)}, "depth is not its parent's plus one"),
    "a deep root": ({"depths": at((0,), 1)}, "its root has a parent or a depth"),
    "a bound too low": ({"deepest": lambda _: 1}, "deeper than the tree's deepest, 1"),
    "a size of 5,000": ({"size": at((), 5000)}, "more than 4"),
    "an empty row": ({"size": at((), 0)}, "fewer than one node"),
    "a stranger among the ancestors": ({"ancestors": at((3, 1), True)}, "ancestor matrix does not follow"),
    "no root among the ancestors": ({"ancestors": at((2, 0), False)}, "ancestor matrix does not follow"),
    "no ancestors": ({"ancestors": lambda _: None}, "its ancestor matrix is not"),
    "ancestors of another tree": ({"ancestors": lambda a: a[:, :3, :3]}, "its ancestor matrix is not"),
    "tokens of another shape": ({"tokens": lambda t: t[:, :3]}, "are not all"),
    "a row too few": ({"size": lambda s: s[:-1]}, "its size is not"),
    "int32": ({"tokens": lambda t: t.astype(np.int32)}, "are not all of int64"),
    "floats": ({"parents": lambda t: t.astype(np.float32)}, "are not all of int64"),
}  # fmt: skip


def written(target: Any, wrong: dict[str, Any]) -> list[list[int]]:
    engine = Engine.of(target, Foreign(wrong), FixedBudget(8, 4))
    return [row.output for row in outputs(engine, [Request([3, 9, 2 + i], i, 8) for i in range(2)])]


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_tree_is_refused_and_its_drafter_named(target: Any, kind: str) -> None:
    wrong, sentence = BROKEN[kind]
    with pytest.raises(InputError, match=f"the drafter test_broken_trees.Foreign proposed a broken tree: .*{sentence}"):
        written(target, wrong)


def test_a_right_tree_passes(target: Any) -> None:
    assert [len(text) for text in written(target, {})] == [8, 8]


def test_padding_need_not_be_a_tree() -> None:
    """Rows of unequal size: what stands behind a row's nodes is not held to be a tree."""
    tree = chain([[4, 5, 6], [7]])
    root = [4, 7]
    assert flaw(tree, root, 97) == ""
    assert flaw(replace(tree, depths=at((2,), 1)(tree.depths)), root, 97) == ""
    for part, value in (("tokens", 10**11), ("parents", 3), ("depths", -1)):
        assert "of a node or of padding is not one of 0 to" in flaw(
            replace(tree, **{part: at((2,), value)(getattr(tree, part))}), root, 97
        )


def test_a_draft_model_that_computes_nan_changes_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its trees were sorted by NaN, and their roots were lost: another text was written."""
    folder = shutil.copytree(shipped("demo/llama"), tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][100:1000] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(sizes, "try_out", lambda target, name: None)  # which refuses it when it is loaded
    llm = outrider.load("demo", f"model:{folder}", compile=False)
    with pytest.raises(InputError, match="ModelDrafter proposed a broken tree: its confidences are NaN"):
        llm.generate("Once upon a time", max_new_tokens=8)
