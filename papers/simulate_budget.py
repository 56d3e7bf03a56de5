"""Simulate the adaptive budget on recorded drafts: exact but for the clock, and without a model.

    python papers/simulate_budget.py run                         every cell, half a per cent in about 20 s of one core
    python papers/simulate_budget.py run --drift 0.3 --out B.json
    python papers/simulate_budget.py compare A.json B.json       two runs, cell by cell
    python papers/simulate_budget.py ablate                      what every constant of the budget is worth
    python papers/simulate_budget.py record --data FOLDER        record drafts and costs anew (needs a quiet machine)

Under the rule `coupled` a text does not depend on its drafts. So the trees that a drafter proposes at every position of
known texts are recorded once, with their confidences, and any budget can be replayed on them: which nodes it would have
kept, and which of those the target would have accepted, is known. Only the clock is simulated. Its costs (passes by
rows and nodes, drafts by rows and depth) were measured while recording; noise and drift are options.

A run plays all cells (task x temperature x batch size) of a drafter in random order with one budget, as a server would,
and scores each by the cost table without noise: noise disturbs what the budget observes, not the score. The score of a
cell is its speed relative to the best of eight fixed budgets, and to plain decoding. Standard errors are over seeds.

Approximations: a shallower draft is the recorded one (8 deep, 32 nodes) cut at its depth, and nodes whose recorded
value lies below 0.01 are missing, which no budget keeps. The budget's own computing time is not simulated.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter
from typing import Any

import numpy as np

from outrider.budgets.adaptive import AdaptiveBudget
from outrider.budgets.budgeter import Budgeter, FixedBudget, Report
from outrider.budgets.calibration import Rates
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Drafter, Drafting, Round, TargetOutput
from outrider.core.tree import best_of, from_lists, root_only
from outrider.core.types import Budget, DraftTree, HostRow, Rows
from outrider.drafters._mix import MixDrafter, translated
from outrider.engine import generate
from outrider.engine.request import Request
from outrider.params import Sampling

DATA = Path(__file__).parent / "data" / "budget.npz"
TASKS = ("mt-bench", "gsm8k", "humaneval", "cnn-dm@600")
TEMPERATURES = (0.0, 1.0)
BATCHES = (1, 4, 8)
DRAFTERS = ("lookup", "suffix", "eagle", "suffix + eagle", "dear eagle")
DEAR = 10.0  # times as long as EAGLE's drafts take those of "dear eagle": a drafter that seldom pays
RECORDED = ("lookup", "suffix", "eagle")
FIXED = ((1, 0), (2, 1), (3, 2), (4, 3), (6, 5), (8, 4), (16, 6), (32, 8))  # nodes with the root, depth
TEXTS, TOKENS, NODES, DEPTH = 12, 48, 32, 8
STEPS_PER_NAT = 32  # values are stored in bytes
LEAST = math.log(0.01)


# ---------------------------------------------------------------------------------------------------- recorded texts


@dataclass(frozen=True)
class Text:
    """A prompt's length, the tokens that follow it, and what each drafter proposed after each of them."""

    prompt: int
    tokens: list[int]
    trees: dict[str, list[HostRow]]  # drafter -> [tokens written - 1]: tokens, parents, log values of the nodes


@dataclass(frozen=True)
class Costs:
    """Seconds, as measured while recording. Pairs are (size, seconds), sizes ascending."""

    verify: dict[int, list[tuple[float, float]]]  # rows -> by the nodes of all rows
    draft: dict[str, dict[int, list[tuple[float, float]]]]  # drafter -> rows -> by depth
    rest: tuple[float, float]  # of a round without a draft, and with one
    read: dict[str, float]  # drafter -> of a token that it has not read yet

    def __hash__(self) -> int:
        return id(self)

    @cache  # noqa: B019 - lives as long as the program
    def verify_at(self, rows: int, nodes: int) -> float:
        return _at(_of_rows(self.verify, rows), nodes)

    @cache  # noqa: B019
    def draft_at(self, drafter: str, rows: int, depth: int) -> float:
        return _at(_of_rows(self.draft[drafter], rows), depth)


def _of_rows(tables: dict[int, list[tuple[float, float]]], rows: int) -> list[tuple[float, float]]:
    """The table of so many rows, interpolated between the batch sizes that were measured."""
    if rows in tables:
        return tables[rows]
    low, high = max(b for b in tables if b < rows), min((b for b in tables if b > rows), default=0)
    if not high:
        return tables[low]
    share = (rows - low) / (high - low)
    sizes = sorted({size for b in (low, high) for size, _ in tables[b]})
    return [(n, (1 - share) * _at(tables[low], n) + share * _at(tables[high], n)) for n in sizes]


