"""Choi et al. 2025 on SmolLM2: one Mamba-2 and one Transformer of its size, after the same 8 million tokens."""

from __future__ import annotations

from functools import partial

from .. import evidence
from ..evidence import SECOND, Evidence
from ..figures import Check, Figure, close, higher, quotient
from ..reliability import ece
from . import mamba
from .smollm2 import COUNTED

finding = partial(evidence.finding, of=SECOND)
STUDY, CONFIDENT = "smollm2", "smollm2_confidence"
MAMBA, LLAMA, EAGLE = (f"{name}, 16 nodes" for name in ("Mamba", "Llama", "EAGLE"))


@finding("Ma-F3", CONFIDENT, "Twelve prompts.")
def reliability(e: Evidence) -> list[Check]:
    checks = []
    for t in (0.0, 1.0):
        theirs, mine = (Figure.of(ece(e.bins(CONFIDENT, f"{name}, 16x6", t))) for name in ("Llama", "Mamba"))
        checks.append(higher(f"calibration error at T = {t:g}, Transformer over Mamba", theirs, mine))
    return checks


@finding("Ma-T1a", STUDY, "Trees of 16 nodes.")
def against_transformers(e: Evidence) -> list[Check]:
    checks = []
    for t in (0, 1):
        ours, llama = (mamba.speed(e, t, name, STUDY) for name in (MAMBA, LLAMA))
        checks.append(higher(f"tokens/s at T = {t}, Mamba over Llama", ours, llama))
        checks.append(close(f"Mamba over Llama at T = {t}, twice as fast", quotient(ours, llama), 2.0))
    return checks


@finding("Ma-T1b", STUDY, "Trees of 16 nodes; EAGLE learnt from as many tokens.")
def against_eagle(e: Evidence) -> list[Check]:
    checks = []
    for t in (0, 1):
        ours, llama, eagle = (e.method(STUDY, t, name, "speedup") for name in (MAMBA, LLAMA, EAGLE))
        checks += [
            higher(f"speed-up at T = {t}, Mamba over Llama", ours, llama),
            close(f"speed-up at T = {t}, Mamba like EAGLE", ours, eagle.value),
        ]
    return checks


@finding("Ma-T4", STUDY)
def tree(e: Evidence) -> list[Check]:
    return mamba.over_chain(e, STUDY, "Mamba")


@finding("Ma-T5", STUDY)
def shapes(e: Evidence) -> list[Check]:
    return mamba.of_shapes(e, STUDY, "Mamba")


@finding("Ma-T6", STUDY, "The paper's three shapes.")
def bandit(e: Evidence) -> list[Check]:
    return mamba.over_shapes(e, STUDY, "Mamba")


@finding("Ma-alg1", COUNTED, "HASS's and Medusa's trees.")
def verification(e: Evidence) -> list[Check]:
    return [e.same_text(COUNTED, t, "") for t in (0, 1)]
