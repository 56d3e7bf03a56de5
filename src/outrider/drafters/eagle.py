"""EAGLE (Li et al. 2024a, section 4; EAGLE-2: 2024b; HASS: Zhang et al. 2024, the same network): predicts
the next hidden state of the target from the last one and the next token.

    f'_{i+1} = layer(fc(cat(e(t_{i+1}), f_i)))   at position i;   law of t_{i+2} = head(f'_{i+1})

f is the target's hidden state after its final norm, e and head are the target's own embedding and LM head (its rows of
a trimmed draft vocabulary, where the drafter has one). The token
is one step ahead of the feature, because it is the outcome of the draw that f_i left open. Accepted tokens are fed
again with true features (`_features.py`); trees grow as EAGLE-2's do, or to EAGLE-1's fixed shape (`_growth.py`).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..core.protocols import Drafter, Target
from . import _trained


def load(
    target: Target | None,
    tokenizer: Any = None,
    path: str | None = None,
    tree: str = "dynamic",
    shape: tuple[int, ...] = (),
    depth: int = 8,
    width: int = 0,
    top_k: int = 10,
    nodes: int = 60,
    scale: float = 0.0,
    value: bool = True,
    rerank: bool = True,
    replacement: bool = False,
) -> Drafter:
    """A trained drafter from its folder: in compiled code where the target's passes are, else by torch.

    The options are the fields of `_growth.Growth`. Without a shape, the static tree is EAGLE-1's; `scale` 0: the
    folder's. Raises InputError where the folder is damaged, holds another drafter, or belongs to another target.
    """
    growth = _trained.Options(tree, shape, depth, width, top_k, nodes, scale, value, rerank, replacement)
    made = _trained.compiled("eagle", target, path, growth)
    return import_module("._eagle", __package__).load(target, path, growth) if made is None else made


def __getattr__(name: str) -> Any:
    """The network and its drafter in tensors (`_eagle.py`), imported when they are asked for."""
    return getattr(import_module("._eagle", __package__), name)