def _at(table: Sequence[tuple[float, float]], size: float) -> float:
    """Linear between the points, and beyond the last two."""
    i = max(1, min(len(table) - 1, sum(known < size for known, _ in table)))
    (a, low), (b, high) = table[i - 1], table[i]
    return max(1e-6, low + (high - low) * (size - a) / (b - a))


@dataclass(frozen=True)
class Recording:
    texts: dict[tuple[str, float], list[Text]]  # task and temperature
    costs: Costs
    best: dict[str, tuple[float, float]]  # cell -> tokens per second of the best fixed budget and of none


def load(file: Path = DATA) -> Recording:
    """Read a recording."""
    with np.load(file) as held:
        about = json.loads(str(held["about"]))
        prompts, tokens = held["prompts"].tolist(), held["tokens"].tolist()
        trees = {name: _unpacked(*(held[f"{name}_{part}"] for part in PARTS)) for name in RECORDED}
    texts: dict[tuple[str, float], list[Text]] = defaultdict(list)
    cells = [(task, t) for task in about["tasks"] for t in about["temperatures"] for _ in range(about["texts"])]
    each = len(tokens[0]) - 2  # nothing is drafted for the last token
    for i, cell in enumerate(cells):
        mine = {name: rows[i * each : (i + 1) * each] for name, rows in trees.items()}
        texts[cell].append(Text(prompts[i], tokens[i], mine))
    costs = about["costs"]
    by_rows = {int(b): [(n, s) for n, s in pairs] for b, pairs in costs["verify"].items()}
    draft = {
        name: {int(b): [(n, s) for n, s in pairs] for b, pairs in tables.items()}
        for name, tables in costs["draft"].items()
    }
    rest = costs["rest"]
    return Recording(dict(texts), Costs(by_rows, draft, (rest[0], rest[1]), costs["read"]), about.get("best", {}))


PARTS = ("sizes", "tokens", "parents", "values")


def _packed(trees: Sequence[HostRow]) -> tuple[np.ndarray, ...]:
    """Trees without their roots, one after the other."""
    kept = [[i for i in range(1, len(row[0])) if row[2][i] >= LEAST] for row in trees]
    new = [{0: 0, **{old: k for k, old in enumerate(ids, 1)}} for ids in kept]
    pairs = list(zip(trees, kept, new, strict=True))
    values = [min(255, round(-STEPS_PER_NAT * row[2][i])) for row, ids, _ in pairs for i in ids]
    return (
        np.array([len(ids) for ids in kept], dtype=np.uint8),
        np.array([row[0][i] for row, ids, _ in pairs for i in ids], dtype=np.uint16),
        np.array([to[row[1][i]] for row, ids, to in pairs for i in ids], dtype=np.uint8),
        np.array(values, dtype=np.uint8),
    )


def _unpacked(sizes: np.ndarray, tokens: np.ndarray, parents: np.ndarray, values: np.ndarray) -> list[HostRow]:
    """Trees whose root has the token -1: it is in the text."""
    made, at = [], 0
    ids, ups, logs = tokens.tolist(), parents.tolist(), (values / -STEPS_PER_NAT).tolist()
    for n in sizes.tolist():
        made.append(([-1, *ids[at : at + n]], [0, *ups[at : at + n]], [0.0, *logs[at : at + n]]))
        at += n
    return made


# ------------------------------------------------------------------------------------------------------- the machine


@dataclass
class Clock:
    """Simulated seconds. `noise`: the standard deviation of the log of what a measurement is off by. `drift`: passes
    and drafts take up to this share longer, by turns of about `MOOD` seconds."""

    noise: float
    drift: float
    dice: random.Random
    now: float = 0.0  # seconds as they are observed
    mood: float = 0.0
    until: float = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> float:
        """What is observed of a part of a round that takes so long on a quiet machine."""
        if self.drift and self.now >= self.until:
            self.mood, self.until = self.drift * self.dice.random(), self.now + MOOD * self.dice.expovariate(1.0)
        seen = seconds * (1 + self.mood) * math.exp(self.noise * self.dice.gauss(0, 1))
        self.now += seen
        return seen


MOOD = 0.7


# ------------------------------------------------------------------------------------------------------ the drafters


