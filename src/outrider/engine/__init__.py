"""The decoding loop; requests, rows and outputs."""

from .loop import Batch, Engine, generate
from .request import Piece, Request, Row

__all__ = ["Batch", "Engine", "Piece", "Request", "Row", "generate"]
