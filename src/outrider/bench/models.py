"""The target in each variant that is compared, loaded once; drafters are loaded for each variant."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .types import weights_of

if TYPE_CHECKING:
    from ..llm import LLM
    from .config import Config


@dataclass
class Models:
    """The loaded targets. `llm(variant)` is a target without a drafter."""

    target: str = "demo"  # its name, as `outrider.load` takes it
    dtype: str = "auto"
    device: str = "auto"
    weights: str = "auto"  # of variants that do not say
    compile: bool = True
    trust: bool = False
    usual: str = "plain"  # the variant whose tokenizer and context length are used
    loaded: dict[str, LLM] = field(default_factory=dict)  # by variant
    drafted: dict[tuple[str, str], LLM] = field(default_factory=dict)  # by variant and SPEC

    @classmethod
    def of(cls, config: Config) -> Models:
        """The models of a run's arguments."""
        variants = {m.variant for m in config.rows()}
        usual = "eager" if "eager" in variants and "plain" not in variants else "plain"
        model = config.model or "demo"
        return cls(
            model, config.dtype, config.device, config.weights, config.compile, config.trust_remote_code, usual
        )  # fmt: skip

    def llm(self, variant: str = "") -> LLM:
        """The target of a variant (`methods.VARIANTS`) without a drafter; "": the usual one."""
        from ..llm import load

        variant = variant or self.usual
        if variant not in self.loaded:
            fast = self.compile and "eager" not in variant
            self.loaded[variant] = load(
                self.target, "none", dtype=self.dtype, device=self.device, trust_remote_code=self.trust,
                weights=weights_of(variant, self.weights), compile=None if fast else False,
            )  # fmt: skip
        return self.loaded[variant]

    def with_drafter(self, variant: str, spec: str) -> LLM:
        """The same target with a drafter, or a mix (`SPEC + SPEC`), with budgets and noise of its own. A drafter that
        keeps what it sees of other requests is loaded anew each time."""
        from .. import drafters

        if (variant, spec) in self.drafted:
            return self.drafted[variant, spec]
        base = self.llm(variant)
        drafter = drafters.load(spec, base.target, base.tokenizer)
        made = replace(base, drafter=drafter, drafter_name=spec, budgets={})
        if not drafter.remembers:
            self.drafted[variant, spec] = made
        return made