@dataclass
class Replayed(Drafting):
    """A recorded drafter, in the place of the real one. Rows name their text by the seed."""

    name: str
    world: World
    dear: float = 1.0

    def observe(self, round: Round) -> None:
        del round

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        return from_lists(self.sketch(rows, budget))

    def sketch(self, rows: Rows, budget: Budget) -> list[HostRow]:
        raise NotImplementedError

    def select(self, index: Sequence[int]) -> None:
        raise AssertionError("rows name their text, and a drafting keeps none")

    def join(self, other: Drafting) -> None:
        raise AssertionError("rows name their text, and a drafting keeps none")

    def trees(self, rows: Rows, depth: int) -> list[HostRow]:
        """What was recorded for every row, cut at a depth."""
        found = []
        for seed, start, left in zip(rows.seeds, rows.start, rows.remaining, strict=True):
            found.append(self.world.tree(self.name, seed, start, min(depth, left - 1)))
        return found

    def spend(self, rows: Rows, steps: int) -> None:
        """Pay for a draft of so many steps, and for reading what it has not read."""
        world, seconds = self.world, self.world.costs.draft_at(self.name, len(rows), steps)
        read = world.costs.read[self.name]
        for seed, start in zip(rows.seeds, rows.start, strict=True):
            seconds += read * (start - world.read.get((self.name, seed), 0) - 1)
            world.read[self.name, seed] = start
        world.spend(self.dear * seconds)


@dataclass
class Counts(Replayed):
    """Lookup or suffix decoding."""

    def sketch(self, rows: Rows, budget: Budget) -> list[HostRow]:
        self.spend(rows, 1)
        n = budget.nodes
        return [(a[:n], b[:n], c[:n]) for a, b, c in self.trees(rows, budget.depth)]


@dataclass
class Network(Replayed):
    """EAGLE: it goes deeper while its best node is worth a step, then its tree is cut where it pays."""

    steps: int = 0

    def sketch(self, rows: Rows, budget: Budget) -> list[HostRow]:
        trees, reach = self.trees(rows, budget.depth), math.log(max(1e-9, budget.reach, budget.floor))
        self.steps = 0
        for depth in range(1, min(budget.depth, max(rows.remaining) - 1) + 1):
            keys = zip(rows.seeds, rows.start, rows.remaining, strict=True)
            best = max(
                self.world.best_value(self.name, seed, start, depth - 1) for seed, start, left in keys if left > depth
            )
            if depth > 1 and best <= reach:
                break
            self.steps = depth
        self.spend(rows, self.steps)
        kept = best_of([values for _, _, values in trees], budget.nodes, budget.floor, budget.price)
        return [_part(tree, ids) for tree, ids in zip(trees, kept, strict=True)]


def _part(tree: HostRow, ids: Sequence[int]) -> HostRow:
    new = {old: i for i, old in enumerate(ids)}
    tokens, parents, values = tree
    return [tokens[i] for i in ids], [new[parents[i]] for i in ids], [values[i] for i in ids]


@dataclass
class World:
    """The texts of a cell, what is known of their drafts, and the time that its rounds take."""

    costs: Costs
    clock: Clock
    texts: Sequence[Text] = ()
    read: dict[tuple[str, int], int] = field(default_factory=dict)
    seconds: float = 0.0  # of this round's draft, without noise
    observed: float = 0.0
    known: dict[Any, Any] = field(default_factory=dict)

    def begin(self, texts: Sequence[Text]) -> None:
        self.texts, self.read = texts, {}

    def spend(self, seconds: float) -> None:
        self.seconds += seconds
        self.observed += self.clock.spend(seconds)

    def tree(self, drafter: str, seed: int, start: int, depth: int) -> HostRow:
        text = self.texts[seed]
        if depth < 1:
            return [text.tokens[start - text.prompt]], [0], [0.0]
        key = id(text), drafter, start, depth
        if (found := self.known.get(key)) is None:
            row = text.trees[drafter][start - text.prompt]
            depths = _depths(row[1])
            found = self.known[key] = _part(row, [i for i, d in enumerate(depths) if d <= depth])
            found[0][0] = text.tokens[start - text.prompt]
        return found

    def best_value(self, drafter: str, seed: int, start: int, depth: int) -> float:
        """The log of the most valuable recorded node's value at a depth."""
        text = self.texts[seed]
        key = id(text), drafter, start
        if (found := self.known.get(key)) is None:
            _, parents, values = text.trees[drafter][start - text.prompt]
            found = [-99.0] * (DEPTH + 1)
            for d, value in zip(_depths(parents), values, strict=True):
                found[d] = max(found[d], value)
            self.known[key] = found
        return float(found[depth])

    def accepted(self, seed: int, start: int, tokens: Sequence[int], parents: Sequence[int]) -> int:
        """How deep the text goes in a tree behind its first `start` tokens."""
        text = self.texts[seed]
        child = {(parents[i], tokens[i]): i for i in range(1, len(tokens))}
        node, depth = 0, 0
        for token in text.tokens[start - text.prompt + 1 :]:
            if (node := child.get((node, token), -1)) < 0:
                break
            depth += 1
        return depth


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for up in parents[1:]:
        depths.append(depths[up] + 1)
    return depths


