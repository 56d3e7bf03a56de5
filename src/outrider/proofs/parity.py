"""Parity: the same drafter and prompts, greedily, in Outrider and in vLLM.

The drafter is exported and loaded by vLLM's code, or, if it reads text alone, runs inside vLLM. Both draft chains of
equal length. Our texts, vLLM's, and vLLM's without a drafter must be the same (up to ties decided by rounding, which
are shown with their margin), and so must the acceptance at each position: a wrong layer, rotary base, shift or draft
vocabulary does not change the text, but the acceptance.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from .. import checkpoints, drafters
from ..budgets.budgeter import FixedBudget
from ..checkpoints.check import check
from ..checkpoints.write import trimmed, write
from ..drafters import _chain
from ..engine import generate
from ..llm import LLM
from ..params import InputError
from . import vllm
from .divergence import first_difference
from .logits import own_logits
from .vllm import Decode

ROUNDING = 1e-3  # logit margins below it are decided by rounding in float32

Say = Callable[[str, int], None]  # step, and texts finished since the last call


@dataclass(frozen=True)
class Rate:
    """Successes among trials."""

    hits: int
    trials: int

    @property
    def value(self) -> float:
        return self.hits / self.trials if self.trials else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% Wilson interval."""
        if not self.trials:
            return 0.0, 1.0
        interval = binomtest(self.hits, self.trials).proportion_ci(0.95, "wilson")
        return float(interval.low), float(interval.high)


def difference(a: Rate, b: Rate) -> tuple[float, float]:
    """The 95% interval of a - b from Wilson intervals (Newcombe 1998, method 10)."""
    (la, ua), (lb, ub), d = a.interval, b.interval, a.value - b.value
    low = d - math.hypot(a.value - la, ub - b.value)
    return low, d + math.hypot(ua - a.value, b.value - lb)


@dataclass(frozen=True)
class Place:
    """One position of the chain: accepted tokens among the rounds that reached it."""

    ours: Rate
    theirs: Rate

    @property
    def agrees(self) -> bool:
        low, high = difference(self.ours, self.theirs)
        return low <= 0.0 <= high


@dataclass(frozen=True)
class Split:
    """A prompt whose texts differ; margin: difference of the target's logits for the two tokens."""

    prompt: int
    position: int
    margin: float

    @property
    def rounding(self) -> bool:
        return self.margin < ROUNDING


@dataclass(frozen=True)
class Certificate:
    """Texts and acceptance of one drafter in both engines; `passed` is the verdict."""

    drafter: str
    target: str
    method: str
    engine: str
    tokens: int  # drafted per round
    prompts: int
    written: int  # tokens, by each engine
    splits: list[Split]
    places: list[Place]
    tau_ours: float
    tau_theirs: float
    same_rounds: int  # prompts with equal counts of accepted tokens
    uneven: list[int]  # prompts with the same text and different counts
    plain: list[Split]  # differences of vLLM's texts with and without drafts
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def same_text(self) -> bool:
        return all(split.rounding for split in (*self.splits, *self.plain))

    @property
    def same_acceptance(self) -> bool:
        """Equal counts where texts are equal; drafters inside vLLM learn online, so their intervals must overlap."""
        learns = self.method == "custom_class"
        return all(place.agrees for place in self.places) and (learns or not self.uneven)

    @property
    def speculated(self) -> bool:
        """Whether both engines drafted; without trials every interval contains every rate."""
        first = self.places[0]
        return min(first.ours.trials, first.theirs.trials) > 0 and first.theirs.trials * 2 > first.ours.trials

    @property
    def passed(self) -> bool:
        return self.same_text and self.same_acceptance and self.speculated

    @property
    def sentence(self) -> str:
        parted = {s.prompt for s in (*self.splits, *self.plain)}
        wrong = {s.prompt for s in (*self.splits, *self.plain) if not s.rounding}
        if not parted:
            text = f"all {self.prompts} texts are identical in Outrider, in vLLM and in vLLM without drafts"
        elif not wrong:
            text = f"texts are identical except {len(parted)} of {self.prompts}, which differ where rounding decides"
        else:
            text = f"{len(wrong)} of {self.prompts} texts differ"
        agree = "agrees at every position" if self.same_acceptance else "DIFFERS"
        if not self.speculated:
            rounds = self.places[0].theirs.trials
            return f"NO parity with {self.engine}: {text}; it counts {rounds} rounds with drafts, which is no evidence."
        head = "Parity" if self.passed else "NO parity"
        counts = f"the counts are equal on {self.same_rounds} of {self.prompts} prompts"
        return f"{head} with {self.engine}: {text}; acceptance {agree} ({counts})."


