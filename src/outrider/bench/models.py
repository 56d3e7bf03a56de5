"""The target in the variants that are compared, each loaded once; drafters are loaded for each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .. import drafters
from ..backends.torch import HFTarget
from ..llm import LLM, load
from .config import Config
from .types import weights_of


@dataclass
class Models:
    """Where targets come from. `llm(variant)` is the target with no drafter."""

    target: str = "demo"  # its name: see `targets.find`
    dtype: str = "auto"
    device: str = "auto"
    compile: bool = True
    trust: bool = False
    usual: str = "plain"  # the variant that stands for the unchanged weights
    loaded: dict[str, LLM] = field(default_factory=dict)  # by variant
    drafted: dict[tuple[str, str], LLM] = field(default_factory=dict)  # by variant and SPEC

    @classmethod
    def of(cls, config: Config) -> Models:
        """What a run's arguments name."""
        usual = "eager" if "eager" in config.variants and "plain" not in config.variants else "plain"
        model = config.model or "demo"
        return cls(model, config.dtype, config.device, config.compile, config.trust_remote_code, usual)

    def llm(self, variant: str = "") -> LLM:
        """The target of a variant (`methods.VARIANTS`), loaded once, with no drafter; "": the usual one."""
        variant = variant or self.usual
        if variant not in self.loaded:
            place: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "trust_remote_code": self.trust}
            fast = self.compile and "eager" not in variant
            llm = load(self.target, "none", **place, weights=weights_of(variant), compile=None if fast else False)
            target: Any = llm.target
            if fast and isinstance(target, HFTarget):
                target.compile()
                target.warm()
            self.loaded[variant] = llm
        return self.loaded[variant]

    def with_drafter(self, variant: str, spec: str) -> LLM:
        """The same target with a drafter, or a mix of several (`SPEC + SPEC`), and budgets and noise of its own."""
        if (variant, spec) not in self.drafted:
            base = self.llm(variant)
            target: Any = base.target
            drafter = drafters.load(spec, target, base.tokenizer)
            if getattr(target, "graphs", None) is not None:
                target.warm(drafter.taps)
            self.drafted[variant, spec] = replace(base, drafter=drafter, drafter_name=spec, budgets={})
        return self.drafted[variant, spec]