def drafting(name: str, world: World) -> Any:
    """What drafts in a cell, and what it learns over all of them: a real mix of replayed drafters, or a network."""
    kinds: list[Replayed] = [
        Network("eagle", world, dear=DEAR if part.startswith("dear") else 1.0)
        if part.endswith("eagle")
        else Counts(part, world)
        for part in name.split(" + ")
    ]
    first = kinds[0]
    if isinstance(first, Network) and len(kinds) == 1:
        return lambda: first
    rates, alone = (tuple(None if isinstance(k, Network) else Rates() for k in kinds) for _ in range(2))
    mix = MixDrafter(tuple(map(_Opened, kinds)), rates, alone, clock=world.clock)
    return lambda: mix.open((), 0)


@dataclass(frozen=True)
class _Opened(Drafter):
    """A drafter whose drafting is there already."""

    part: Replayed
    reads_tree = False

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> Replayed:
        del prompts, capacity
        return self.part


# ------------------------------------------------------------------------------------------------------------- cells

NOTHING = TargetOutput(None)
SETTINGS = {t: Sampling(t) for t in TEMPERATURES}


@dataclass
class Place:
    """A row: a text and how far it is written."""

    text: int
    length: int
    left: int
    serial: int = 0


def play(
    world: World, opened: Any, budget: Budgeter, texts: Sequence[Text], temperature: float, batch: int
) -> tuple[int, float]:
    """Decode a cell's texts, at most `batch` at a time; tokens, and seconds without noise."""
    world.begin(texts)
    mine, waiting, rows = opened(), list(range(len(texts)))[::-1], list[Place]()
    tokens, seconds, costs, clock = 0, 0.0, world.costs, world.clock
    while waiting or rows:
        while waiting and len(rows) < batch:
            i = waiting.pop()
            rows.append(Place(i, texts[i].prompt, len(texts[i].tokens) - 1))
        b, view = len(rows), _view(rows, temperature)
        wanted = budget.choose(view)
        world.seconds = world.observed = 0.0
        depth = 0 if wanted.nodes < 2 else max(0, min(wanted.depth, max(view.remaining) - 1))
        tree = mine.propose(view, wanted) if depth else root_only([0] * b)
        trees = tree.host
        total = sum(len(ids) for ids, _, _ in trees)
        verify, rest = costs.verify_at(b, total), costs.rest[depth > 0]
        draft, drafted = world.observed, min(depth, mine.steps if isinstance(mine, Network) else depth)
        accepted = [world.accepted(row.text, row.length, *tree[:2]) for row, tree in zip(rows, trees, strict=True)]
        seconds += world.seconds + verify + rest
        counts = [n for n, left in zip(accepted, view.remaining, strict=True) if left > 1]
        budget.learn(Report(
            b, depth, max(len(ids) for ids, _, _ in trees), draft, clock.spend(verify), clock.spend(rest),
            [sum(n >= d for n in counts) for d in range(1, depth + 1)], drafted,
            math.fsum(math.exp(value) for _, _, logs in trees for value in logs[1:]), len(counts), total,
        ))  # fmt: skip
        added = []
        for row, n in zip(rows, accepted, strict=True):
            at = row.length - texts[row.text].prompt
            added.append(texts[row.text].tokens[at + 1 : at + 2 + n])
            row.length, row.left, row.serial = row.length + n + 1, row.left - n - 1, row.serial + 1
        tokens += sum(map(len, added))
        mine.observe(Round(view, tree, NOTHING, [], [], added))
        rows = [row for row in rows if row.left > 0]
    return tokens, seconds


