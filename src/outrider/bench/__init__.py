"""The measuring instrument: methods by tasks by temperatures by batch sizes, in turn, beside stock transformers.

config      what is to be measured, as typed arguments; run: measures it and writes the report
tasks       prompts by name, from a folder, the hub or this package
peers       the ways to decode that are compared, each behind `run(prompts, ask) -> Answer`
runner      the grid, in turn, resumable
checks      what makes a method's figures invalid
metrics     samples -> figures with intervals
document    the results as dataclasses: results.json
report      results.json and report.html
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
