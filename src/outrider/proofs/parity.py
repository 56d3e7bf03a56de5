"""Parity: the same drafter, the same prompts, greedily, in Outrider and in vLLM.

The drafter is exported, vLLM loads it with its own code, and both draft chains of equal length. Texts must be the same
(up to ties that rounding decides, which are shown with their margin), and so must the acceptance at each position: a
wrong layer, rotary base, shift or draft vocabulary leaves the text alone and shows there.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest

from .. import checkpoints
from ..budgets.adaptive import FixedBudget
from ..checkpoints.check import check
from ..checkpoints.write import write
from ..engine import generate
from ..llm import LLM
from ..types import InputError

ROUNDING = 1e-3  # of logits: a margin below it is decided by rounding in float32
METHODS = ("eagle", "eagle3", "medusa")
SECONDS = 1800


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
        """Wilson's interval of 95 %: the probabilities that so many hits do not contradict."""
        if not self.trials:
            return 0.0, 1.0
        found = binomtest(self.hits, self.trials).proportion_ci(0.95, "wilson")
        return float(found.low), float(found.high)


def difference(a: Rate, b: Rate) -> tuple[float, float]:
    """The interval of a - b, of both Wilson intervals (Newcombe 1998, method 10)."""
    (la, ua), (lb, ub), d = a.interval, b.interval, a.value - b.value
    low = d - math.hypot(a.value - la, ub - b.value)
    return low, d + math.hypot(ua - a.value, b.value - lb)


@dataclass(frozen=True)
class Place:
    """One position of the chain: of the rounds that got there, those that accepted its token."""

    ours: Rate
    theirs: Rate

    @property
    def agrees(self) -> bool:
        low, high = difference(self.ours, self.theirs)
        return low <= 0.0 <= high


@dataclass(frozen=True)
class Split:
    """A prompt whose texts part at a token; `margin` is what the target's logits say between the two."""

    prompt: int
    position: int
    margin: float

    @property
    def rounding(self) -> bool:
        return self.margin < ROUNDING


@dataclass(frozen=True)
class Certificate:
    """What the same drafter wrote and accepted here and in vLLM; `passed` is the verdict."""

    drafter: str
    target: str
    method: str
    engine: str
    tokens: int  # drafted in each round
    prompts: int
    written: int  # tokens, by each engine
    splits: list[Split]
    places: list[Place]
    tau_ours: float
    tau_theirs: float
    same_rounds: int  # prompts on which every round accepted the same number of tokens, as the counts tell
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def same_text(self) -> bool:
        return all(split.rounding for split in self.splits)

    @property
    def same_acceptance(self) -> bool:
        return all(place.agrees for place in self.places)

    @property
    def speculated(self) -> bool:
        """Did both engines draft? Without trials every interval holds every rate."""
        first = self.places[0]
        return min(first.ours.trials, first.theirs.trials) > 0 and first.theirs.trials * 2 > first.ours.trials

    @property
    def passed(self) -> bool:
        return self.same_text and self.same_acceptance and self.speculated

    @property
    def sentence(self) -> str:
        if not self.splits:
            text = f"all {self.prompts} texts are identical"
        elif self.same_text:
            text = f"texts are identical but {len(self.splits)} of {self.prompts}, which part where rounding decides"
        else:
            text = f"{sum(not s.rounding for s in self.splits)} of {self.prompts} texts differ"
        agree = "agrees" if self.same_acceptance else "DIFFERS"
        if not self.speculated:
            rounds = self.places[0].theirs.trials
            return f"NO parity with {self.engine}: {text}; it counts {rounds} rounds of drafts, which tells nothing."
        head = "Parity" if self.passed else "NO parity"
        counts = f"the counts are equal on {self.same_rounds} of {self.prompts} prompts"
        return f"{head} with {self.engine}: {text}; acceptance {agree} at every position ({counts})."


Decode = Callable[[dict[str, Any]], dict[str, Any]]


def certify(
    load: Callable[[str], LLM], spec: str, target: str | Path, prompts: Sequence[Sequence[int]], decode: Decode,
    tokens: int = 4, max_new_tokens: int = 64, to: str = "vllm", keep: str | Path | None = None,
) -> Certificate:  # fmt: skip
    """Export, decode in both, compare. `load`: an LLM by the drafter's SPEC, in float32."""
    name, folder = split(spec)
    facts = checkpoints.Facts.at(target)
    found = checkpoints.read(folder, facts)
    if found.method not in METHODS:
        raise InputError(f"{folder} holds {found.method}, which vLLM has not; parity is for {', '.join(METHODS)}")
    chain = min(tokens, found.config["heads"]) if found.method == "medusa" else tokens
    llm = load(f"{name or found.method}:{folder}?tree=chain")
    longest = max(map(len, prompts)) + max_new_tokens + chain + 1
    if longest > llm.target.context:
        raise InputError(f"a prompt and its text take {longest} tokens, and the context has {llm.target.context}")
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(keep) if keep else Path(temporary) / "drafter"
        write(found, to, facts, out)
        if faults := check(out, to, facts):
            raise InputError(f"the export is not what {to} loads: {'; '.join(faults)}")
        theirs = decode(
            {
                "target": str(target), "drafter": str(out), "method": "eagle3" if to == "speculators" else found.method,
                "tokens": chain, "prompts": [list(p) for p in prompts], "max_new_tokens": max_new_tokens,
                "context": longest,
            }
        )  # fmt: skip
    return compare(llm, spec, str(target), found.method, prompts, chain, max_new_tokens, theirs)


