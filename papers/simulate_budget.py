"""Simulate the adaptive budget on recorded drafts: exact but for the clock, and without a model.

    python papers/simulate_budget.py run                         every cell, half a per cent in about 20 s of one core
    python papers/simulate_budget.py run --drift 0.3 --out B.json
    python papers/simulate_budget.py compare A.json B.json       two runs, cell by cell
    python papers/simulate_budget.py ablate                      what every constant of the budget is worth

Under the rule `coupled` a text does not depend on its drafts. So the trees that a drafter proposes at every position of
known texts are recorded once, with their confidences (`record_budget.py`), and any budget can be replayed on them:
which nodes it would have kept, and which of those the target would have accepted, is known. Only the clock is
simulated. Its costs (passes by rows and nodes, drafts by rows and depth) were measured while recording; noise and drift
are options.

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
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter

import numpy as np

from outrider.budgets.adaptive import AdaptiveBudget
from outrider.budgets.budgeter import Budgeter, FixedBudget, Report
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Drafter, Drafting, Round, TargetOutput
from outrider.core.tree import best_of, from_lists, priced, root_only
from outrider.core.types import Array, Budget, DraftTree, HostRow, Rows
from outrider.drafters._mix import Learnt, MixDrafter
from outrider.params import Sampling

DATA = Path(__file__).parent / "data" / "budget.npz"
TASKS = ("mt-bench", "gsm8k", "humaneval", "cnn-dm@600")
TEMPERATURES = (0.0, 1.0)
BATCHES = (1, 4, 8)
DRAFTERS = ("lookup", "suffix", "eagle", "suffix + eagle", "dear eagle")
DEAR = 10.0  # times as long as EAGLE's drafts take those of "dear eagle": a drafter that seldom pays
RECORDED = ("lookup", "suffix", "eagle")
FIXED = ((1, 0), (2, 1), (3, 2), (4, 3), (6, 5), (8, 4), (16, 6), (32, 8))  # nodes with the root, depth
DEPTH = 8  # of recorded trees
MOOD = 0.7  # seconds between turns of the drift, on average

# A recording has the trees of all positions one after the other, without their roots: sizes [trees], and of the nodes
# tokens, parents (0: the root) and values, bytes that count steps of a nat.
PARTS = ("sizes", "tokens", "parents", "values")
STEPS_PER_NAT = 32

Table = list[tuple[float, float]]  # (size, seconds), sizes ascending


# ---------------------------------------------------------------------------------------------------- recorded texts


@dataclass(frozen=True, eq=False)
class Text:
    """A prompt's length, the tokens that follow it, and what each drafter proposed after each of them."""

    prompt: int
    tokens: list[int]
    trees: dict[str, list[HostRow]]  # drafter -> [tokens written - 1]: tokens, parents, log values of the nodes

    @cache  # noqa: B019 - lives as long as the program
    def tree(self, drafter: str, start: int, depth: int) -> HostRow:
        """The proposal below the token at position `start`, cut at a depth."""
        root = self.tokens[start - self.prompt]
        if depth < 1:
            return [root], [0], [0.0]
        row = self.trees[drafter][start - self.prompt]
        tokens, parents, values = part(row, [i for i, d in enumerate(_depths(row[1])) if d <= depth])
        return [root, *tokens[1:]], parents, values

    @cache  # noqa: B019
    def best(self, drafter: str, start: int) -> list[float]:
        """[depth]: the log of the most valuable node's value there; -inf where there is none."""
        _, parents, values = self.trees[drafter][start - self.prompt]
        results = [-math.inf] * (DEPTH + 1)
        for depth, value in zip(_depths(parents), values, strict=True):
            results[depth] = max(results[depth], value)
        return results

    def path(self, start: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The nodes that the text takes in a tree below the token at position `start`, the root first."""
        child = {(parents[i], tokens[i]): i for i in range(1, len(tokens))}
        path = [0]
        for token in self.tokens[start - self.prompt + 1 :]:
            node = child.get((path[-1], token))
            if node is None:
                break
            path.append(node)
        return path


def part(row: HostRow, ids: Sequence[int]) -> HostRow:
    """These nodes of a row, ascending and closed under parents."""
    new = {old: i for i, old in enumerate(ids)}
    tokens, parents, values = row
    return [tokens[i] for i in ids], [new[parents[i]] for i in ids], [values[i] for i in ids]


def _depths(parents: Sequence[int]) -> list[int]:
    depths = [0]
    for up in parents[1:]:
        depths.append(depths[up] + 1)
    return depths


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds, as measured while recording."""

    verify: dict[int, Table]  # rows -> by the nodes of all rows
    draft: dict[str, dict[int, Table]]  # drafter -> rows -> by depth
    rest: tuple[float, float]  # of a round without a draft, and with one
    read: dict[str, float]  # drafter -> of a token that it has not read yet

    @cache  # noqa: B019
    def verify_at(self, rows: int, nodes: int) -> float:
        return at(of_rows(self.verify, rows), nodes)

    @cache  # noqa: B019
    def draft_at(self, drafter: str, rows: int, depth: int) -> float:
        return at(of_rows(self.draft[drafter], rows), depth)


def of_rows(tables: dict[int, Table], rows: int) -> Table:
    """The table of so many rows, interpolated between the batch sizes that were measured."""
    if rows in tables:
        return tables[rows]
    low, high = max(b for b in tables if b < rows), min((b for b in tables if b > rows), default=0)
    if not high:
        return tables[low]
    share = (rows - low) / (high - low)
    sizes = sorted({size for b in (low, high) for size, _ in tables[b]})
    return [(n, (1 - share) * at(tables[low], n) + share * at(tables[high], n)) for n in sizes]


def at(table: Table, size: float) -> float:
    """Linear between the points, and beyond the last two."""
    i = max(1, min(len(table) - 1, sum(known < size for known, _ in table)))
    (a, low), (b, high) = table[i - 1], table[i]
    return max(1e-6, low + (high - low) * (size - a) / (b - a))


@dataclass(frozen=True)
class Cell:
    """Texts of one task and temperature, and how many of them are decoded side by side."""

    texts: Sequence[Text]
    temperature: float = 0.0
    batch: int = 1


@dataclass(frozen=True)
class Recording:
    cells: dict[str, Cell]  # "task | temperature | batch"
    costs: Costs
    best: dict[str, tuple[float, float]]  # "drafter | cell" -> tokens per second of the best fixed budget and of none


def load(file: Path = DATA) -> Recording:
    """Read a recording."""
    with np.load(file) as held:
        about = json.loads(str(held["about"]))
        prompts, tokens = held["prompts"].tolist(), held["tokens"].tolist()
        trees = {name: unpacked(*(held[f"{name}_{part}"] for part in PARTS)) for name in RECORDED}
    each = len(tokens[0]) - 2  # nothing is drafted for the last token
    texts = []
    for i, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True)):
        mine = {name: rows[i * each : (i + 1) * each] for name, rows in trees.items()}
        texts.append(Text(prompt, ids, mine))
    cells, n = {}, about["texts"]
    for i, (task, t) in enumerate(itertools.product(about["tasks"], about["temperatures"])):
        for batch in BATCHES:
            cells[f"{task} | {t:g} | {batch}"] = Cell(texts[i * n : (i + 1) * n], t, batch)
    costs = about["costs"]
    draft = {name: _tables(tables) for name, tables in costs["draft"].items()}
    return Recording(
        cells, Costs(_tables(costs["verify"]), draft, tuple(costs["rest"]), costs["read"]), about.get("best", {})
    )


