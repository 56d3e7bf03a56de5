"""The target in the variants that are compared, each loaded once; drafters are loaded for each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .. import drafters
from ..llm import LLM, load
from ..targets import HFTarget
from ..targets.int8 import quantise
from ..types import InputError

VARIANTS = ("plain", "compile", "int8", "compile+int8")


@dataclass
class Models:
    """Where targets come from. `llm(variant)` is the target with no drafter."""

    target: str | None = None  # a hub id or folder; None: the demo target
    dtype: str = "auto"
    device: str = "auto"
    trust: bool = False
    loaded: dict[str, LLM] = field(default_factory=dict)
    drafted: dict[tuple[str, str], LLM] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.target or "demo"

    def llm(self, variant: str = "plain") -> LLM:
        if variant not in VARIANTS:
            raise InputError(f"there is no variant {variant!r} of a target; choose from {', '.join(VARIANTS)}")
        if variant not in self.loaded:
            llm = load(self.target, "none", dtype=self.dtype, device=self.device, trust_remote_code=self.trust)
            target: Any = llm.target
            if "int8" in variant and not quantise(target.model):
                raise InputError(f"{self.name} has no linear layers to keep in int8; leave the variant {variant} out")
            if "compile" in variant:
                if not isinstance(target, HFTarget):
                    raise InputError(f"only decoder-only models can be compiled; leave the variant {variant} out")
                target.compile()
                target.warm()
            self.loaded[variant] = llm
        return self.loaded[variant]

    def with_drafter(self, variant: str, spec: str) -> LLM:
        """The same target with a drafter, and budgets and noise of its own."""
        if (variant, spec) not in self.drafted:
            base = self.llm(variant)
            target: Any = base.target
            drafter = drafters.load(spec, target, base.tokenizer)
            if "compile" in variant:
                target.warm(drafter.taps)
            self.drafted[variant, spec] = replace(base, drafter=drafter, drafter_name=spec, budgets={})
        return self.drafted[variant, spec]
