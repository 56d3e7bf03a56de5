"""Greedy decoding in vLLM, for `parity.py`. Runs under vLLM's own Python, so it imports nothing of outrider.

    python vllm_decode.py JOB RESULT

JOB    {"target", "prompts": [[ids]], "max_new_tokens", "context",
        "runs": [{"speculative": vLLM's speculative_config or null, "additional": its additional_config}]}
RESULT {"vllm", "torch", "runs": [{"texts": [[ids]], "drafts": [n], "accepted_at": [[n, ...]]}]}: of each run, prompt by
       prompt, the text, the rounds with a draft, and of them those that accepted at least 1, 2, ... drafted tokens
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; a tiny share of the machine is plenty
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # pinned threads that spin starve on a shared machine
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models that parity is for are tiny
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

COUNTERS = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def counters(llm: Any, tokens: int) -> list[int]:
    """Drafts so far, then those that accepted at least so many tokens."""
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name in COUNTERS}
    if len(found) < 2 or not tokens:
        return [0] * (tokens + 1)
    return [int(found[COUNTERS[0]].value), *(int(v) for v in found[COUNTERS[1]].values)]


def main(job_file: str, result_file: str) -> None:
    """Decode the prompts of a job (a JSON file) with vLLM, once for every run, and write what came out to another."""
    import torch
    import vllm

    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    runs = []
    for asked in job["runs"]:
        runs.append(decode(vllm, job, asked["speculative"], asked["additional"]))
        gc.collect()  # the engine of a run is gone before the next one takes its memory
    found = {"vllm": vllm.__version__, "torch": torch.__version__, "runs": runs}
    Path(result_file).write_text(json.dumps(found), encoding="utf-8")


def decode(vllm: Any, job: dict[str, Any], speculative: dict[str, Any] | None, additional: Any) -> dict[str, Any]:
    """One run: an engine of its own, and every prompt by itself."""
    k = speculative["num_speculative_tokens"] if speculative else 0
    llm = vllm.LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=job["context"],
        max_num_seqs=1,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=speculative,
        additional_config=additional,
    )
    law = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], ignore_eos=True, detokenize=False)
    texts, drafts, accepted = [], [], []
    before = counters(llm, k)
    for prompt in job["prompts"]:
        output = llm.generate([{"prompt_token_ids": prompt}], law, use_tqdm=False)[0]
        now = counters(llm, k)
        texts.append(list(output.outputs[0].token_ids))
        drafts.append(now[0] - before[0])
        accepted.append([a - b for a, b in zip(now[1:], before[1:], strict=True)])
        before = now
    return {"texts": texts, "drafts": drafts, "accepted_at": accepted}


if __name__ == "__main__":
    main(*sys.argv[1:3])
