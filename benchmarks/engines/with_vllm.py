"""vLLM for CPUs. Methods: plain, lookup (its n-grams), eagle and eagle3 (a folder that `outrider export --to vllm`
wrote)."""

from __future__ import annotations

import os
import time
from typing import Any

from job import Decode, Texts, Write, serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def start(job: dict[str, Any]) -> tuple[str, Write, Decode]:
    import vllm

    trained = {"model": job["drafter"], "num_speculative_tokens": 3}
    how = {
        "plain": None,
        "lookup": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        "eagle": {"method": "eagle", **trained},
        "eagle3": {"method": "eagle3", **trained},
    }[job["method"]]
    chats = [
        sum(len(ids) + job["tokens"] for ids in chat) for every in job.get("prompts", {}).values() for chat in every
    ]
    longest = max([*chats, *(context + job["tokens"] for context in job.get("contexts", ()))])
    llm = vllm.LLM(
        job["model"], dtype=job["dtype"], skip_tokenizer_init=True, max_model_len=max(2048, longest),
        max_num_seqs=max(job["batches"]), max_num_batched_tokens=max(4096, job.get("most", 0)),
        enable_prefix_caching="prompts" in job, speculative_config=how,
    )  # fmt: skip

    def write(prompts: Texts, temperature: float, batch: int, goes_on: bool) -> Texts:
        sampling = vllm.SamplingParams(
            temperature=temperature, max_tokens=job["tokens"], stop_token_ids=job["ends"], detokenize=False, seed=1
        )
        texts: Texts = []
        step = 1 if batch == 1 else len(prompts)  # it fills its batch by itself
        for first in range(0, len(prompts), step):
            if not goes_on:
                llm.reset_prefix_cache()
            group = [{"prompt_token_ids": prompt} for prompt in prompts[first : first + step]]
            texts += [list(output.outputs[0].token_ids) for output in llm.generate(group, sampling, use_tqdm=False)]
        return texts

    def decode(prompts: Texts) -> tuple[int, float]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
        for number, prompt in enumerate(prompts):
            llm.llm_engine.add_request(f"{time.monotonic()}-{number}", {"prompt_token_ids": prompt}, sampling)
        written: dict[str, int] = {}
        tokens, seconds, before = 0, 0.0, time.perf_counter()
        while llm.llm_engine.has_unfinished_requests():
            made = {output.request_id: len(output.outputs[0].token_ids) for output in llm.llm_engine.step()}
            now = time.perf_counter()
            if len(written) == len(made) == len(prompts):  # all were there before and write on
                tokens += sum(count - written[name] for name, count in made.items())
                seconds += now - before
            written.update(made)
            before = now
        return tokens, seconds

    return f"{vllm.__version__}, {job['dtype']}", write, decode


serve(start)
