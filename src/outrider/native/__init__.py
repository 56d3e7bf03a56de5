"""Passes of Llama-shaped models on CPUs in code of our own, which gives a token the same bits whatever is beside it."""

from __future__ import annotations
