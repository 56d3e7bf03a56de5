"""Drafters' weights on disk: the native layout, other projects' layouts, and those of serving engines.

`read` converts any of them to native keys and a native config; `write` does the reverse; `check` detects errors in a
written folder that the engines' loaders accept. Everything here is tensors and dictionaries, without networks.
"""

from .parts import Checkpoint
from .read import method_of, read
from .target import Facts

__all__ = ["Checkpoint", "Facts", "method_of", "read"]
