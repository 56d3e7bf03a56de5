"""HASS beside EAGLE: the same network, data, steps and rate; chains of five, and EAGLE-2's trees.

SmolLM2's are trainings of `papers/ablations`: every option is pinned there, whatever the recipes become.
"""

from __future__ import annotations

from typing import Any

from ..rows import merged, sources

METHODS = {
    "HASS": "{equal hass}?scale=1@26x5@rejection",
    "EAGLE-2": "{equal eagle}?scale=1@26x5@rejection",
    "HASS chain": "{equal hass}?tree=chain@6x5@rejection",
    "EAGLE chain": "{equal eagle}?tree=chain@6x5@rejection",
    "beta 0.5 chain": "{beta hass}?tree=chain@6x5@rejection",
}
CHANGES: dict[str, Any] = {}
USES = {"demo": merged(sources("drafters", {"HASS": "HASS", "EAGLE-2": "EAGLE-2"}))}
