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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as Shown
from transformers import LlamaConfig, LlamaForCausalLM

from measure import Given, answer, heldout, machine, measured, rates, spread, write
from oracle import OracleDrafter
from outrider import drafters
from outrider.bench import metrics
from outrider.bench.metrics import LOOP_SHARE, Table
from outrider.bench.models import Models
from outrider.bench.peers.outrider import Ours
from outrider.bench.types import Method, Peer, Sample
from outrider.budgets.adaptive import AdaptiveBudget
from outrider.llm import LLM
from outrider.targets import load_target

ARTICLE = 800  # tokens of an article, so that the demo target's context holds article and summary


def ours(label: str, spec: str = "", budget: str = "auto", rule: str = "coupled") -> Method:
    """A label that ends in "compiled" asks for recorded passes."""
    variant = "plain" if label.endswith(", compiled") else "eager"
    return Method(spec or label.removesuffix(", compiled"), rule, budget, variant, label=label)


def stock(label: str, spec: str = "transformers") -> Method:
    return Method(spec, peer="transformers", label=label)


@dataclass(frozen=True)
class Case:
    """Methods that take turns; ratios are to the baseline."""

    baseline: str
    methods: tuple[Method, ...]
    temperature: float = 0.0
    peers: dict[str, Peer] = field(default_factory=dict)  # by label: methods that no SPEC can name


TRANSFORMERS, NONE = stock("transformers"), ours("none")
CASES = {
    "none": Case("transformers", (TRANSFORMERS, NONE, ours("none, compiled"))),
    "model": Case(
        "assisted",
        (
            TRANSFORMERS, stock("assisted", "transformers:demo"), NONE, ours("model"),
            ours("model chain 5", "model?tree=chain", "6x5"), ours("model (3,2,2,1,1)", "model?tree=static", "64x5"),
            ours("none, compiled"), ours("model, compiled"), ours("model, 8 nodes, compiled", "model", "8x3"),
        ),
    ),
    "lookup": Case(
        "stock lookup",
        (
            TRANSFORMERS, stock("stock lookup", "transformers?lookup=10"), NONE, ours("lookup"), ours("suffix"),
            ours("none, compiled"), ours("lookup, compiled"), ours("suffix, compiled"),
        ),
    ),
    "overhead": Case(
        "none",
        (
            NONE, *(ours(name, name, "16x8") for name in ("lookup", "suffix")),
            *(ours(name, name, "16x5") for name in ("ngram", "lookahead", "model")),
        ),
    ),
    # "plain top-k" drafts the likeliest tokens, as EAGLE-2 does, judged as point masses by rejection.
    "rules": Case(
        "none",
        (
            NONE, ours("coupled", "model", "16x4"), ours("plain top-k", "model", "16x4", "rejection"),
            *(ours(f"{rule} (3,1,1,1)", "model", "3,1,1,1", rule) for rule in ("coupled", "rejection")),
            *(ours(f"{rule} chain", "model?tree=chain", "5x4", rule) for rule in ("coupled", "rejection", "block")),
        ),
        1.0,
    ),
}  # fmt: skip


def articles(models: Models, path: Path, count: int) -> Given:
    """Articles to be summarised."""
    llm, ids = models.llm(), {}
    if not path.is_file():
        return {}
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines()[:count]):
        cut = llm.tokenizer(text_of(json.loads(line)))["input_ids"][:ARTICLE]
        body = llm.tokenizer.decode(cut, skip_special_tokens=True)
        ids[f"article {i}"] = llm.encode([{"role": "user", "content": body + "\n\nSummarize the article above."}])
    return ids


def text_of(item: dict[str, Any]) -> str:
    for key in ("article", "text", "prompt", "document", "input"):
        if isinstance(item.get(key), str):
            return str(item[key])
    return str(item["turns"][0] if "turns" in item else item["messages"][0]["content"])


def adversary(models: Models, given: Given, tokens: int) -> Case:
    """A drafter that is always wrong: it may cost something while the budget learns, and nothing after."""
    llm = models.llm()
    answers = {tuple(ids): answer(llm.engine(), ids, tokens + 16, llm.eos).tokens[0] for ids in given.values()}
    wrong = replace(llm.engine(budget=AdaptiveBudget()), drafter=OracleDrafter(answers, 0.0, llm.target.vocab))
    for ids in given.values():
        answer(wrong, ids, tokens, llm.eos)  # it adapts
    return Case("none", (NONE, ours("always wrong")), peers={"always wrong": Ours(wrong)})