def split(spec: str) -> tuple[str, str]:
    """Method and folder of a SPEC; "" where it names no method."""
    from .. import drafters

    body = spec.partition("?")[0]
    name, _, folder = body.partition(":")
    return (name, folder) if name in drafters.names() else ("", body)


def compare(
    llm: LLM, spec: str, target: str, method: str, prompts: Sequence[Sequence[int]], tokens: int, new: int,
    theirs: dict[str, Any],
) -> Certificate:  # fmt: skip
    """Decode the prompts here, and hold text and acceptance against vLLM's answers `theirs`."""
    texts, rounds = [], []
    for prompt in prompts:
        text, reached = chain(llm, prompt, tokens, new)
        texts.append(text)
        rounds.append(reached)
    splits = []
    for i, (a, b) in enumerate(zip(texts, theirs["texts"], strict=True)):
        if a != b:
            at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            splits.append(Split(i, at, margin(llm, [*prompts[i], *a[:at]], a[at:], b[at:])))
    other = [[d, *a] for d, a in zip(theirs["drafts"], theirs["accepted_at"], strict=True)]
    ours, them = ([sum(column) for column in zip(*rows, strict=True)] for rows in (rounds, other))
    places = [Place(Rate(ours[d + 1], ours[d]), Rate(them[d + 1], them[d])) for d in range(tokens)]
    known = {"vllm": str(theirs.get("vllm", "?")), "vllm_torch": str(theirs.get("torch", "?"))}
    return Certificate(
        spec, target, method, f"vLLM {theirs.get('vllm', '?')}", tokens, len(prompts), sum(map(len, texts)), splits,
        places, 1 + sum(ours[1:]) / max(1, ours[0]), 1 + sum(them[1:]) / max(1, them[0]),
        sum(a == b for a, b in zip(rounds, other, strict=True)), known,
    )  # fmt: skip


def chain(llm: LLM, prompt: Sequence[int], tokens: int, new: int) -> tuple[list[int], list[int]]:
    """Greedy text, and the rounds that accepted at least 0, 1, 2, ... tokens of a chain of `tokens`.

    Like vLLM, the last round drafts a whole chain and counts all of it, though the text ends inside.
    """
    engine = llm.engine(budget=FixedBudget(tokens + 1, tokens))
    requests, _ = llm.requests(list(prompt), max_new_tokens=new + tokens + 1, seed=0, ignore_eos=True)
    text: list[int] = []
    reached, first = [0] * (tokens + 1), True
    for piece in generate(engine, requests):
        text += piece.tokens
        if not first:
            for depth in range(piece.drafted + 1):
                reached[depth] += 1
        first = False
        if len(text) >= new:
            break
    return text[:new], reached


@torch.no_grad()
def margin(llm: LLM, before: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float:
    """How much better the target likes one token than the other here; infinite where a text just ends."""
    if not ours or not theirs:
        return math.inf
    session = llm.target.open(len(before) + 1)
    logits = torch.zeros(0)
    for chunk in session.prefill([list(before)]):
        logits = chunk.output.logits[0, 0]
    return abs(float(logits[ours[0]] - logits[theirs[0]]))


def check_vllm(python: str | Path) -> None:
    """Refuse a Python that is none, or that has no vLLM; nothing is imported there."""
    probe = "import sys, importlib.util; sys.exit(3 * (importlib.util.find_spec('vllm') is None))"
    try:
        code = subprocess.run([str(python), "-I", "-c", probe], capture_output=True, timeout=60).returncode
    except (OSError, subprocess.TimeoutExpired):
        code = 1
    if code:
        what = "has no vLLM" if code == 3 else "is no Python that runs"
        raise InputError(f"{python} {what}; `make parity` makes an environment with vLLM")


def vllm(python: str | Path) -> Decode:
    """Decoding by the vLLM of another Python."""

    def decode(job: dict[str, Any]) -> dict[str, Any]:
        script = Path(__file__).with_name("vllm_decode.py")
        with tempfile.TemporaryDirectory() as folder:
            asked, answer = Path(folder) / "job.json", Path(folder) / "result.json"
            asked.write_text(json.dumps(job), encoding="utf-8")
            try:
                run = subprocess.run(
                    [str(python), "-I", str(script), str(asked), str(answer)],
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                )
            except FileNotFoundError:
                raise InputError(f"there is no Python {python}; `make parity` makes one with vLLM") from None
            except subprocess.TimeoutExpired:
                raise RuntimeError(
                    f"vLLM did not finish within {SECONDS // 60} minutes; ask for fewer prompts"
                ) from None
            if run.returncode or not answer.is_file():
                raise RuntimeError(f"vLLM under {python} failed: {_reason(run.stderr)}")
            return json.loads(answer.read_text(encoding="utf-8"))

    return decode


def _reason(text: str) -> str:
    """The line of a traceback that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it says nothing"])[-1][:300]
