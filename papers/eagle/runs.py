"""EAGLE with its own weights: the chain of five and the static tree of 26 nodes, sampled under `rejection`."""

from __future__ import annotations

from typing import Any

from ..rows import merged, sources

METHODS = {
    "chain": "{eagle}?tree=chain@6x5@rejection",
    "tree": "{eagle}?tree=static@26x5@rejection",
    "chain, coupled": "{eagle}?tree=chain@6x5",
    "tree, coupled": "{eagle}?tree=static@26x5",
}
CHANGES: dict[str, Any] = {}
USES = {
    "demo": merged(sources("drafters", {"chain": "EAGLE chain", "tree": "EAGLE tree"})),
}