def _tables(results: dict[str, list[list[float]]]) -> dict[int, Table]:
    return {int(rows): [(size, seconds) for size, seconds in pairs] for rows, pairs in results.items()}


def unpacked(sizes: Array, tokens: Array, parents: Array, values: Array) -> list[HostRow]:
    """Trees whose root has the token -1: it is in the text."""
    made, at = [], 0
    ids, ups, logs = tokens.tolist(), parents.tolist(), (values / -STEPS_PER_NAT).tolist()
    for n in sizes.tolist():
        made.append(([-1, *ids[at : at + n]], [0, *ups[at : at + n]], [0.0, *logs[at : at + n]]))
        at += n
    return made


# --------------------------------------------------------------------------------------------- machine and drafters


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


@dataclass
class World:
    """The texts of a cell, how far drafters have read them, and the time that a round's draft takes."""

    costs: Costs
    clock: Clock
    texts: Sequence[Text] = ()
    read: dict[tuple[str, int], int] = field(default_factory=dict)  # (drafter, text) -> tokens
    seconds: float = 0.0  # of this round's draft, without noise
    observed: float = 0.0

    def spend(self, seconds: float) -> None:
        """Add to this round's draft."""
        self.seconds += seconds
        self.observed += self.clock.spend(seconds)


@dataclass
class Replayed(Drafter, Drafting):
    """A recorded drafter and its state, in the place of the real one. Rows name their text by their seed."""

    name: str
    world: World
    slower: float = 1.0
    reads_tree = False

    def open(self, prompts: Sequence[Sequence[int]], capacity: int) -> Replayed:
        return self

    def observe(self, round: Round) -> None:
        """Nothing to learn: what it proposes is known."""

    def select(self, index: Sequence[int]) -> None:
        """Nothing to move: rows name their text."""

    def join(self, other: Drafting) -> None:
        """Nothing to move."""

    def trees(self, rows: Rows, depth: int) -> list[HostRow]:
        """What was recorded for every row, cut at a depth."""
        texts, row = self.world.texts, zip(rows.seeds, rows.start, rows.remaining, strict=True)
        return [texts[seed].tree(self.name, start, min(depth, left - 1)) for seed, start, left in row]

    def spend(self, rows: Rows, steps: int) -> None:
        """Pay for a draft of so many steps, and for reading what it has not read."""
        world, seconds = self.world, self.world.costs.draft_at(self.name, len(rows), steps)
        read = world.costs.read[self.name]
        for seed, start in zip(rows.seeds, rows.start, strict=True):
            seconds += read * (start - world.read.get((self.name, seed), 0) - 1)
            world.read[self.name, seed] = start
        world.spend(self.slower * seconds)


