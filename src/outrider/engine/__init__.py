"""The decoding loop; requests, rows and outputs."""

from .loop import Batch, Engine, generate
from .request import Chunk, Done, Output, Piece, Request, Row, check_prompt, spread_seeds

__all__ = [
    "Batch", "Chunk", "Done", "Engine", "Output", "Piece", "Request", "Row", "check_prompt", "generate", "spread_seeds",
]  # fmt: skip
