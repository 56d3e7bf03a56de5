"""Targets: stock transformers models behind the two protocols of `outrider.types`."""

from .load import load_target, load_tokenizer
from .validate import Report, validate

__all__ = ["Report", "load_target", "load_tokenizer", "validate"]
