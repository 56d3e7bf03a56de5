"""The judges of the papers' findings, one file for each paper. To add one: `@finding(ids, ...)` in its paper's file."""

from evidence import ENTRIES

from . import bandit, eagle, eagle2, hass, leviathan, mamba, medusa

__all__ = ["ENTRIES", "bandit", "eagle", "eagle2", "hass", "leviathan", "mamba", "medusa"]
