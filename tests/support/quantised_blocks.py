"""Random blocks of every kind of a GGUF's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.backends.native.files import KINDS

SCALES = {  # bytes of a block where a float16 begins
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip


def random_blocks(name: str, rows: int, width: int, scales: Sequence[int], seed: int = 0) -> np.ndarray:
    """Rows of random bits, uint8 [rows, bytes of a row], whose float16 scales have one of these bit patterns."""
    (kind,) = (kind for kind in KINDS.values() if kind.name == name)
    random = np.random.default_rng(seed)
    made = random.integers(0, 256, (rows, width // kind.elements, kind.bytes), dtype=np.uint8)
    for at in SCALES.get(name, ()):
        bits = random.choice(np.asarray(scales, np.uint16), made.shape[:2])
        made[..., at : at + 2] = bits[..., None].view(np.uint8)
    return made.reshape(rows, -1)
