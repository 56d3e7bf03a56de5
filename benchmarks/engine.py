"""The engine's measurements: `python benchmarks/engine.py --out runs/bench/engine.json` (a table, and JSON).

none        our plain loop beside transformers' generate                                    bar: 1.0x
model       the draft model beside transformers' assisted generation, the same pair         bar: 1.5x
lookup      prompt lookup beside transformers' own, on summarisation prompts                 bar: 1.3x
overhead    what is neither target nor drafter, per round                                   bar: 10 %, none/lookup 5 %
rules       coupled, rejection and plain top-k at T = 1: tau and speed
adversary   an always-wrong drafter under the adaptive budget                               bar: 0.95x of none
oracle      a random Llama of about 100M parameters, drafts of given acceptance             (speed over alpha)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import outrider
from measure import interleave, machine, show, summary, write
from oracle import OracleDrafter
from outrider import drafters
from outrider.budget import AdaptiveBudget, FixedBudget
from outrider.engine import Engine
from outrider.llm import LLM
from outrider.noise import RaceNoise
from outrider.targets import load_target
from peers import Peer, decode, outrider_peer, stock_peer

DEMO = files("outrider") / "demo"


class Setup:
    """The demo pair, ours and stock, and held-out prompts as ids."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.llm = outrider.load(drafter="none")
        self.recorded = outrider.load(drafter="none", compile=True)
        self.stock = AutoModelForCausalLM.from_pretrained(str(DEMO / "target"), dtype=torch.float32).eval()
        self.draft = AutoModelForCausalLM.from_pretrained(str(DEMO / "draft"), dtype=torch.float32).eval()
        lines = (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
        by_domain: dict[str, list[list[int]]] = {}
        for line in map(json.loads, lines):
            by_domain.setdefault(line["domain"], []).append(self.llm.encode(line.get("messages") or line["text"]))
        self.prompts = [p for found in by_domain.values() for p in found[: args.per_domain]]

    def ours(self, name: str, spec: str, compile: bool = False, **options: Any) -> Peer:
        return outrider_peer(name, self.with_drafter(spec, compile), **options)

    def with_drafter(self, spec: str, compile: bool = False) -> LLM:
        llm = self.recorded if compile else self.llm
        drafter = drafters.load(spec, llm.target, llm.tokenizer)
        if compile:
            self.recorded.target.warm(drafter.taps)
        return replace(llm, drafter=drafter, drafter_name=spec, budgets={})

    def stock_peer(self, name: str, **options: Any) -> Peer:
        return stock_peer(name, self.stock, self.llm.eos, **options)

    def run(
        self, title: str, peers: list[Peer], baseline: str, prompts: list[list[int]] | None = None
    ) -> dict[str, Any]:
        chosen = prompts or self.prompts
        series = interleave(peers, chosen, self.args.tokens, self.args.repeats, title)
        found = summary(series, baseline, len(chosen))
        show(title, found, baseline)
        return found

    def summarisation(self) -> list[list[int]]:
        """Articles to be summarised, cut so that the demo target's context holds article and summary."""
        path = Path(self.args.summarisation)
        if not path.is_file():
            return []
        texts = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[: self.args.articles]]
        keep = 800
        ids = []
        for item in texts:
            article = self.llm.tokenizer(_text(item))["input_ids"][:keep]
            body = self.llm.tokenizer.decode(article, skip_special_tokens=True)
            ids.append(self.llm.encode([{"role": "user", "content": body + "\n\nSummarize the article above."}]))
        return ids


def _text(item: dict[str, Any]) -> str:
    for key in ("article", "text", "prompt", "document", "input"):
        if isinstance(item.get(key), str):
            return item[key]
    return item["turns"][0] if "turns" in item else item["messages"][0]["content"]


def case_none(s: Setup) -> dict[str, Any]:
    peers = [s.stock_peer("transformers"), s.ours("none", "none"), s.ours("none, compiled", "none", compile=True)]
    return s.run("none", peers, "transformers")


def case_model(s: Setup) -> dict[str, Any]:
    peers = [
        s.stock_peer("transformers"),
        s.stock_peer("assisted", assistant_model=s.draft),
        s.ours("none", "none"),
        s.ours("model", "model"),
        s.ours("model chain 5", "model?tree=chain", budget=FixedBudget(6, 5)),
        s.ours("model (3,2,2,1,1)", "model?tree=static", budget=FixedBudget(64, 5)),
        s.ours("none, compiled", "none", compile=True),
        s.ours("model, compiled", "model", compile=True),
        s.ours("model, 8 nodes, compiled", "model", compile=True, budget=FixedBudget(8, 3)),
    ]
    return s.run("model", peers, "assisted")


def case_lookup(s: Setup) -> dict[str, Any]:
    prompts = s.summarisation()
    if not prompts:
        return {"skipped": f"there are no articles at {s.args.summarisation}; give --summarisation FILE"}
    peers = [
        s.stock_peer("transformers"),
        s.stock_peer("stock lookup", prompt_lookup_num_tokens=10),
        s.ours("none", "none"),
        s.ours("lookup", "lookup"),
        s.ours("suffix", "suffix"),
        s.ours("none, compiled", "none", compile=True),
        s.ours("lookup, compiled", "lookup", compile=True),
        s.ours("suffix, compiled", "suffix", compile=True),
    ]
    return s.run("lookup", peers, "stock lookup", prompts)


