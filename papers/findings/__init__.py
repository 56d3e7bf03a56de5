"""The judges of the papers' findings, one file for each paper; those of SmolLM2's figures are in `smollm2*.py`. To add
one: `@finding(ids, ...)` in its paper's file."""

from ..evidence import ENTRIES, SECOND
from . import bandit, eagle, eagle2, hass, leviathan, mamba, medusa, smollm2, smollm2_eagle, smollm2_mamba, smollm2_open

__all__ = [
    "ENTRIES",
    "SECOND",
    "bandit",
    "eagle",
    "eagle2",
    "hass",
    "leviathan",
    "mamba",
    "medusa",
    "smollm2",
    "smollm2_eagle",
    "smollm2_mamba",
    "smollm2_open",
]
