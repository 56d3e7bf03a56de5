"""EAGLE (Li et al. 2024a, section 4; EAGLE-2: 2024b; HASS: Zhang et al. 2024, the same network): predicts
the next hidden state of the target from the last one and the next token.

    f'_{i+1} = layer(fc(cat(e(t_{i+1}), f_i)))   at position i;   logits of t_{i+2} = head(f'_{i+1})

f is the target's hidden state after its final norm, e and head are the target's own embedding and LM head (its rows of
a trimmed draft vocabulary, where the drafter has one). The token
is one step ahead of the feature, because it is the outcome of the draw that f_i left open. Accepted tokens are fed
again with true features (`_features.py`); trees grow as EAGLE-2's do, or to EAGLE-1's fixed shape (`_growth.py`).
"""

from __future__ import annotations

from typing import Any

from ._eagles import loader
from ._trained import in_tensors

load = loader("eagle")


def __getattr__(name: str) -> Any:
    """The network and its drafter in tensors (`_eagle.py`), imported on first use."""
    return getattr(in_tensors("eagle"), name)
