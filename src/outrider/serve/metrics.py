"""Prometheus metrics: under vLLM's names where they mean the same, so that its dashboards work, and our own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..budgets.budgeter import Budgeter, Report
from ..core.protocols import Round
from ..core.types import Budget, Rows, Usage
from ..engine import Piece
from .job import Job

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
FINISHED = {"eos": "stop", "stop": "stop", "length": "length", "abort": "abort", "error": "error"}


class Metrics:
    """One server's metrics, in their own registry, written by the engine's thread."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model, "engine": "0"}  # vLLM numbers its engines; there is one here
        gauge, counter, histogram = (self._maker(kind) for kind in (Gauge, Counter, Histogram))
        self.running = gauge("vllm:num_requests_running", "Rows in prefill or decoding.")
        self.waiting = gauge("vllm:num_requests_waiting", "Rows waiting for a slot.")
        self.filled = gauge("vllm:kv_cache_usage_perc", "Tokens in the KV cache over rows times context; 1: full.")
        self.preempted = counter("vllm:num_preemptions", "Pauses of texts with a slow reader.")
        self.prompt = counter("vllm:prompt_tokens", "Prompt tokens.")
        self.generated = counter("vllm:generation_tokens", "Tokens written.")
        self.drafts = counter("vllm:spec_decode_num_drafts", "Rounds with a draft, summed over rows.")
        self.drafted = counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self.at = self._labelled(
            Counter, "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by depth from 0.", "position"
        )
        self.success = self._labelled(Counter, "vllm:request_success", "Finished texts by reason.", "finished_reason")
        self.rejections = self._labelled(Counter, "vllm:admission_rejections", "Rejected requests by reason.", "reason")
        self.ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.itl = histogram("vllm:inter_token_latency_seconds", "A round's time per token, per row.", SHORT)
        self.tpot = histogram("vllm:request_time_per_output_token_seconds", "After the first token, per token.", SHORT)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", SECONDS)
        self.queued = histogram("vllm:request_queue_time_seconds", "From arrival to prefill.", SECONDS)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From prefill to the first token.", SECONDS)
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.", SECONDS)
        self.inference = histogram("vllm:request_inference_time_seconds", "From prefill to the last token.", SECONDS)
        self.iteration = histogram("vllm:iteration_tokens_total", "Tokens committed per round, all rows.", POWERS)
        self.queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = counter("vllm:prefix_cache_hits", "Prompt tokens from the prefix cache.")
        phases = self._labelled(
            Histogram, "outrider:round_seconds", "Time of a round by phase: draft, verify, commit.", "phase", SHORT
        )
        self.phases = [phases(phase) for phase in ("draft", "verify", "commit")]
        self.depth = gauge("outrider:budget_depth", "Depth of the budget in the last round; 0: no draft.")
        self.budget_nodes = gauge("outrider:budget_nodes", "Nodes per row of the budget in the last round.")
        self.chunks = histogram("outrider:prefill_chunk_seconds", "Time of a prefill chunk.", SECONDS)
        self.nodes = histogram(
            "outrider:tree_nodes", "Nodes verified per round, all rows.", (1, 2, 4, 8, 16, 32, 64, 128)
        )
        self.saved = counter("outrider:saved_rounds", "Rounds saved by accepted drafts, summed over rows.")
        self.failed_rounds = counter("outrider:failed_rounds", "Failed rounds.")
        self.failed_drafters = counter("outrider:failed_drafters", "Drafters disabled after a failure.")

    def _maker(self, kind: Any) -> Any:
        def make(name: str, what: str, buckets: tuple[float, ...] | None = None) -> Any:
            more = {} if buckets is None else {"buckets": buckets}
            made = kind(name, what, list(self.labels), registry=self.registry, **more)
            return made.labels(**self.labels)

        return make

    def _labelled(self, kind: Any, name: str, what: str, label: str, buckets: tuple[float, ...] | None = None) -> Any:
        more = {} if buckets is None else {"buckets": buckets}
        made = kind(name, what, [*self.labels, label], registry=self.registry, **more)
        return lambda value: made.labels(**self.labels, **{label: value})

    def load(self, running: int, waiting: int, filled: float) -> None:
        self.running.set(running)
        self.waiting.set(waiting)
        self.filled.set(filled)

    def budget(self, depth: int, nodes: int) -> None:
        self.depth.set(depth)
        self.budget_nodes.set(nodes)

    def times(self, draft: float, verify: float, rest: float) -> None:
        for phase, seconds in zip(self.phases, (draft, verify, rest), strict=True):
            phase.observe(seconds)

    def prefix(self, tokens: int, copied: int) -> None:
        self.queries.inc(tokens)
        self.hits.inc(copied)

    def chunk(self, seconds: float) -> None:
        self.chunks.observe(seconds)

    def round(self, round: Round | None, pieces: Sequence[Piece]) -> None:
        tokens = sum(len(piece.tokens) for piece in pieces)
        self.iteration.observe(tokens)
        if round is None:
            return
        sizes = round.tree.size.tolist()
        self.nodes.observe(sum(sizes))
        for size, piece in zip(sizes, pieces, strict=True):
            if size > 1:
                self.drafts.inc()
                self.drafted.inc(size - 1)
            self.accepted.inc(piece.drafted)
            self.saved.inc(max(0, len(piece.tokens) - 1))
            for depth in range(piece.drafted):
                self.at(str(depth)).inc()

    def tokens(self, job: Job, count: int, now: float) -> None:
        """Count new tokens of a job."""
        if not count:
            return
        self.generated.inc(count)
        if not job.first:
            job.first = now
            self.ttft.observe(now - job.arrived)
            self.queued.observe(job.started - job.arrived)
            self.prefill.observe(now - job.started)
            self.prompt.inc(len(job.request.prompt))
        else:
            for _ in range(count):
                self.itl.observe((now - job.last) / count)
        job.last = now

    def done(self, job: Job, finish: str, usage: Usage) -> None:
        self.success(FINISHED[finish]).inc()
        if not job.first:
            return  # without a token there is no time per token
        self.e2e.observe(job.last - job.arrived)
        self.inference.observe(job.last - job.started)
        if usage.new_tokens > 1:
            self.decode.observe(job.last - job.first)
            self.tpot.observe((job.last - job.first) / (usage.new_tokens - 1))

    def page(self) -> bytes:
        return generate_latest(self.registry)


@dataclass
class MeasuredBudget:
    """A budget that also records its choices and the times that it learns from as metrics."""

    inner: Budgeter
    metrics: Metrics
    remember: Callable[[], None] = lambda: None  # saves what it has learnt, unless that was done a moment ago

    def choose(self, rows: Rows) -> Budget:
        budget = self.inner.choose(rows)
        drafts = budget.nodes > 1 and budget.depth > 0
        self.metrics.budget(budget.depth if drafts else 0, budget.nodes - 1 if drafts else 0)
        return budget

    def learn(self, report: Report) -> None:
        self.metrics.times(report.draft_seconds, report.verify_seconds, report.rest_seconds)
        self.inner.learn(report)
        self.remember()