@dataclass
class Counts(Replayed):
    """Lookup or suffix decoding."""

    def sketch(self, rows: Rows, budget: Budget) -> list[HostRow]:
        self.spend(rows, 1)
        n = budget.nodes
        made = [(ids[:n], ups[:n], logs[:n]) for ids, ups, logs in self.trees(rows, budget.depth)]
        return priced(made, budget.price) if self.name == "suffix" else made

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        return from_lists(self.sketch(rows, budget))


@dataclass
class Network(Replayed):
    """EAGLE: it goes deeper while its best node is worth a step, then its tree is cut where it pays."""

    def propose(self, rows: Rows, budget: Budget) -> DraftTree:
        self.spend(rows, self.steps(rows, budget))
        trees = self.trees(rows, budget.depth)
        kept = best_of([values for _, _, values in trees], budget.nodes, budget.floor, budget.price)
        return from_lists([part(tree, ids) for tree, ids in zip(trees, kept, strict=True)])

    def steps(self, rows: Rows, budget: Budget) -> int:
        """How deep it goes."""
        reach, texts = math.log(max(1e-9, budget.reach, budget.floor)), self.world.texts
        row = list(zip(rows.seeds, rows.start, rows.remaining, strict=True))
        deepest = min(budget.depth, max(rows.remaining) - 1)
        for depth in range(1, deepest):
            best = max(texts[seed].best(self.name, start)[depth] for seed, start, left in row if left > depth + 1)
            if best <= reach:
                return depth
        return deepest