def oracle(tokens: int) -> tuple[Models, Given, Case]:
    """About 100M parameters, random weights: its own greedy text is the answer that the oracle knows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=1024, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    llm = LLM(load_target(LlamaForCausalLM(config).eval()), None, drafters.load("none"))
    models = Models("a random Llama", loaded={"eager": llm}, drafted={("eager", "none"): llm})
    given = {f"random {i}": torch.randint(0, llm.target.vocab, (32,)).tolist() for i in range(2)}
    answers = {tuple(ids): answer(llm.engine(), ids, tokens + 16, llm.eos).tokens[0] for ids in given.values()}
    peers: dict[str, Peer] = {
        f"alpha {a}": Ours(
            replace(llm.engine(budget=AdaptiveBudget()), drafter=OracleDrafter(answers, a, llm.target.vocab))
        )
        for a in (0.0, 0.5, 0.7, 0.8, 0.9, 1.0)
    }
    return models, given, Case("none", (NONE, TRANSFORMERS, *map(ours, peers)), peers=peers)


def summary(found: dict[str, list[Sample]], baseline: str) -> dict[str, Any]:
    """Rates and ratios over all prompts and over those whose baseline text does not loop."""
    every = sorted({s.chunk for s in found[baseline]})
    truth = Table.of(found[baseline], every).samples[0]
    calm = [s.chunk for s in truth if not metrics.looping(s)]
    made: dict[str, Any] = {"prompts": len(every), "not_looping": len(calm), "loop_share": LOOP_SHARE, "methods": {}}
    for name, mine in found.items():
        table = Table.of(mine, every)
        made["methods"][name] = {
            **{
                key: figures(Table.of(mine, keep), Table.of(found[baseline], keep))
                for key, keep in (("all", every), ("not_looping", calm))
                if keep
            },
            "same_text": sum(
                a.turns[0].tokens == b.turns[0].tokens for a, b in zip(table.samples[0], truth, strict=True)
            ),
            "shares": shares(table),
        }
    return made


def figures(mine: Table, base: Table) -> dict[str, Any]:
    usages = mine.usages()
    whole = mine.map(lambda s: len(s.turns[0].tokens[0])).sum(1) / mine.map(lambda s: s.turns[0].seconds).sum(1)
    return {
        "tokens_per_second": spread(rates(mine)),
        "whole_tokens_per_second": spread(whole.tolist()),
        "speedup": spread([a / b for a, b in zip(rates(mine), rates(base), strict=True)]),
        "tau": metrics.tau(usages).value if usages else None,
    }


def shares(table: Table) -> dict[str, float] | None:
    """Where the decoding time of all repeats went: draft, verify, overhead."""
    if not table.usages():
        return None
    ms = vars(metrics.round_ms([s.turns[0].usages for run in table.samples for s in run]))
    return {name: part / sum(ms.values()) for name, part in ms.items()}


def show(title: str, found: dict[str, Any], baseline: str) -> None:
    table = Shown(title=f"{title} ({found['not_looping']} of {found['prompts']} prompts do not loop)")
    names = ("tokens/s", f"x {baseline}", "spread", "x not looping", "tau", "tau n.l.", "overhead", "same")
    for column in ("method", *names):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, row in found["methods"].items():
        a, c = row["all"], row.get("not_looping", row["all"])
        tau = ["" if r["tau"] is None else f"{r['tau']:.2f}" for r in (a, c)]
        table.add_row(
            name, f"{a['tokens_per_second']['median']:.0f}", f"{a['speedup']['median']:.2f}",
            f"{a['speedup']['min']:.2f}-{a['speedup']['max']:.2f}", f"{c['speedup']['median']:.2f}", *tau,
            f"{row['shares']['overhead']:.1%}" if row["shares"] else "", f"{row['same_text']}/{found['prompts']}",
        )  # fmt: skip
    Console().print(table)


def run(name: str, args: argparse.Namespace, models: Models) -> dict[str, Any]:
    """One case, measured and shown."""
    folder, tokens, given = args.out.stem, args.tokens, heldout(models.llm(), args.per_domain)
    if name == "lookup":
        given = articles(models, args.summarisation, args.articles)
        if not given:
            return {"skipped": f"there are no articles at {args.summarisation}; give --summarisation FILE"}
    if name == "oracle":
        folder, tokens = f"{folder}-oracle", min(tokens, 64)
        models, given, case = oracle(tokens)
    else:
        case = adversary(models, given, tokens) if name == "adversary" else CASES[name]
    samples = measured(
        folder, models, name, given, case.methods, case.temperature, tokens, args.repeats, case.peers
    )  # fmt: skip
    found = summary(samples, case.baseline)
    show(name, found, case.baseline)
    return found


def main() -> None:
    names = [*CASES, "adversary", "oracle"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--per-domain", type=int, default=3, help="held-out prompts of each domain")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--articles", type=int, default=12)
    parser.add_argument(
        "--summarisation", type=Path, default="../shared/data/eval/cnn_dm_200.jsonl", help="JSONL of articles"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("runs/bench/engine.json"))
    args = parser.parse_args()
    unknown = sorted(set(args.cases) - set(names))
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; choose from {', '.join(names)}")
    torch.set_num_threads(args.threads)
    models = Models()
    arguments = {k: str(v) for k, v in vars(args).items()}
    document: dict[str, Any] = {"machine": machine(), "arguments": arguments, "cases": {}}
    for name in args.cases or names:
        document["cases"][name] = found = run(name, args, models)
        if "skipped" in found:
            print(f"{name}: skipped, {found['skipped']}", file=sys.stderr)
        write(args.out, document)


if __name__ == "__main__":
    main()
