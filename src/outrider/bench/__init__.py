"""Benchmarks: methods by tasks by temperatures by batch sizes, interleaved, beside stock transformers.

config      the arguments of a run
tasks       prompts by name, from a folder, the hub or this package
peers       the ways to decode that are compared, each with `run(prompts, ask) -> Answer`
runner      measures the grid; resumable
checks      faults that make a method's figures invalid
metrics     samples to figures with intervals
document    the results as dataclasses: results.json
results     results.json and report.html
compare     two runs side by side
choose      recommend: the fastest drafter for a model on this machine
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import Config

if TYPE_CHECKING:
    from .choose import recommend
    from .document import Document
    from .instrument import run
    from .results import read

__all__ = ["Config", "Document", "read", "recommend", "run"]
WHERE = {"Document": "document", "read": "results", "run": "instrument", "recommend": "choose"}


def __getattr__(name: str) -> Any:
    """Imported at first use."""
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{WHERE[name]}", __name__), name)
