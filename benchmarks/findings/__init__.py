"""The judges of the papers' findings, one file for each paper, and one for all of them on SmolLM2. To add one:
`@finding(ids, ...)` in its paper's file."""

from evidence import ENTRIES, SECOND

from . import bandit, eagle, eagle2, hass, leviathan, mamba, medusa, smollm2, smollm2_open

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
    "smollm2_open",
]
