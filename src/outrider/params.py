"""What a caller asks for, checked without torch: the parameters of the law, the rules, and the error of bad input."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

Rule = str  # one of RULES; block: rejection with block verification, for chains
RULES: tuple[Rule, ...] = ("coupled", "rejection", "block", "typical")
LOSSY: tuple[Rule, ...] = ("typical",)


class InputError(ValueError):
    """Unknown or contradictory input: one sentence that says what to do. The command line exits with 2."""


# What an error says where memory ran out: the system, CUDA, torch and the dynamic loader.
OUT_OF_MEMORY = os.strerror(errno.ENOMEM), "out of memory", "can't allocate memory", "failed to map segment"


class Interrupted(Exception):
    """Ctrl-C where something was kept: what it is and how to go on, without a full stop. The command line exits 130."""


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def whole(name: str, value: Any, least: int | None = 1) -> int:
    """`value` as an int; raises InputError, which calls it `name`, if it is none or less than `least`."""
    if not _is(value, Integral):
        raise InputError(f"{name} must be a whole number, not {value!r}")
    if least is not None and value < least:
        raise InputError(f"{name} must be at least {least}, not {value}")
    return int(value)


EXACT = ("auto", "bits", "rounding")
WEIGHTS = ("full", "int8", "native")


def check_exact(exact: str) -> str:
    """What `exact` asks for, if it is one of the three words; raises InputError."""
    if exact not in EXACT:
        raise InputError(f"exact is auto, bits or rounding, not {exact!r}")
    return exact


def check_weights(weights: str) -> str:
    """How weights are kept, if it is one of the three words; raises InputError."""
    if weights not in WEIGHTS:
        raise InputError(f"weights are full, int8 or native, not {weights!r}")
    return weights


def check_rule(rule: str) -> Rule:
    """The rule, if there is one of this name; raises InputError."""
    if rule not in RULES:
        raise InputError(f"there is no rule {rule!r}; choose one of {', '.join(RULES)}")
    return rule


@dataclass(frozen=True)
class Sampling:
    """The parameters of the law; semantics are those of transformers' processors.

    Attributes:
        temperature: at least 0; 0 is greedy.
        top_k: only so many of the likeliest tokens; 0: all.
        top_p: only the likeliest tokens that make up this probability; above 0, and 1: all.
        min_p: only tokens at least this share as likely as the likeliest; 0: all.
        repetition_penalty: logits of tokens of prompt and output are divided by it, those below 0 multiplied; 1: none.
        presence_penalty: taken once from the logit of every token of the output.
        frequency_penalty: taken from a token's logit as often as it stands in the output.
        logit_bias: added to the logits of these token ids.

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
        for name, value in vars(self).items():
            if name not in ("top_k", "logit_bias") and not _is(value, Real):
                raise InputError(f"{name} must be a number, not {value!r}")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be a finite number of at least 0, not {self.temperature}")
        if not _is(self.top_k, Integral) or self.top_k < 0:
            raise InputError(f"top_k must be 0 (off) or a positive count, not {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p must lie in [0, 1], not {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise InputError(f"repetition_penalty must be a positive number, not {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) < float("inf"):
                raise InputError(f"{name} must be a finite number, not {getattr(self, name)}")
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(f"logit_bias maps token ids to numbers, as in {{42: -5.0}}, not {self.logit_bias!r}")

    @classmethod
    def of(cls, options: Mapping[str, object], others: Iterable[str] = ()) -> Sampling:
        """The law of keyword arguments; raises InputError at a name that is neither a field nor one of `others`.

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
        """Does the law depend on the tokens before, beyond the logits?"""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def warped(self) -> bool:
        """Does a top-k, top-p or min-p filter apply?"""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