def _view(rows: Sequence[Place], temperature: float) -> Rows:
    b = len(rows)
    return Rows(
        (0,) * b, tuple(row.length for row in rows), tuple(row.text for row in rows),
        tuple(row.serial for row in rows), (SETTINGS[temperature],) * b, "coupled", tuple(row.left for row in rows),
        GUMBEL,
    )  # fmt: skip


GUMBEL = GumbelNoise(8)


def cells() -> Iterator[tuple[str, float, int]]:
    return itertools.product(TASKS, TEMPERATURES, BATCHES)


def key(drafter: str, task: str, temperature: float, batch: int) -> str:
    return f"{drafter} | {task} | {temperature:g} | {batch}"


def fixed(recording: Recording) -> dict[str, tuple[float, float]]:
    """Of every cell the best fixed budget's tokens per second, and plain decoding's."""
    made: dict[str, tuple[float, float]] = {}
    for drafter in DRAFTERS:
        rates: dict[str, list[float]] = defaultdict(list)
        for nodes, depth in FIXED:
            for cell in cells():
                world = World(recording.costs, Clock(0, 0, random.Random(0)))
                task, t, b = cell
                tokens, seconds = play(
                    world, drafting(drafter, world), FixedBudget(nodes, depth), recording.texts[task, t], t, b
                )
                rates[key(drafter, *cell)].append(tokens / seconds)
        made |= {name: (max(found), found[0]) for name, found in rates.items()}
    return made


def simulate(recording: Recording, drafter: str, seed: int, noise: float, drift: float) -> dict[str, float]:
    """Tokens per second of the adaptive budget in every cell of a drafter, played in random order."""
    dice = random.Random(seed)
    world, budget = World(recording.costs, Clock(noise, drift, dice)), AdaptiveBudget()
    opened, found = drafting(drafter, world), {}
    for cell in dice.sample(list(cells()), len(list(cells()))):
        task, t, b = cell
        tokens, seconds = play(world, opened, budget, recording.texts[task, t], t, b)
        found[key(drafter, *cell)] = tokens / seconds
    return found


def run(
    recording: Recording, drafters: Sequence[str], seeds: int, noise: float, drift: float
) -> dict[str, list[float]]:
    """The same for every seed: cell -> tokens per second."""
    found: dict[str, list[float]] = defaultdict(list)
    for drafter in drafters:
        for seed in range(seeds):
            for cell, rate in simulate(recording, drafter, seed, noise, drift).items():
                found[cell].append(rate)
    return dict(found)


# --------------------------------------------------------------------------------------------------------- recording


@dataclass
class Recorder(Drafter):
    """Drafts with several drafters at once, keeps what they propose, and proposes nothing."""

    drafters: dict[str, Any]  # by name
    kept: dict[tuple[int, int], dict[str, HostRow]] = field(default_factory=dict)  # (seed, start) -> by drafter
    reads_tree = False

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(sorted({tap for part in self.drafters.values() for tap in part.taps}))

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> Recorded:
        return Recorded(self, {name: part.open(prompts, capacity) for name, part in self.drafters.items()})


@dataclass
class Recorded(Drafting):
    """The state of a batch of one row."""

    recorder: Recorder
    parts: dict[str, Any]
    trees: dict[str, DraftTree] = field(default_factory=dict)

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        self.trees = {name: part.propose(rows, budget) for name, part in self.parts.items()}
        row = {name: tree.host[0] for name, tree in self.trees.items()}
        self.recorder.kept[rows.seeds[0], rows.start[0]] = row
        return root_only(rows.root)

    def observe(self, round: Round) -> None:
        for name, part in self.parts.items():
            tree = self.trees.get(name)
            if tree is None:
                part.observe(round)
                continue
            part.observe(translated(round, tree, [[0, *[-1] * (tree.nodes - 1)]]))
        self.trees = {}

    def select(self, index: Sequence[int]) -> None:
        for part in self.parts.values():
            part.select(index)

    def join(self, other: Any) -> None:
        raise AssertionError("texts are recorded one at a time")


@dataclass
class Timed:
    """A fixed budget that keeps its reports."""

    inner: FixedBudget
    reports: list[Report] = field(default_factory=list)

    def choose(self, rows: Rows) -> Budget:
        return self.inner.choose(rows)

    def learn(self, report: Report) -> None:
        self.reports.append(report)


