"""Sampling parameters and rules, checked without torch, and the error of bad input."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any

Rule = str  # one of RULES; block: rejection with block verification, for chains
RULES: tuple[Rule, ...] = ("coupled", "rejection", "block", "typical")
LOSSY: tuple[Rule, ...] = ("typical",)


class InputError(ValueError):
    """Unknown or contradictory input: one sentence that says what to do. The command line exits with 2."""


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Turn the errors that a damaged value causes in the block into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        line = " ".join(str(error).split())[:100]
        raise InputError(f"{what} cannot be understood ({type(error).__name__}: {line}); fetch it again") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters and without its full stop; its kind, if it has
    none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")


OUT_OF_MEMORY = (
    os.strerror(errno.ENOMEM), "out of memory", "can't allocate memory", "failed to map segment",
    "can't start new thread",
)  # fmt: skip


# The extra of this package that installs a module.
EXTRAS = {
    **dict.fromkeys(
        ("torch", "transformers", "safetensors", "accelerate", "peft", "jaxtyping", "scipy", "gguf"), "torch"
    ),
    "matplotlib": "bench",
}


def missing(error: ImportError, what: str = "this") -> str:
    """The sentence for a module that an extra would install; empty for any other.

    Args:
        error: what the import raised.
        what: needs it.
    """
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    return f"{what} needs {module}, which is not installed: pip install 'outrider[{extra}]'" if extra else ""


def out_of_memory(error: BaseException) -> bool:
    """Has memory run out? Said by Python, the system, CUDA, torch or the dynamic loader."""
    said = str(error)
    unsaid = isinstance(error, SystemError) and "without" in said  # an extension that failed and did not say why
    return isinstance(error, MemoryError) or unsaid or any(part in said for part in OUT_OF_MEMORY)


NOT_FINITE = (
    "the model's logits are NaN or infinite: its weights are damaged (fetch them again), or too large for its "
    "precision (choose another dtype)"
)


class Interrupted(Exception):
    """Ctrl-C where something was kept: what, and how to continue, without a full stop. The command line exits 130."""


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _between(name: str, value: Any, low: float, high: float) -> float:
    """`value` as a float; raises InputError, which calls it `name`, if it is no number from `low` to `high`."""
    if not _is(value, Real):
        raise InputError(f"{name} must be a number, not {shown(value)}")
    if not low <= value <= high:
        raise InputError(f"{name} must be a number from {low:g} to {high:g}, not {shown(value)}")
    return float(value)


def _biases(given: Any) -> dict[int, float]:
    """The logit biases by token id; raises InputError."""
    if not isinstance(given, Mapping):
        raise InputError(f"logit_bias maps token ids to numbers, as in {{42: -5.0}}, not {shown(given)}")
    for token in given:
        if not _is(token, Integral):
            raise InputError(f"logit_bias maps token ids to numbers, as in {{42: -5.0}}; {shown(token)} is no token id")
    return {int(token): min(FORCED, _between("logit_bias", bias, -LARGEST, LARGEST)) for token, bias in given.items()}


def integer(name: str, value: Any, least: int | None = 1, most: int | None = None) -> int:
    """`value` as an int; raises InputError, which calls it `name`, if it is none, less than `least` or above `most`."""
    if not _is(value, Integral):
        raise InputError(f"{name} must be a whole number, not {shown(value)}")
    if least is not None and value < least:
        raise InputError(f"{name} must be at least {least}, not {shown(value)}")
    if most is not None and value > most:
        raise InputError(f"{name} must be at most {most}, not {shown(value)}")
    return int(value)


def shown(value: Any) -> str:
    """`value` as an error message shows it: at most 60 characters, whatever a caller sent."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print integers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


EXACT = ("auto", "bits", "rounding")
INTEGERS = "int8", "native"  # ways of keeping weights that are multiplied as integers
WEIGHTS = ("auto", "full", *INTEGERS)
FORMATS = ("safeailab", "medusa", "speculators", "vllm", "sglang")  # that drafters are exported to