def drafter_of(name: str, world: World) -> Drafter:
    """What drafts in a cell and learns over all of them: a real mix of replayed drafters, or a network alone."""
    kinds: list[Replayed] = []
    for method in name.split(" + "):
        dear = DEAR if method.startswith("dear") else 1.0
        kinds.append(Network("eagle", world, dear) if method.endswith("eagle") else Counts(method, world))
    if len(kinds) == 1 and isinstance(kinds[0], Network):
        return kinds[0]
    networks = [isinstance(kind, Network) for kind in kinds]
    return MixDrafter(tuple(kinds), (Learnt.of(networks), Learnt.of(networks)), clock=world.clock)


# ------------------------------------------------------------------------------------------------------------- cells

GUMBEL = GumbelNoise(8)  # nobody asks it


@dataclass
class Place:
    """A row: a text and how far it is written."""

    text: int
    length: int
    left: int
    serial: int = 0


def play(world: World, drafter: Drafter, budget: Budgeter, cell: Cell) -> float:
    """Decode a cell's texts: seconds without noise."""
    world.texts, world.read = cell.texts, {}
    drafting, seconds, rows = drafter.open((), 0), 0.0, list[Place]()
    waiting = deque(Place(i, text.prompt, len(text.tokens) - 1) for i, text in enumerate(cell.texts))
    while waiting or rows:
        while waiting and len(rows) < cell.batch:
            rows.append(waiting.popleft())
        added, took = play_round(world, drafting, budget, _view(rows, cell))
        seconds += took
        for row, count in zip(rows, added, strict=True):
            row.length, row.left, row.serial = row.length + count, row.left - count, row.serial + 1
        rows = [row for row in rows if row.left > 0]
    return seconds


def play_round(world: World, drafting: Drafting, budget: Budgeter, view: Rows) -> tuple[list[int], float]:
    """One round, as `Batch.round` does it: tokens added to each row, and seconds without noise."""
    wanted, b = budget.choose(view), len(view)
    asked = 0 if wanted.nodes < 2 else max(0, min(wanted.depth, max(view.remaining) - 1))
    world.seconds = world.observed = 0.0
    tree = drafting.propose(view, wanted) if asked else root_only(view.root)
    total = sum(len(tokens) for tokens, _, _ in tree.host)
    draft, verify, rest = world.observed, world.costs.verify_at(b, total), world.costs.rest[asked > 0]
    paths, tokens = [], []
    for seed, start, (ids, parents, _) in zip(view.seeds, view.start, tree.host, strict=True):
        text = world.texts[seed]
        paths.append(text.path(start, ids, parents))
        first = start - text.prompt + 1
        tokens.append(text.tokens[first : first + len(paths[-1])])
    counts = [len(path) - 1 for path, left in zip(paths, view.remaining, strict=True) if left > 1]
    report = Report(
        b, asked, tree.nodes, draft, world.clock.spend(verify), world.clock.spend(rest),
        [sum(n >= d for n in counts) for d in range(1, asked + 1)],
        math.fsum(math.exp(value) for _, _, logs in tree.host for value in logs[1:]), len(counts), total,
    )  # fmt: skip
    budget.learn(report)
    drafting.observe(Round(view, tree, TargetOutput(None), paths, [new[-1] for new in tokens], tokens))
    return [len(new) for new in tokens], world.seconds + verify + rest


def _view(rows: Sequence[Place], cell: Cell) -> Rows:
    return Rows(
        root=tuple(cell.texts[row.text].tokens[row.length - cell.texts[row.text].prompt] for row in rows),
        start=tuple(row.length for row in rows),
        seeds=tuple(row.text for row in rows),
        serial=tuple(row.serial for row in rows),
        sampling=(Sampling(cell.temperature),) * len(rows),
        rule="coupled",
        remaining=tuple(row.left for row in rows),
        gumbel=GUMBEL,
    )


