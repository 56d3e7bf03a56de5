"""llama.cpp by llama-cpp-python, on the file's own 4-bit weights. Methods: plain, lookup (its prompt lookup)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import llama_cpp
from job import Texts, Write, serve
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


def in_place() -> None:
    """Weights stay as they lie in the file. Laid out for tiles (AMX), 0.3.36 ends with a segmentation fault."""
    made = llama_cpp.llama_cpp.llama_model_default_params

    def parameters() -> Any:
        found = made()
        found.use_extra_bufts = False
        return found

    llama_cpp.llama_cpp.llama_model_default_params = parameters


def start(job: dict[str, Any]) -> tuple[str, Write, None]:
    if "amx_tile" in Path("/proc/cpuinfo").read_text():
        in_place()
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
