"""transformers' `generate`. Methods: plain; lookup (its prompt lookup) and assisted (by the draft model in the folder
`drafter`, of the same tokenizer or another), both one text at a time."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from job import Decode, Texts, Write, serve


def assistant(job: dict[str, Any], model: Any) -> dict[str, Any]:
    """What `generate` is told of the draft model: where its vocabulary is another, both tokenizers too."""
    draft = transformers.AutoModelForCausalLM.from_pretrained(job["drafter"], dtype=job["dtype"]).eval()
    if draft.config.vocab_size == model.config.vocab_size:
        return {"assistant_model": draft}
    ours, its = (transformers.AutoTokenizer.from_pretrained(job[whose]) for whose in ("model", "drafter"))
    return {"assistant_model": draft, "tokenizer": ours, "assistant_tokenizer": its}


def start(job: dict[str, Any]) -> tuple[str, Write, Decode]:
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"]).eval()
    pad = job["ends"][0]
    more = {"prompt_lookup_num_tokens": 10} if job["method"] == "lookup" else {}
    if job["method"] == "assisted":
        more = assistant(job, model)

    def write(prompts: Texts, temperature: float, batch: int, goes_on: bool) -> Texts:
        texts: Texts = []
        sampling = {
            "do_sample": temperature > 0,
            **({"temperature": temperature, "top_k": 0} if temperature else {}),
        }
        torch.manual_seed(1)
        for first in range(0, len(prompts), batch):
            group = prompts[first : first + batch]
            longest = max(map(len, group))
            ids = torch.tensor([[pad] * (longest - len(p)) + p for p in group])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in group])
            made = model.generate(
                ids, attention_mask=mask, max_new_tokens=job["tokens"], pad_token_id=pad, eos_token_id=job["ends"],
                **sampling, **more,
            )  # fmt: skip
            texts += made[:, longest:].tolist()
        return texts

    def decode(prompts: Texts) -> tuple[int, float]:
        times: list[float] = []

        def look(ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=job["tokens"],
            min_new_tokens=job["tokens"], pad_token_id=pad, stopping_criteria=[look],
        )  # fmt: skip
        return len(prompts) * (len(times) - 1), times[-1] - times[0]

    return f"{transformers.__version__}, {model.dtype}", write, decode


if __name__ == "__main__":
    serve(start)