@dataclass(frozen=True)
class Side:
    """A drafter for both engines: ours, and vLLM's settings."""

    spec: str
    llm: LLM
    tokens: int
    run: dict[str, Any]

    @property
    def method(self) -> str:
        """vLLM's name of the method."""
        return str(self.run["speculative"]["method"])


def certify(
    load: Callable[[str | Sequence[str]], LLM], specs: Sequence[str], target: str | Path,
    prompts: Sequence[Sequence[int]], decode: Decode, tokens: int = 4, max_new_tokens: int = 64, to: str = "vllm",
    say: Say = lambda doing, texts: None,
) -> Iterator[Certificate]:  # fmt: skip
    """Decode with every drafter in both engines, and in vLLM without one, and compare.

    Yields a certificate when vLLM has finished a drafter; vLLM continues while the next one is prepared.

    Args:
        load: an LLM by the drafter's SPEC or SPECs, in float32.
        specs: SPECs of the drafters; a mix is joined by ` + `.
        target: the model's folder or hub id.
        prompts: token ids.
        decode: runs vLLM on a job (`vllm_decode.py`).
        tokens: length of the chains, if the drafter supports it.
        to: export format, vllm or speculators.
        say: called with the step and the texts finished since the last call, in either engine.

    Raises InputError for drafters that vLLM does not support, and for too long prompts.
    """
    facts = checkpoints.Facts.at(target)
    named = [f"{spec} ({i} of {len(specs)})" for i, spec in enumerate(specs, 1)]
    with tempfile.TemporaryDirectory() as temporary:
        sides: list[Side] = []
        for spec, name in zip(specs, named, strict=True):
            say(f"loading {name}", 0)
            sides.append(ready(load, spec, facts, tokens, to, Path(temporary) / str(len(sides))))
        longest = max(map(len, prompts)) + max_new_tokens + 2 * tokens  # vLLM drafts zeros if two chains do not fit
        for side in sides:
            if longest > side.llm.target.context:
                context = side.llm.target.context
                raise InputError(f"a prompt and its text take {longest} tokens, and the context has {context}")
        job = {"target": str(target), "prompts": [list(p) for p in prompts], "max_new_tokens": max_new_tokens}
        events = decode({**job, "context": longest, "runs": [vllm.PLAIN, *(side.run for side in sides)]})
        with contextlib.closing(events):
            plain = heard(events, "without drafts", say)
            for side, name in zip(sides, named, strict=True):
                theirs = heard(events, f"with {name}", say)
                wrote = partial(say, f"decoding with {name} in Outrider", 1)
                yield compare(side, str(target), prompts, max_new_tokens, plain["texts"], theirs, wrote)


def heard(events: Iterator[dict[str, Any]], name: str, say: Say) -> dict[str, Any]:
    """Wait for vLLM's next run."""
    say(f"starting vLLM {name}", 0)
    before = 0
    for event in events:
        if "texts" in event:
            say(f"decoding {name} in vLLM", len(event["texts"]) - before)
            return event
        say(f"decoding {name} in vLLM", event["done"] - before)
        before = event["done"]
    raise RuntimeError(f"vLLM gave no result for {name}")


def ready(
    load: Callable[[str | Sequence[str]], LLM], spec: str, facts: checkpoints.Facts, tokens: int, to: str, out: Path
) -> Side:
    """Load a drafter, and export it to `out` if vLLM's code loads it."""
    name, folder = split(spec)
    if (name or checkpoints.method_of(folder)) not in vllm.METHODS:
        specs = drafters.parts(spec)
        llm = load(specs)
        return Side(spec, replace(llm, drafter=_chain.of(llm.drafter, tokens)), tokens, vllm.inside(specs, tokens))
    checkpoint = checkpoints.read(folder, facts)
    parallel = int(checkpoint.config.get("parallel") or 0)
    most = {"medusa": checkpoint.config.get("heads"), "block": checkpoint.config.get("block", 1) - 1}.get(
        checkpoint.method, parallel
    )
    chain = min(tokens, int(most or tokens))
    write(checkpoint, to, facts, out)
    if faults := check(out, to, facts):
        raise InputError(f"{to} cannot load the export: {'; '.join(faults)}")
    same = out if trimmed(checkpoint) else folder  # the exported drafter drafts from all tokens
    llm = load(f"{name or checkpoint.method}:{same}?tree=chain")
    return Side(spec, llm, chain, vllm.exported(checkpoint.method, out, chain, parallel > 0))