def case_overhead(s: Setup) -> dict[str, Any]:
    fixed = {"none": FixedBudget(1, 0), "lookup": FixedBudget(16, 8), "suffix": FixedBudget(16, 8)}
    peers = [
        s.ours(name, name, budget=fixed.get(name, FixedBudget(16, 5)))
        for name in ("none", "lookup", "suffix", "ngram", "lookahead", "model")
    ]
    return s.run("overhead", peers, "none")


def case_rules(s: Setup) -> dict[str, Any]:
    """At T = 1. "plain top-k" drafts the likeliest tokens, as EAGLE-2 does, judged as point masses by rejection."""
    budget = FixedBudget(16, 4)
    peers = [
        s.ours("none", "none", temperature=1.0),
        s.ours("coupled", "model", budget=budget, temperature=1.0),
        s.ours("plain top-k", "model", rule="rejection", budget=budget, temperature=1.0),
        s.ours("coupled (3,1,1,1)", "model", budget=FixedBudget(16, 4, (3, 1, 1, 1)), temperature=1.0),
        s.ours(
            "rejection (3,1,1,1)", "model", rule="rejection", budget=FixedBudget(16, 4, (3, 1, 1, 1)), temperature=1.0
        ),
        s.ours("coupled chain", "model?tree=chain", budget=FixedBudget(5, 4), temperature=1.0),
        s.ours("rejection chain", "model?tree=chain", rule="rejection", budget=FixedBudget(5, 4), temperature=1.0),
        s.ours("block chain", "model?tree=chain", rule="block", budget=FixedBudget(5, 4), temperature=1.0),
    ]
    return s.run("rules", peers, "none")


def case_adversary(s: Setup) -> dict[str, Any]:
    """A drafter that is always wrong: it may cost something while the budget learns, and nothing after."""
    none = s.ours("none", "none")
    answers = {tuple(p): none.run(p, s.args.tokens + 16).tokens for p in s.prompts}
    wrong = OracleDrafter(answers, 0.0, s.llm.target.vocab)
    budget = AdaptiveBudget()
    adversary = outrider_peer("always wrong", replace(s.llm, drafter=wrong, budgets={}), budget=budget)
    for prompt in s.prompts:
        adversary.run(prompt, s.args.tokens)  # it adapts
    return s.run("adversary", [none, adversary], "none")


def case_oracle(s: Setup) -> dict[str, Any]:
    """About 100M parameters, random weights: its own greedy text is the answer that the oracle knows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=1024, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    target = load_target(LlamaForCausalLM(config).eval())
    race, limit = RaceNoise(target.vocab), min(s.args.tokens, 64)
    prompts = [torch.randint(0, target.vocab, (32,)).tolist() for _ in range(2)]
    none = Engine(target, drafters.load("none"), FixedBudget(1, 0), race)
    answers = {tuple(p): decode(none, p, limit + 16, frozenset()).tokens for p in prompts}

    def peer(name: str, engine: Engine) -> Peer:
        return Peer(name, lambda prompt, n: decode(engine, prompt, n, frozenset()))

    peers = [peer("none", none), stock_peer("transformers", target.model, frozenset())]
    for alpha in (0.0, 0.5, 0.7, 0.8, 0.9, 1.0):
        drafter = OracleDrafter(answers, alpha, target.vocab)
        peers.append(peer(f"alpha {alpha}", Engine(target, drafter, AdaptiveBudget(), race)))
    series = interleave(peers, prompts, limit, s.args.repeats, "oracle")
    found = summary(series, "none", len(prompts))
    show("oracle: random Llama, 100M parameters", found, "none")
    return found


CASES: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "none": case_none,
    "model": case_model,
    "lookup": case_lookup,
    "overhead": case_overhead,
    "rules": case_rules,
    "adversary": case_adversary,
    "oracle": case_oracle,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--per-domain", type=int, default=3, help="held-out prompts of each domain")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--articles", type=int, default=12)
    parser.add_argument("--summarisation", default="../shared/data/eval/cnn_dm_200.jsonl", help="JSONL of articles")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("runs/bench/engine.json"))
    args = parser.parse_args()
    unknown = set(args.cases) - set(CASES)
    if unknown:
        parser.error(f"there is no case {', '.join(sorted(unknown))}; choose from {', '.join(CASES)}")
    torch.set_num_threads(args.threads)
    setup = Setup(args)
    document: dict[str, Any] = {
        "machine": machine(),
        "arguments": {k: str(v) for k, v in vars(args).items()},
        "cases": {},
    }
    for name in args.cases or CASES:
        document["cases"][name] = found = CASES[name](setup)
        if "skipped" in found:
            print(f"{name}: skipped, {found['skipped']}", file=sys.stderr)
        write(args.out, document)


if __name__ == "__main__":
    main()
