"""Rotary position embeddings: the frequencies that a model's config means, and tables of cosines and sines.

Frequencies follow transformers' formulas in float32. Powers, cosines and sines are computed in float64 and rounded, so
that the tables are the same on every machine; torch's float32 functions differ from them in the last bit of one number
in twenty, and between its builds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.types import Array
from ...params import InputError

KINDS = "default", "linear", "llama3", "yarn", "longrope"
ONE = np.float32(1)


@dataclass(frozen=True)
class Rope:
    """Angles are position * frequency; cosines and sines are multiplied by `scale`."""

    frequencies: Array  # float32 [head_dim / 2]
    scale: float = 1.0

    @classmethod
    def of(cls, parameters: Mapping[str, Any], head_dim: int, factors: Array | None = None) -> Rope:
        """The rotary embedding of a config.

        Args:
            parameters: `rope_parameters`, in the names of transformers 5.
            head_dim: elements of an attention head that are rotated.
            factors: float32 [head_dim / 2], by which the frequencies are divided; None: 1.

        Raises:
            InputError: a kind that is not supported, or a value that is missing or makes no sense.
        """
        kind = parameters.get("rope_type", "default")
        if kind not in KINDS:
            raise InputError(f"rotary embeddings of the type {kind!r} are not supported, only {', '.join(KINDS)}")
        try:
            with np.errstate(divide="raise", invalid="raise", over="raise"):
                made = _of(kind, parameters, head_dim)
            if not np.isfinite([*made.frequencies, made.scale]).all():
                raise ValueError("they are not finite")
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise InputError(
                f"the rotary embeddings of the model's config cannot be understood ({error!r}); fetch it again"
            ) from None
        if factors is not None:
            if factors.shape != made.frequencies.shape:
                raise InputError("the file's rotary factors do not fit its heads; fetch it again")
            made = cls(made.frequencies / factors, made.scale)
        return made

    def table(self, positions: int) -> Array:
        """Cosines and sines of the positions 0 .. positions - 1, float32 [positions, 2, head_dim]: both halves of a
        head have the same angles."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.frequencies
        wide, made = angles.astype(np.float64), np.empty((positions, 2, 2, len(self.frequencies)), np.float32)
        made[:, 0], made[:, 1] = np.cos(wide)[:, None], np.sin(wide)[:, None]
        if self.scale != 1.0:
            made *= np.float32(self.scale)
        return made.reshape(positions, 2, 2 * len(self.frequencies))


def _of(kind: str, parameters: Mapping[str, Any], head_dim: int) -> Rope:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    periods = np.power(float(parameters["rope_theta"]), exponents.astype(np.float64)).astype(np.float32)
    if kind == "yarn":
        return _yarn(parameters, periods)
    if kind == "longrope":
        return _longrope(parameters, periods)
    frequencies = ONE / periods
    if kind == "linear":
        return Rope(frequencies / np.float32(parameters["factor"]))
    return Rope(_llama3(parameters, frequencies) if kind == "llama3" else frequencies)


def stacked(ropes: tuple[Rope, ...], positions: int) -> Array:
    """The tables of rotary embeddings of the same width: float32 [ropes, positions, 2, head_dim]; none: one of width
    0."""
    tables = [rope.table(positions) for rope in ropes]
    return np.stack(tables) if tables else np.zeros((1, positions, 2, 0), np.float32)


def _llama3(parameters: Mapping[str, Any], frequencies: Array) -> Array:
    factor, low, high = (float(parameters[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(parameters["original_max_position_embeddings"])
    lengths = np.float32(2 * math.pi) / frequencies
    slow = np.where(lengths > context / low, frequencies / np.float32(factor), frequencies)
    share = (np.float32(context) / lengths - np.float32(low)) / np.float32(high - low)
    between = (ONE - share) * slow / np.float32(factor) + share * slow
    inside = ~(lengths < context / high) & ~(lengths > context / low)
    return np.where(inside, between, slow)


def _yarn(parameters: Mapping[str, Any], periods: Array) -> Rope:
    base, context, dim = (
        float(parameters["rope_theta"]),
        parameters["original_max_position_embeddings"],
        2 * len(periods),
    )
    factor = float(parameters["factor"])

    def bound(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = bound(parameters.get("beta_fast") or 32), bound(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(len(periods), dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = ONE - ramp.astype(np.float32)
    frequencies = ONE / (np.float32(factor) * periods) * (ONE - kept) + ONE / periods * kept
    return Rope(frequencies.astype(np.float32), _attention_factor(parameters, factor))


def _longrope(parameters: Mapping[str, Any], periods: Array) -> Rope:
    """Within the original context, where `short_factor` divides the frequencies."""
    short, factor = np.asarray(parameters["short_factor"], np.float32), float(parameters["factor"])
    if short.shape != periods.shape:
        raise ValueError(f"short_factor has {short.size} numbers, not {periods.size}")
    scale = parameters.get("attention_factor")
    if scale is None:
        context = parameters["original_max_position_embeddings"]
        scale = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    return Rope(ONE / (short * periods), float(scale))


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    explicit, own, of_all = (parameters.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if explicit is not None:
        return float(explicit)
    return scale(own) / scale(of_all) if own and of_all else scale(1.0)