def split(spec: str) -> tuple[str, str]:
    """Method and folder of a SPEC; "" where it names no method. A mix has the method "mix"."""
    if drafters.MIX in spec:
        return "mix", ""
    body = spec.partition("?")[0]
    name, _, folder = body.partition(":")
    return (name, folder) if name in drafters.names() else ("", body)


def compare(
    side: Side, target: str, prompts: Sequence[Sequence[int]], new: int, plain: Sequence[Sequence[int]],
    theirs: dict[str, Any], wrote: Callable[[], None],
) -> Certificate:  # fmt: skip
    """Decode the prompts here, and hold text and acceptance against vLLM's answers `theirs`, and `plain` without
    drafts. `wrote` is called for every text."""
    known = {name: str(theirs.get(key, "?")) for name, key in (("vllm", "vllm"), ("vllm_torch", "torch"))}
    llm, tokens = side.llm, side.tokens
    texts, rounds = [], []
    for prompt in prompts:
        text, reached = chain(llm, prompt, tokens, new)
        texts.append(text)
        rounds.append(reached)
        wrote()
    other = [[d, *a] for d, a in zip(theirs["drafts"], theirs["accepted_at"], strict=True)]
    ours, them = ([sum(column) for column in zip(*rows, strict=True)] for rows in (rounds, other))
    places = [Place(Rate(ours[d + 1], ours[d]), Rate(them[d + 1], them[d])) for d in range(tokens)]
    unlike = [i for i, (a, b) in enumerate(zip(rounds, other, strict=True)) if a != b]
    return Certificate(
        side.spec, target, side.method, f"vLLM {known['vllm']}", tokens, len(prompts), sum(map(len, texts)),
        splits(llm, prompts, texts, theirs["texts"]), places, 1 + sum(ours[1:]) / max(1, ours[0]),
        1 + sum(them[1:]) / max(1, them[0]), len(prompts) - len(unlike),
        [i for i in unlike if texts[i] == theirs["texts"][i]], splits(llm, prompts, plain, theirs["texts"]), known,
    )  # fmt: skip


def splits(
    llm: LLM, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> list[Split]:
    """The differences of two sets of texts for the same prompts."""
    parts = []
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if list(a) != list(b):
            at = first_difference(a, b)
            parts.append(Split(i, at, margin(llm, [*prompts[i], *a[:at]], a[at:], b[at:])))
    return parts


def chain(llm: LLM, prompt: Sequence[int], tokens: int, new: int) -> tuple[list[int], list[int]]:
    """Greedy text, and the numbers of rounds that accepted at least 0, 1, 2, ... tokens of a chain of `tokens`.

    As in vLLM, rounds without a draft are not counted, and the last round counts a full chain, though the text ends
    inside.
    """
    engine = llm.engine(budget=FixedBudget(tokens + 1, tokens))
    requests, _ = llm.requests(list(prompt), max_new_tokens=new + tokens + 1, seed=0, ignore_eos=True)
    text: list[int] = []
    reached, drafted = [0] * (tokens + 1), 0
    for piece in generate(engine, requests):
        text += piece.tokens
        if piece.row.usage.drafted > drafted:
            drafted = piece.row.usage.drafted
            for depth in range(piece.drafted + 1):
                reached[depth] += 1
        if len(text) >= new:
            break
    return text[:new], reached


def margin(llm: LLM, before: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float:
    """The difference of the two next tokens' logits; infinite where a text just ends."""
    if not ours or not theirs:
        return math.inf
    logits = own_logits(llm.target, before, ours[:1])[0]
    return abs(float(logits[ours[0]] - logits[theirs[0]]))
