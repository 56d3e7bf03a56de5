"""Targets: stock transformers models behind the two protocols of `outrider.types`."""

from .hf import HFTarget
from .load import load_target, load_tokenizer
from .validate import Report, validate

__all__ = ["HFTarget", "Report", "load_target", "load_tokenizer", "validate"]