def record(model: str, eagle: str, folder: Path, out: Path) -> None:
    """Record the texts of all cells with the drafts of all drafters, and what passes and drafts cost here."""
    import outrider
    from outrider import drafters
    from outrider.bench import tasks

    llm = outrider.load(model, f"eagle:{eagle}")
    parts = {"eagle": llm.drafter, **{name: drafters.load_one(name) for name in ("lookup", "suffix")}}
    recorder = Recorder(parts)
    engine = replace(llm.engine(budget=FixedBudget(NODES, DEPTH)), drafter=recorder)
    prompts: dict[str, list[list[int]]] = {}
    for task in TASKS:
        found = tasks.load(task, str(folder), TEXTS)
        chats = [[{"role": "user", "content": p.turns[0]}] for p in found.prompts]
        prompts[task] = [tasks.cut(ids, found.cut) if found.cut else ids for ids in map(llm.encode, chats)]
    texts, sizes, trees = [], [], defaultdict(list)
    for task, t in itertools.product(TASKS, TEMPERATURES):
        for seed, ids in enumerate(prompts[task]):
            recorder.kept.clear()
            request = Request(ids, seed, TOKENS + 1, Sampling(t))
            pieces = list(generate(engine, [request], 1))
            texts.append(pieces[-1].row.output)
            sizes.append(len(ids))
            for _, found_at in sorted(recorder.kept.items(), key=lambda pair: pair[0][1]):
                for name, tree in found_at.items():
                    trees[name].append(tree)
        print(task, t, file=sys.stderr)
    costs = measure(model, eagle, [ids for task in TASKS for ids in prompts[task][:6]])
    about: dict[str, Any] = {
        "tasks": TASKS,
        "temperatures": TEMPERATURES,
        "texts": TEXTS,
        "costs": costs,
        "model": model,
        "eagle": eagle,
    }
    write(out, about, np.array(sizes, dtype=np.uint16), np.array(texts, dtype=np.uint16), trees)


def compare_fixed(file: Path) -> None:
    """Work out anew what the fixed budgets give on a recording."""
    with np.load(file) as held:
        arrays = dict(held)
    about = json.loads(str(arrays.pop("about")))
    about["best"] = fixed(load(file))
    np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)


def write(
    out: Path, about: dict[str, Any], prompts: np.ndarray, tokens: np.ndarray, trees: dict[str, list[HostRow]]
) -> None:
    """Write a recording, with what the fixed budgets give on it."""
    packed: dict[str, Any] = {
        f"{name}_{part}": array
        for name, rows in trees.items()
        for part, array in zip(PARTS, _packed(rows), strict=True)
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, about=np.array(json.dumps(about)), prompts=prompts, tokens=tokens, **packed)
    compare_fixed(out)


ASKED = {1: (1, 2, 3, 4, 6, 8, 12, 16, 17, 20, 24, 32), 4: (1, 2, 3, 4, 6, 8, 16), 8: (1, 2, 3, 4, 6, 8)}

REPEATS = 3  # of each measurement, with other texts