def tokens_of(cell: Cell) -> int:
    """Tokens that decoding a cell writes: the prompt's pass gives the first of a text."""
    return sum(len(text.tokens) - 1 for text in cell.texts)


def fixed(recording: Recording) -> dict[str, tuple[float, float]]:
    """Of every cell the best fixed budget's tokens per second, and plain decoding's."""
    made: dict[str, tuple[float, float]] = {}
    for drafter, (name, cell) in itertools.product(DRAFTERS, recording.cells.items()):
        rates = []
        for nodes, depth in FIXED:
            world = World(recording.costs, Clock(0, 0, random.Random(0)))
            rates.append(tokens_of(cell) / play(world, drafter_of(drafter, world), FixedBudget(nodes, depth), cell))
        made[f"{drafter} | {name}"] = max(rates), rates[0]
    return made


@dataclass(frozen=True)
class Setting:
    """How a run is made."""

    seeds: int = 4
    noise: float = 0.05
    drift: float = 0.0


def run(recording: Recording, drafters: Sequence[str], setting: Setting) -> dict[str, list[float]]:
    """Of every drafter and cell the adaptive budget's tokens per second, by seeds; cells are played in random order."""
    results: dict[str, list[float]] = defaultdict(list)
    for drafter, seed in itertools.product(drafters, range(setting.seeds)):
        dice = random.Random(seed)
        world, budget = World(recording.costs, Clock(setting.noise, setting.drift, dice)), AdaptiveBudget()
        learning = drafter_of(drafter, world)
        for name, cell in dice.sample(list(recording.cells.items()), len(recording.cells)):
            results[f"{drafter} | {name}"].append(tokens_of(cell) / play(world, learning, budget, cell))
    return dict(results)


# ----------------------------------------------------------------------------------------------------------- reports


def score(results: dict[str, list[float]], against: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """Cell -> the geometric mean over seeds of how many times as fast, and its standard error."""
    made = {}
    for cell, rates in results.items():
        logs = [math.log(a / b) for a, b in zip(rates, against[cell], strict=True)]
        mean = math.exp(fmean(logs))
        made[cell] = mean, mean * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return made


def overall(results: dict[str, list[float]], against: dict[str, list[float]]) -> tuple[float, float]:
    """The geometric mean over cells and seeds, and its standard error over the seeds."""
    seeds = list(
        zip(*([math.log(a / b) for a, b in zip(results[c], against[c], strict=True)] for c in results), strict=True)
    )
    means = [fmean(logs) for logs in seeds]
    mean = math.exp(fmean(means))
    return mean, mean * stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan


def references(results: dict[str, list[float]], best: dict[str, tuple[float, float]]) -> list[dict[str, list[float]]]:
    """The best fixed budget, and plain decoding, in the form of a run."""
    return [{cell: [best[cell][i]] * len(rates) for cell, rates in results.items()} for i in (0, 1)]


def table(results: dict[str, list[float]], best: dict[str, tuple[float, float]]) -> str:
    """Every cell, and the means by drafter."""
    against, plain = references(results, best)
    of_best, of_plain = score(results, against), score(results, plain)
    lines = ["| drafter | task | T | batch | of the best fixed | of plain |", "|---|---|--:|--:|--:|--:|"]
    for cell in results:
        (a, ea), (p, ep) = of_best[cell], of_plain[cell]
        lines.append(f"| {cell} | {a:.3f} ± {ea:.3f} | {p:.3f} ± {ep:.3f} |")
    return "\n".join([*lines, "", summary(results, best)])


def summary(results: dict[str, list[float]], best: dict[str, tuple[float, float]]) -> str:
    """The mean and the worst cell of each drafter and of all."""
    lines = ["| drafter | of the best fixed | worst cell | of plain | worst cell |", "|---|--:|--:|--:|--:|"]
    for drafter in (*dict.fromkeys(cell.split(" | ")[0] for cell in results), "all"):
        mine = {c: rates for c, rates in results.items() if drafter in ("all", c.split(" | ")[0])}
        parts = []
        for against in references(mine, best):
            (mean, error), cells = overall(mine, against), score(mine, against)
            worst = min(cells, key=lambda c: cells[c][0])
            parts.append(f"{mean:.3f} ± {error:.3f} | {cells[worst][0]:.3f} ({worst.replace(' | ', ', ')})")
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
    "budgets.curve.MEMORY": 1,
    "budgets.curve.OUTLIER": 1e9,
    "budgets.acceptance.DECAY": 0.9,
    "budgets.acceptance.SLOW": 0.98,
    "budgets.acceptance.PRIOR": 2.0,
    "budgets.acceptance.FIRST_SHARE": 0.1,
    "budgets.acceptance.GUESS": 0.1,
    "budgets.ledger.TRIES": 0.1,
    "budgets.ledger.HOLD": 1.0,
    "budgets.ledger.FORGIVEN": 0.0,
    "budgets.adaptive.EXPLORE": 10**9,
    "budgets.adaptive.LEARN": 2,
    "budgets.adaptive.LATE": 10**9,
    "budgets.adaptive.STALE": 64,
    "drafters._gate.PRIOR": 0.1,
    "drafters._gate.FIRST": 0.0,
    "drafters._gate.DOUBT": 0.0,
}


