"""Chains of a draft model under `rejection`, as the papers have them, and n-grams; our rule beside.

SmolLM2's tasks are the papers' (translation of WMT14 as Spec-Bench has it, summaries of CNN/DM and XSum, HumanEval),
and GSM8K and MT-bench beside.
"""

from __future__ import annotations

from typing import Any

GAMMAS = (3, 5, 7)
METHODS = {
    **{f"chain of {n}": f"{{llm}}?tree=chain@{n + 1}x{n}@rejection" for n in (1, 2, *GAMMAS)},
    **{f"chain of {n}, coupled": f"{{llm}}?tree=chain@{n + 1}x{n}" for n in (3, 5)},
    "smaller draft model": "{smaller llm}?tree=chain@6x5@rejection",
    "unigrams": "{ngrams}?n=1@1,1,1,1,1@rejection",
    "bigrams": "{ngrams}?n=2@1,1,1,1,1@rejection",
    "sampled tree": "{llm}@3,2,1@rejection",
}
TASKS = ("spec-bench/translation", "cnn-dm@600", "xsum@600", "humaneval", "gsm8k", "mt-bench")
CHANGES: dict[str, Any] = {"SmolLM2": {"tasks": TASKS}}
