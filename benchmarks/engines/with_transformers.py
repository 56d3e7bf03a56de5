"""transformers' `generate`. Methods: plain, lookup (its prompt lookup, one text at a time)."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from job import Texts, Write, serve


def start(job: dict[str, Any]) -> tuple[str, Write]:
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"]).eval()
    pad = job["ends"][0]

    def write(prompts: Texts, temperature: float, batch: int) -> Texts:
        found: Texts = []
        law = {"do_sample": temperature > 0, **({"temperature": temperature, "top_k": 0} if temperature else {})}
        more = {"prompt_lookup_num_tokens": 10} if job["method"] == "lookup" else {}
        torch.manual_seed(1)
        for first in range(0, len(prompts), batch):
            group = prompts[first : first + batch]
            longest = max(map(len, group))
            ids = torch.tensor([[pad] * (longest - len(p)) + p for p in group])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in group])
            made = model.generate(
                ids, attention_mask=mask, max_new_tokens=job["tokens"], pad_token_id=pad, eos_token_id=job["ends"],
                **law, **more,
            )  # fmt: skip
            found += made[:, longest:].tolist()
        return found

    return f"{transformers.__version__}, {model.dtype}", write


serve(start)