def ablate(recording: Recording, names: Sequence[str], drafters: Sequence[str], setting: Setting) -> None:
    """What every constant is worth: the speed with it replaced, relative to the speed as it is."""
    usual = run(recording, drafters, setting)
    print("| constant | replaced by | " + " | ".join(drafters) + " | all |\n|---|--:|" + "--:|" * (len(drafters) + 1))
    for name in names:
        old = getattr(importlib.import_module(f"outrider.{name.rsplit('.', 1)[0]}"), name.rsplit(".", 1)[1])
        changed([f"{name}={ABLATIONS[name]}"])
        results = run(recording, drafters, setting)
        changed([f"{name}={old}"])
        parts = [{c: r for c, r in results.items() if c.split(" | ")[0] == drafter} for drafter in drafters]
        values = ["{:.3f} ± {:.3f}".format(*overall(part, usual)) for part in (*parts, results)]
        print(f"| {name} | {ABLATIONS[name]:g} | " + " | ".join(values) + " |", flush=True)


def main() -> None:
    """The command line."""
    given = _arguments()
    if given.command == "compare":
        old, new = (json.loads(file.read_text()) for file in given.runs)
        for cell, (mean, error) in score(new, old).items():
            print(f"| {cell} | {mean:.3f} ± {error:.3f} |")
        print("all", *overall(new, old))
        return
    recording, setting = load(), Setting(given.seeds, given.noise, given.drift)
    if given.command == "ablate":
        ablate(recording, given.constants, given.drafters, setting)
        return
    changed(given.set)
    began = perf_counter()
    results = run(recording, given.drafters, setting)
    if given.out:
        given.out.write_text(json.dumps(results))
    print(summary(results, recording.best) if given.brief else table(results, recording.best))
    print(f"{perf_counter() - began:.1f} s", file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs, without, both = (commands.add_parser(name) for name in ("run", "ablate", "compare"))
    for command in (runs, without):
        command.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
        command.add_argument("--seeds", type=int, default=Setting.seeds)
        command.add_argument("--noise", type=float, default=Setting.noise, help="standard deviation of a time's log")
        command.add_argument(
            "--drift", type=float, default=Setting.drift, help="0.3: up to 30 per cent slower, for 0.7 s at a time"
        )
    runs.add_argument("--set", nargs="*", default=[], metavar="MODULE.NAME=NUMBER")
    runs.add_argument("--brief", action="store_true", help="the summary alone")
    runs.add_argument("--out", type=Path)
    without.add_argument("--constants", nargs="+", choices=ABLATIONS, default=list(ABLATIONS), metavar="MODULE.NAME")
    both.add_argument("runs", type=Path, nargs=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
