"""Outrider: lossless speculative decoding of language models."""

from .llm import LLM, Output, load
from .stock import custom_generate
from .types import InputError, Sampling, Usage

__version__ = "0.1.0"
__all__ = ["LLM", "InputError", "Output", "Sampling", "Usage", "__version__", "custom_generate", "load"]
