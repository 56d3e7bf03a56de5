"""Drafters' weights on disk: the native layout, the layouts of others, and what the serving engines load.

`read` takes any of them apart and gives native keys and a native config; `write` goes the other way; `check` finds in a
written folder what the engines' own loaders let through. Everything here is tensors and dictionaries: no network.
"""

from .parts import Checkpoint
from .read import method_of, read
from .target import Facts

__all__ = ["Checkpoint", "Facts", "method_of", "read"]
