"""The figures: documented in full, true of what was served."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_world import Reader, Serve, Served

from outrider.llm import LLM
from outrider.serve.start import service_of

pytestmark = pytest.mark.trained
PATH = "/v1/completions"
ASKED = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}
LONG = {**ASKED, "temperature": 1, "seed": 1, "max_tokens": 1900, "ignore_eos": True, "echo": True}


def figures(served: Served) -> dict[str, float]:
    """Every sample by its name, with its labels after it in braces where it has more than all have."""
    results: dict[str, float] = {}
    for family in text_string_to_metric_families(served.send("GET", "/metrics")[2].decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("demo", "0")
            more = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            results[sample.name + (f"{{{more}}}" if more else "")] = sample.value
    return results


def test_all_names_are_documented(served: Served) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    served.post(PATH, ASKED)
    kinds = re.findall(r"^# TYPE (\S+)", served.send("GET", "/metrics")[2].decode(), re.MULTILINE)
    there = {name for name in kinds if not name.endswith("_created")}
    assert set(re.findall(r"`((?:vllm|outrider):\w+)`", page)) == there
    assert len(there) > 30


def test_what_was_served(llm: LLM, loaded: Any, start: Serve) -> None:
    """Three texts that end, one that is given up, one that never begins."""
    served = start(service_of(llm, loaded, "demo", rows=1, prefix_cache=0))
    made = [served.post(PATH, {**ASKED, "outrider": {}}) for _ in range(3)]
    drafted = figures(served)
    readers = [Reader(served.port, PATH, LONG, events=count) for count in (5, 1)]
    now, end = figures(served), time.monotonic() + 20
    while not now["vllm:kv_cache_usage_perc"] and time.monotonic() < end:
        now = figures(served)
    assert 0 < now["vllm:kv_cache_usage_perc"] < 1
    for reader in reversed(readers):
        reader.sock.close()
        time.sleep(0.2)
    assert served.idle()
    served.post(PATH, {**ASKED, "max_tokens": 1})
    end = time.monotonic() + 20
    while (now := figures(served))["vllm:num_requests_running"] and time.monotonic() < end:
        time.sleep(0.05)
    assert now["vllm:kv_cache_usage_perc"] == now["vllm:num_preemptions_total"] == 0
    assert now["vllm:request_success_total{finished_reason=abort}"] == 2
    assert now["vllm:request_success_total{finished_reason=length}"] == 4
    for name in ("e2e_request_latency", "request_inference_time", "request_queue_time", "request_prefill_time"):
        assert now[f"vllm:{name}_seconds_count"] == 5, f"{name}: the text that never began is none"
    buckets = [now[f"vllm:e2e_request_latency_seconds_bucket{{le={edge}}}"] for edge in ("0.005", "+Inf")]
    assert buckets[0] <= buckets[1] == 5
    names = ("e2e_request_latency", "request_inference_time", "request_queue_time")
    full, inference, queued = (now[f"vllm:{name}_seconds_sum"] for name in names)
    assert full == pytest.approx(inference + queued)
    rounds = drafted["outrider:tree_nodes_count"]
    assert rounds == sum(m["metrics"]["speculative_decoding"]["num_spec_steps"] for m in made)
    for phase in ("draft", "verify", "commit"):
        assert drafted[f"outrider:round_seconds_count{{phase={phase}}}"] == rounds
        assert drafted[f"outrider:round_seconds_sum{{phase={phase}}}"] > 0
    assert (drafted["outrider:budget_depth"], drafted["outrider:budget_nodes"]) == (6, 15)


def test_an_answers_own_figures(served: Served) -> None:
    """vLLM's shape: [j] of the histogram counts the rounds that accepted j tokens."""
    made = served.post(PATH, {**ASKED, "max_tokens": 60, "ignore_eos": True, "outrider": {"rounds": True}})
    report = made["metrics"]["speculative_decoding"]
    counts = Counter(r["accepted"] for r in made["choices"][0]["outrider"]["rounds"] if r["tree"])
    assert report["acceptance_histogram"] == [counts[j] for j in range(report["num_spec_tokens"] + 1)]
    assert sum(report["acceptance_histogram"]) == report["num_spec_steps"]
    assert sum(j * n for j, n in enumerate(report["acceptance_histogram"])) == report["num_accepted_draft_tokens"] > 0
    assert 1 <= report["num_spec_tokens"] <= 6
    plain = served.post(PATH, {**ASKED, "outrider": {"speculate": False}})["metrics"]["speculative_decoding"]
    assert (plain["num_spec_tokens"], plain["acceptance_histogram"]) == (0, [plain["num_spec_steps"]])


def test_what_a_budget_learns_is_kept_while_the_server_runs(
    llm: LLM, loaded: dict[str, Any], start: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed has lost half a minute of it, not a day."""
    kept = list[int]()
    monkeypatch.setattr(llm, "remember", lambda: kept.append(1))
    served = start(service_of(llm, loaded, "demo"))
    served.post(PATH, ASKED)
    assert len(kept) > 3, "after every round; `Memory.keep` writes now and then"