def check_device(device: str) -> None:
    """Raise InputError for a device that torch cannot use here. Torch is imported for others than auto and cpu."""
    if device in ("auto", "cpu"):
        return
    if find_spec("torch") is None:
        raise InputError(f"the device {device} needs torch: pip install 'outrider[torch]'")
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        has = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise InputError(f"there is no device {device!r} here; choose one of auto, {', '.join(has)}") from None


def check_exact(exact: str) -> str:
    """The value of `exact`, if it is one of the three words; raises InputError."""
    if exact not in EXACT:
        raise InputError(f"exact is auto, bits or rounding, not {exact!r}")
    return exact


def check_weights(weights: str) -> str:
    """How weights are kept, if it is one of the four words; raises InputError."""
    if weights not in WEIGHTS:
        raise InputError(f"weights are auto, full, int8 or native, not {weights!r}")
    return weights


def check_format(name: str) -> str:
    """The format of an export, if there is one of this name; raises InputError."""
    if name not in FORMATS:
        raise InputError(f"there is no format {name!r}; choose one of {', '.join(FORMATS)}")
    return name


def check_rule(rule: str) -> Rule:
    """The rule, if there is one of this name; raises InputError."""
    if rule not in RULES:
        raise InputError(f"there is no rule {rule!r}; choose one of {', '.join(RULES)}")
    return rule


LARGEST = 1e9  # of temperatures, penalties and biases: float32 has room for every sum and quotient of them and logits
FORCED = 1e4  # the largest bias that is added
SMALLEST = 1e-9  # of temperatures above 0, and of repetition penalties


@dataclass(frozen=True)
class Sampling:
    """The parameters of the distribution; semantics are those of transformers' processors.

    Attributes:
        temperature: from 0 to 1e9; 0 is greedy, and so is what lies below 1e-9.
        top_k: only so many of the likeliest tokens; 0, or more than the vocabulary has: all.
        top_p: only the likeliest tokens that make up this probability; above 0, and 1: all.
        min_p: only tokens at least this share as likely as the likeliest; 0: all.
        repetition_penalty: logits of tokens of prompt and output are divided by it, those below 0 multiplied; 1: none.
            From 1e-9 to 1e9.
        presence_penalty: taken once from the logit of every token of the output; from -1e9 to 1e9.
        frequency_penalty: taken from a token's logit as often as it stands in the output; from -1e9 to 1e9.
        logit_bias: added to the logits of these token ids; from -1e9 to 1e9. More than 1e4, which no logit reaches,
            counts as 1e4: float32 would round the differences away.

    Raises:
        InputError: a value is of another type or out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _is(self.top_k, Integral) or self.top_k < 0:
            raise InputError(f"top_k must be 0 (off) or a positive count, not {shown(self.top_k)}")
        checked: dict[str, Any] = {"top_k": int(self.top_k), "logit_bias": _biases(self.logit_bias)}
        for name, low, high in (
            ("temperature", 0, LARGEST), ("top_p", 0, 1), ("min_p", 0, 1), ("repetition_penalty", SMALLEST, LARGEST),
            ("presence_penalty", -LARGEST, LARGEST), ("frequency_penalty", -LARGEST, LARGEST),
        ):  # fmt: skip
            checked[name] = _between(name, getattr(self, name), low, high)
        if checked["top_p"] == 0:
            raise InputError("top_p must be above 0 and at most 1, not 0")
        if checked["temperature"] < SMALLEST:
            checked["temperature"] = 0.0
        vars(self).update(checked)  # the dataclass is frozen: plain numbers in place of what was given

    @classmethod
    def of(cls, options: Mapping[str, object], others: Iterable[str] = ()) -> Sampling:
        """The parameters of keyword arguments; raises InputError at a name that is neither a field nor one of `others`.

        >>> Sampling.of({"temperature": 0.7}).temperature
        0.7
        """
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                near = get_close_matches(name, [*known, *others], 1)
                hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join([*others, *known])}"
                raise InputError(f"there is no option {name}{hint}")
        return cls(**options)  # type: ignore[arg-type]

    @property
    def penalised(self) -> bool:
        """Does the distribution depend on the tokens before, beyond the logits?"""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def warped(self) -> bool:
        """Does a top-k, top-p or min-p filter apply?"""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
