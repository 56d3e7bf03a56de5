"""Greedy decoding in vLLM, for `parity.py`. Runs under vLLM's own Python, so it imports nothing of outrider.

    python vllm_decode.py < JOB

JOB is JSON: {"target", "prompts": [[ids]], "max_new_tokens", "context",
              "runs": [{"speculative": vLLM's speculative_config or null, "additional": its additional_config,
                        "rows": texts at a time}]}

Every output line is JSON. During a run: {"done": finished texts}, 0 when vLLM has started. At its end: {"vllm",
"torch", "texts": [[ids]], "drafts": [n], "accepted_at": [[n, ...]]}, per prompt the text, the number of rounds with a
draft, and the numbers of those that accepted at least 1, 2, ... of its tokens. vLLM's own output goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; little is enough
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # pinned spinning threads starve on a shared machine
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

Say = Callable[[dict[str, Any]], None]


def main(job: dict[str, Any], say: Say) -> None:
    """Decode the prompts of a job with vLLM, once per run, and print the results as they come."""
    import torch
    import vllm

    for run in job["runs"]:
        result = decode(vllm, job, **run, say=say)
        say({"vllm": vllm.__version__, "torch": torch.__version__, **result})
        gc.collect()  # free the engine before the next one starts


def decode(
    vllm: Any, job: dict[str, Any], speculative: dict[str, Any] | None, additional: Any, rows: int, say: Say
) -> dict[str, Any]:
    """One run: a new engine, and the prompts in batches."""
    prompts: list[list[int]] = job["prompts"]
    result: dict[str, Any] = {"texts": [], "drafts": [], "accepted_at": []}
    counted = {"per_request_spec_decode_metrics": "summary"} if speculative else {}
    llm = vllm.LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=job["context"],
        max_num_seqs=rows,
        enable_prefix_caching=False,
        speculative_config=speculative,
        additional_config=additional,
        **counted,
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], ignore_eos=True, detokenize=False)
    say({"done": 0})
    for first in range(0, len(prompts), rows):
        group = [{"prompt_token_ids": prompt} for prompt in prompts[first : first + rows]]
        for output in llm.generate(group, params, use_tqdm=False):
            (made,) = output.outputs
            drafts, *accepted = at_least(made.spec_decode_metrics.histogram if speculative else [0])
            result["texts"].append(list(made.token_ids))
            result["drafts"].append(drafts)
            result["accepted_at"].append(accepted)
        say({"done": len(result["texts"])})
    return result


def at_least(histogram: list[int]) -> list[int]:
    """Rounds that accepted at least 0, 1, ... tokens, from those that accepted exactly as many: [2, 1, 3] is [6, 4,
    3]."""
    return [sum(histogram[depth:]) for depth in range(len(histogram))]


if __name__ == "__main__":
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    main(json.load(sys.stdin), lambda what: print(json.dumps(what), file=lines))
