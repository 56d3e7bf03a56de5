"""llama.cpp by llama-cpp-python, on the file's own 4-bit weights. Methods: plain, lookup (its prompt lookup)."""

from __future__ import annotations

import os
from typing import Any

import llama_cpp
from job import Texts, Write, serve
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


def start(job: dict[str, Any]) -> tuple[str, Write, None]:
    draft = LlamaPromptLookupDecoding(num_pred_tokens=2) if job["method"] == "lookup" else None  # its advice for CPUs
    llm = llama_cpp.Llama(
        job["gguf"], n_ctx=2048, n_batch=2048, n_threads=os.cpu_count(), n_threads_batch=os.cpu_count(),
        draft_model=draft, seed=1, verbose=False,
    )  # fmt: skip

    def write(prompts: Texts, temperature: float, batch: int) -> Texts:
        assert batch == 1, "it has no batches"
        found: Texts = []
        for prompt in prompts:
            text: list[int] = []
            for token in llm.generate(prompt, temp=temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0):
                text.append(token)
                if token in job["ends"] or len(text) == job["tokens"]:
                    break
            found.append(text)
        return found

    return f"{llama_cpp.__version__}, Q4_1", write, None


serve(start)