def measure(model: str, eagle: str, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Seconds of passes, drafts and the rest of a round. Low quantiles: other work on the machine only adds time."""
    import outrider

    verify: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    draft: dict[str, dict[int, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    rest: tuple[list[float], list[float]] = [], []
    read: dict[str, float] = {}
    for name in RECORDED:
        llm = outrider.load(model, f"eagle:{eagle}" if name == "eagle" else name)
        firsts = []
        for b, sizes in ASKED.items():
            pairs = [(n, max(0, min(DEPTH, n - 1))) for n in sizes] + [(16, d) for d in range(1, DEPTH + 1)]
            for n, depth in pairs if name == "eagle" else ((1, 0), (16, DEPTH)):
                timed = Timed(FixedBudget(n, depth))
                for i in range(REPEATS):
                    texts = list(prompts[i * b : i * b + b])
                    llm.generate(texts, max_new_tokens=33, seed=0, batch_size=b, budget=timed, ignore_eos=True)
                if depth:
                    firsts.append((timed.reports[0].draft_seconds, sum(map(len, prompts[:b])), b, depth))
                for report in timed.reports[2:]:
                    if report.rows == b and report.depth == depth:
                        verify[b][report.total].append(report.verify_seconds)
                        rest[depth > 0].append(report.rest_seconds)
                        if depth:
                            draft[name][b][depth if name == "eagle" else 1].append(report.draft_seconds)
        usual = {b: {d: _low(s) for d, s in tables.items()} for b, tables in draft[name].items()}
        read[name] = max(
            0.0,
            _low([(s - usual[b].get(d, usual[b][1])) / n for s, n, b, d in firsts if d in usual[b] or 1 in usual[b]]),
        )
    tables = {
        name: {
            b: _rising(found) if name == "eagle" else [(1, _low(found[1])), (2, _low(found[1]))]
            for b, found in by_rows.items()
        }
        for name, by_rows in draft.items()
    }
    return {
        "verify": {b: _rising({n: s for n, s in found.items() if len(s) > 5}) for b, found in verify.items()},
        "draft": tables, "rest": [_low(rest[0]), _low(rest[1])], "read": read,
    }  # fmt: skip


def _low(seconds: Sequence[float]) -> float:
    return float(np.quantile(np.array(seconds), 0.1))


def _rising(found: dict[int, list[float]]) -> list[tuple[int, float]]:
    """Points of which none costs more than a larger one."""
    sizes = sorted(found)
    low = list(itertools.accumulate((_low(found[n]) for n in reversed(sizes)), min))[::-1]
    return list(zip(sizes, low, strict=True))


# ----------------------------------------------------------------------------------------------------------- reports


def score(found: dict[str, list[float]], against: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """Cell -> the geometric mean over seeds of how many times as fast, and its standard error."""
    made = {}
    for cell, rates in found.items():
        logs = [math.log(a / b) for a, b in zip(rates, against[cell], strict=True)]
        mean = math.exp(fmean(logs))
        made[cell] = mean, mean * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return made


def overall(found: dict[str, list[float]], against: dict[str, list[float]]) -> tuple[float, float]:
    """The geometric mean over cells and seeds, and its standard error over the seeds."""
    seeds = list(
        zip(*([math.log(a / b) for a, b in zip(found[c], against[c], strict=True)] for c in found), strict=True)
    )
    means = [fmean(logs) for logs in seeds]
    mean = math.exp(fmean(means))
    return mean, mean * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan


def references(found: dict[str, list[float]], best: dict[str, tuple[float, float]]) -> list[dict[str, list[float]]]:
    """The best fixed budget, and plain decoding, in the form of a run."""
    return [{cell: [best[cell][i]] * len(rates) for cell, rates in found.items()} for i in (0, 1)]


def table(found: dict[str, list[float]], best: dict[str, tuple[float, float]]) -> str:
    """Every cell, and the means by drafter."""
    against, plain = references(found, best)
    of_best, of_plain = score(found, against), score(found, plain)
    lines = ["| drafter | task | T | batch | of the best fixed | of plain |", "|---|---|--:|--:|--:|--:|"]
    for cell in found:
        (a, ea), (p, ep) = of_best[cell], of_plain[cell]
        lines.append(f"| {cell} | {a:.3f} ± {ea:.3f} | {p:.3f} ± {ep:.3f} |")
    return "\n".join([*lines, "", summary(found, best)])


def summary(found: dict[str, list[float]], best: dict[str, tuple[float, float]]) -> str:
    """The mean and the worst cell of each drafter and of all."""
    lines = ["| drafter | of the best fixed | worst cell | of plain | worst cell |", "|---|--:|--:|--:|--:|"]
    for drafter in (*dict.fromkeys(cell.split(" | ")[0] for cell in found), "all"):
        mine = {c: rates for c, rates in found.items() if drafter in ("all", c.split(" | ")[0])}
        parts = []
        for against in references(mine, best):
            (mean, error), cells = overall(mine, against), score(mine, against)
            worst = min(cells, key=lambda c: cells[c][0])
            parts.append(
                f"{mean:.3f} ± {error:.3f} | {cells[worst][0]:.3f} ({worst})".replace(" | ", ", ").replace(
                    ", ", " | ", 1
                )
            )
        lines.append(f"| {drafter} | {parts[0]} | {parts[1]} |")
    return "\n".join(lines)


def changed(settings: Sequence[str]) -> None:
    """Set constants, each spelled MODULE.NAME=NUMBER, in the modules that use them."""
    for setting in settings:
        where, _, number = setting.partition("=")
        name, value = where.rsplit(".", 1)[-1], float(number)
        home = importlib.import_module(f"outrider.{where.rsplit('.', 1)[0]}")
        old = getattr(home, name)
        value = type(old)(value) if isinstance(old, int | float) else value
        for module in [m for m in sys.modules.values() if getattr(m, "__name__", "").startswith("outrider.")]:
            if module is home or (vars(module).get(name) is old and name in vars(module)):
                setattr(module, name, value)


ABLATIONS = {  # constant: what it is replaced by. Infinite: without it
    "budgets.curve.TILE": 1 << 20,
    "budgets.curve.RISE": 0.4,
    "budgets.curve.MEMORY": 1,
    "budgets.curve.OUTLIER": 1e9,
    "budgets.acceptance.DECAY": 0.9,
    "budgets.acceptance.SLOW": 0.98,
    "budgets.acceptance.PRIOR": 2.0,
    "budgets.acceptance.FIRST_SHARE": 0.1,
    "budgets.ledger.TRIES": 0.1,
    "budgets.ledger.HOLD": 1.0,
    "budgets.ledger.FORGIVEN": 0.0,
    "budgets.adaptive.EXPLORE": 10**9,
    "budgets.adaptive.LEARN": 2,
    "budgets.adaptive.EMPTY": 10**9,
    "budgets.adaptive.LATE": 10**9,
    "budgets.adaptive.STALE": 64,
    "budgets.adaptive.DISTURBED": 1e9,
    "drafters._asking.PRIOR": 0.1,
    "drafters._asking.FIRST": 0.0,
    "drafters._asking.DOUBT": 0.0,
    "drafters._asking.RECENT": 1.0,
    "drafters._asking.LEARN": 0,
    "drafters._asking.ALIKE": 1.001,
}


def ablate(recording: Recording, names: Sequence[str], drafters: Sequence[str], more: tuple[int, float, float]) -> None:
    """What every constant is worth: the speed with it replaced, relative to the speed as it is."""
    usual = run(recording, drafters, *more)
    print("| constant | replaced by | " + " | ".join(drafters) + " | all |\n|---|--:|" + "--:|" * (len(drafters) + 1))
    for name in names:
        old = getattr(importlib.import_module(f"outrider.{name.rsplit('.', 1)[0]}"), name.rsplit(".", 1)[1])
        changed([f"{name}={ABLATIONS[name]}"])
        found = run(recording, drafters, *more)
        changed([f"{name}={old}"])
        parts = [{c: r for c, r in found.items() if c.split(" | ")[0] == drafter} for drafter in drafters]
        values = ["{:.3f} ± {:.3f}".format(*overall(part, usual)) for part in (*parts, found)]
        print(f"| {name} | {ABLATIONS[name]:g} | " + " | ".join(values) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    without = commands.add_parser("ablate")
    without.add_argument("--constants", nargs="+", choices=ABLATIONS, default=list(ABLATIONS), metavar="MODULE.NAME")
    for command in (runs, without):
        command.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
        command.add_argument("--seeds", type=int, default=4)
        command.add_argument("--noise", type=float, default=0.05, help="standard deviation of a measurement's log")
        command.add_argument(
            "--drift", type=float, default=0.0, help="0.3: up to 30 per cent slower, for 0.7 s at a time"
        )
    for command in (runs,):
        command.add_argument("--set", nargs="*", default=[], metavar="MODULE.NAME=NUMBER")
        command.add_argument("--brief", action="store_true", help="the summary alone")
        command.add_argument("--out", type=Path)
    both = commands.add_parser("compare")
    both.add_argument("runs", type=Path, nargs=2)
    makes = commands.add_parser("record")
    makes.add_argument("--model", default="demo")
    makes.add_argument("--eagle", default="demo/hass")
    makes.add_argument("--data", type=Path, required=True, help="a folder with the papers' prompts")
    makes.add_argument("--out", type=Path, default=DATA)
    again = commands.add_parser("fixed")
    again.add_argument("--data", type=Path, default=DATA)
    given = parser.parse_args()
    if given.command == "fixed":
        compare_fixed(given.data)
        return
    if given.command == "record":
        record(given.model, given.eagle, given.data, given.out)
        return
    recording = load()
    if given.command == "compare":
        old, new = (json.loads(file.read_text()) for file in given.runs)
        for cell, (mean, error) in score(new, old).items():
            print(f"| {cell} | {mean:.3f} ± {error:.3f} |")
        print("all", *overall(new, old))
        return
    if given.command == "ablate":
        ablate(recording, given.constants, given.drafters, (given.seeds, given.noise, given.drift))
        return
    changed(given.set)
    began = perf_counter()
    found = run(recording, given.drafters, given.seeds, given.noise, given.drift)
    if given.out:
        given.out.write_text(json.dumps(found))
    print(summary(found, recording.best) if given.brief else table(found, recording.best))
    print(f"{perf_counter() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
