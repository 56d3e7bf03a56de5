"""Every study behind docs/results.md, a run of `outrider bench` each: `python -m papers.studies [NAME ...]`.

Samples and report of a run lie in runs/bench/NAME, and it resumes. What the pages are made of goes to
papers/results/NAME.json: the same report without what no page shows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outrider.bench.metrics import looping
from outrider.bench.results import to_json
from outrider.bench.store import read_samples
from outrider.bench.types import PLAIN, Sample
from outrider.params import InputError

from . import contexts, oracles
from .document import Document
from .eagle2.runs import OBSERVED, TREES
from .measure import Study, run
from .rows import SPEEDS

ROOT = Path(__file__).resolve().parents[1]
RUNS, RESULTS = ROOT / "runs" / "bench", ROOT / "papers" / "results"
# Trees of a fixed size have s = 1, as in the papers; adaptive rows are what a user gets: s is fitted.
HASS, CHAIN = "HASS=eagle:demo/hass?scale=1", "HASS chain=eagle:demo/hass?tree=chain"
DRAFTERS = (
    "lookup@16x6", "draft model=model?scale=1@16x4", "Medusa=medusa:demo?scale=1@16x4",
    "EAGLE chain=eagle:demo?tree=chain@6x5",
    "Hydra=hydra:demo?scale=1@16x4", "EAGLE tree=eagle:demo?tree=static@26x5", "EAGLE-2=eagle:demo?scale=1@16x6",
    "EAGLE-2, 60 nodes=eagle:demo?scale=1@60x6", "EAGLE-2 without value=eagle:demo?value=false&scale=1@16x6",
    "EAGLE-2 without re-ranking=eagle:demo?rerank=false&scale=1@16x6", "EAGLE-2, rejection=eagle:demo@16x6@rejection",
    f"{HASS}@16x6", "HASS, scale fitted=eagle:demo/hass@16x6", f"{CHAIN}@6x5",
    "HASS, rejection=eagle:demo/hass@16x6@rejection", "EAGLE-3=eagle3:demo?scale=1@16x6",
    "HASS, adaptive=eagle:demo/hass@auto", "HASS chain, adaptive=eagle:demo/hass?tree=chain@auto",
    "EAGLE-3, adaptive=eagle3:demo@auto",
)  # fmt: skip
TYPICAL = tuple(f"typical?epsilon={e}&delta={d}" for e in (0.03, 0.09, 0.3) for d in (0.1, 0.3))
MEDUSA, TREE = "medusa:runs/demo/ablations/medusa/best", "runs/bench/ladder-tree.json"
LADDER = {
    "heads as a chain": "tree=chain", "Cartesian tree 3 x 2 x 1": "tree=static&shape=3,2,1",
    "optimised sparse tree": f"tree={TREE}", "dynamic tree": "tree=dynamic",
}  # fmt: skip

# Mambas beside Transformers as draft models, trees beside chains, a bandit beside fixed shapes.
LINE = "1,1,1,1,1"
PAPER = ("3,3,2,1", "3,2,2,1,1", "2,2,2,1,1,1")
SMALL = (LINE, "2,2,1,1")  # fewer nodes: what a pass of this machine has nearly for nothing
BANDITS = {"Mamba 1.5M, bandit of the paper's": PAPER, "Mamba 1.5M, bandit of all": (*PAPER, *SMALL, "none")}


def draft(name: str, stage: str = "distil") -> str:
    """The SPEC of a draft model of `recipes.mamba.drafters`."""
    return f"{'model' if name.startswith('llama') else 'mamba'}:runs/demo/mamba/{name}/{stage}/best"


CHAINS = {
    **{f"{k} {size}": draft(f"{k}-{size}".lower()) for size in ("0.5M", "1.5M") for k in ("Mamba", "Llama")},
    "Mamba 1.5M, pretrained": draft("mamba-1.5m", "pretrain"),
    "Mamba 1.5M, sft": draft("mamba-1.5m", "sft"),
    "Llama 1.5M, pretrained": draft("llama-1.5m", "pretrain"),
    "Mamba 0.5M, pretrained": draft("mamba-0.5m", "pretrain"),
}
MAMBAS = (
    *(f"{name}, chain={spec}@{LINE}" for name, spec in CHAINS.items()),
    *(f"Mamba of another tokenizer, {v}={draft('other', 'pretrain')}?vocab={v}@{LINE}" for v in ("text", "shared")),
    *(f"{name}, chain, rejection={CHAINS[name]}@{LINE}@rejection" for name in ("Mamba 1.5M", "Llama 1.5M")),
    f"Mamba 1.5M, 3,2,2,1,1, rejection={CHAINS['Mamba 1.5M']}@3,2,2,1,1@rejection",
    *(f"{name}, 16 nodes={CHAINS[name]}@16x6" for name in ("Mamba 1.5M", "Llama 1.5M")),
    *(f"{name}, adaptive={CHAINS[name]}@auto" for name in ("Mamba 1.5M", "Llama 1.5M")),
    *(f"Mamba 1.5M, {shape}={CHAINS['Mamba 1.5M']}@{shape}" for shape in (*PAPER, *SMALL) if shape != LINE),
    *(f"{name}={CHAINS['Mamba 1.5M']}@{' '.join(arms)}" for name, arms in BANDITS.items()),
)

# SmolLM2 where the papers measured. Four of its drafters are in the repository, the others are those that
# `recipes.smollm2.train` makes of 8 million tokens. (The stored EAGLE of `smollm2` and `smollm2_taus` was one of 8
# million, with 0.5 for the weight of the tokens' loss.)
SMOL_HASS, HEADS, SHIPS = "eagle:smollm2/hass", "medusa:smollm2/medusa", "eagle3:smollm2/eagle3"
EAGLE = "eagle:papers/eagle/drafter"
LLAMA, MAMBA, HYDRA, BLOCK, EAGLE3 = (
    f"{kind}:runs/smollm2/{folder}/best" for kind, folder in (
        ("model", "draft-lm"), ("mamba", "mamba"), ("hydra", "hydra"), ("block", "block"), ("eagle3", "eagle3"),
    )
)  # fmt: skip
DEFAULT = f"suffix + {SHIPS}"
OVER_CONTEXTS = {"Mamba": MAMBA, "Llama": LLAMA, "EAGLE": EAGLE}
NETWORKS = {  # what is measured with 16 nodes and with the automatic budget, by growing tokens a round
    "Llama": LLAMA, "Mamba": MAMBA, "Medusa": HEADS, "Hydra": HYDRA, "block": BLOCK, "EAGLE": EAGLE, "HASS": SMOL_HASS,
    "EAGLE-3": SHIPS, "suffix and EAGLE-3": DEFAULT,
}  # fmt: skip
BESIDE = {  # and other sizes of some
    "Llama": (f"Llama chain of 2={LLAMA}?tree=chain@3x2",),
    "Mamba": (f"Mamba, chain={MAMBA}@{LINE}", *(f"Mamba, {shape}={MAMBA}@{shape}" for shape in PAPER),
              f"Mamba, bandit of the paper's={MAMBA}@{' '.join(PAPER)}"),
    "HASS": (f"HASS chain of 1={SMOL_HASS}?tree=chain@2x1", f"HASS chain of 2={SMOL_HASS}?tree=chain@3x2",
             f"HASS, 4 nodes={SMOL_HASS}@4x3"),
    "EAGLE-3": (f"EAGLE-3 of 8 million tokens, 16 nodes={EAGLE3}@16x6", f"EAGLE-3, 4 nodes={SHIPS}@4x3"),
}  # fmt: skip
ADAPTIVE = {name: f"{name}, adaptive={spec}@auto" for name, spec in NETWORKS.items()}
REAL = (
    "lookup@auto", "suffix@auto", "lookahead@auto",
    *(m for name, spec in NETWORKS.items()
      for m in (*BESIDE.get(name, ()), f"{name}, 16 nodes={spec}@16x6", ADAPTIVE[name])),
)  # fmt: skip
REAL_TASKS = "mt-bench", "humaneval", "gsm8k", "alpaca", "cnn-dm@600", "natural-questions"
MANY = (
    ADAPTIVE["suffix and EAGLE-3"],
    *(f"suffix and EAGLE-3, {size[:2]} nodes={DEFAULT}@{size}" for size in ("16x6", "32x6")),
)
# Every network with 16 nodes: what it guesses, whatever the clock says. In batches, which change no text and no tree.
TAUS = tuple(
    f"{name}={spec}@16x6"
    for name, spec in {
        **{name: NETWORKS[name] for name in ("Llama", "Mamba", "Medusa", "Hydra", "block", "EAGLE")},
        "EAGLE-3 of 8 million tokens": EAGLE3, "HASS": SMOL_HASS, "EAGLE-3": SHIPS,
    }.items()
)  # fmt: skip
CONFIDENT = tuple(
    f"{name}{words}={spec}{options}" for name, spec in (("HASS", SMOL_HASS), ("Llama", LLAMA), ("Mamba", MAMBA))
    for words, options in (("", "?scale=1"), (" fitted", ""))
)  # fmt: skip


def trees(eagle: str) -> tuple[str, ...]:
    """EAGLE-2's own trees and those without its parts."""
    return tuple(f"{label}={template.format(eagle=eagle)}" for label, template in TREES.items())


def arm_of(shape: str) -> str:
    """The method that plays one arm of a bandit throughout."""
    return "none" if shape == "none" else f"Mamba 1.5M, {'chain' if shape == LINE else shape}"


EVAL = str(ROOT.parent / "shared" / "data" / "eval")  # the papers' prompts
PAPERS = Study("smollm2", weights="full", temperatures=(0.0, 1.0), tokens=64, limit=3, data=EVAL, tasks=REAL_TASKS)
SHORT = tuple(task for task in REAL_TASKS if not task.startswith("cnn-dm"))  # whose prompts take most of the time
COUNTED = replace(PAPERS, tokens=32, tasks=SHORT, peers=(), explain=False)  # tokens and rounds, no clock
BASE = Study("demo", tokens=32)
SIZES = ("8x4", "16x6", "32x7", "64x8")
# Medusa-2 learns from documents; or from what the target wrote to 720 questions, by self-distillation:
#   python -m papers.ablations.demo --own
#   outrider train medusa2 demo --data runs/demo/own/answered.jsonl --out runs/demo/medusa2-distilled --bf16 --lr 1e-3
#     --steps 240 --rows 4 --length 512 --warmup 20 --option heads=4 --option heads_only=60 --option ramp=60
#     --option distil=true
MEDUSA2 = {"medusa2": "runs/demo/medusa2/best", "medusa2_distilled": "runs/demo/medusa2-distilled/best"}
MIXTURE = "runs/demo/ablations/eagle_on_a_mixture_of_experts"
MIXED = replace(BASE, tasks=("demo",), tokens=64, limit=11, temperatures=(0.0,), peers=(), explain=False)
OWN = replace(BASE, tokens=64, limit=2, repeats=3)  # of the engine itself, beside transformers' own
STUDIES: dict[str, Study | Callable[[], Study]] = {
    "smollm2": replace(PAPERS, drafters=REAL, temperatures=(0.0, 0.6, 1.0), limit=5, peers=(
        "transformers", "transformers?lookup=10", f"transformers:{LLAMA.removeprefix('model:')}")),
    "smollm2_many": replace(PAPERS, drafters=MANY, limit=80, tokens=128, peers=(), explain=False),
    "smollm2_taus": replace(COUNTED, drafters=TAUS, limit=40, batch_sizes=(8,), tasks=REAL_TASKS),
    "smollm2_batches": replace(PAPERS, drafters=("suffix@auto", *ADAPTIVE.values(), *BESIDE["HASS"][1:]),
                               batch_sizes=(1, 4, 8), temperatures=(0.0, 0.6, 1.0), limit=8, peers=(), explain=False,
                               tasks=("mt-bench", "gsm8k"), keep_loops=True),
    # EAGLE's own chain and tree over batches, as in its Table 7.
    "eagle_batches": replace(PAPERS, temperatures=(0.0,), batch_sizes=(1, 2, 4, 8, 16, 32), limit=32, peers=(),
                             explain=False, tasks=("mt-bench",), keep_loops=True, drafters=tuple(
        f"{name}={EAGLE}?tree={tree}" for name, tree in
        (("chain", "chain@6x5"), ("short chain", "chain@3x2"), ("tree", "static@26x5")))),
    # EAGLE-2 without its parts, its confidences, and acceptance by position.
    "eagle2_trees": replace(PAPERS, tokens=96, limit=7, batch_sizes=(5,), peers=(), explain=False, observe=OBSERVED,
                            drafters=trees(EAGLE)),
    "eagle2_trees_demo": replace(BASE, tokens=64, limit=13, batch_sizes=(3,), temperatures=(0.0, 1.0), peers=(),
                                 explain=False, observe=OBSERVED, drafters=trees("eagle:demo")),
    # Spec-Bench's summaries and questions with passages, where text is copied.
    "smollm2_summaries": replace(PAPERS, tasks=("spec-bench/summarisation@600", "spec-bench/retrieval@600"), peers=(),
                                 drafters=("lookup", "suffix", "lookup and suffix=lookup + suffix",
                                           f"suffix and EAGLE-3={DEFAULT}", f"EAGLE-3={SHIPS}"),
                                 budgets=("16x6", "auto"), temperatures=(0.0,), limit=4, keep_loops=True),
    "smollm2_variants": replace(PAPERS, drafters=(f"HASS={SMOL_HASS}",), temperatures=(0.0,), explain=False,
                                variants=("eager", "plain", "int8", "native")),
    "smollm2_confidence": replace(COUNTED, drafters=CONFIDENT, rules=("coupled", "rejection"), budgets=("16x6",),
                                  tasks=SHORT[1:], observe=("all",)),
    "drafters": replace(BASE, drafters=DRAFTERS, peers=("transformers", "transformers:demo"),
                        temperatures=(0.0, 1.0), limit=11),
    "batches": replace(BASE, drafters=(f"{HASS}@16x6", f"{CHAIN}@6x5", "lookup@16x6"), batch_sizes=(1, 2, 4, 8),
                       tasks=("demo/gsm8k", "demo/oasst", "demo/self-dialogue"), limit=16, memory=1.0,
                       keep_loops=True, variants=("eager",)),
    "sizes": replace(BASE, drafters=(HASS,), budgets=("4x3", "8x4", "16x6", "32x6", "60x6"), temperatures=(0.0, 1.0),
                     limit=4, observe=("all",)),
    "blocks": replace(BASE, drafters=("block=block:demo?scale=1", HASS, "EAGLE-3=eagle3:demo?scale=1"),
                      budgets=SIZES, temperatures=(0.0, 0.6, 1.0), limit=3,
                      tasks=("demo/gsm8k", "demo/oasst", "demo/self-dialogue"), keep_loops=True, peers=()),
    "grafts": replace(BASE, drafters=("block=block:demo", "lookup and block=lookup + block:demo",
                                      "suffix and block=suffix + block:demo"),
                      budgets=("8x4", "16x6", "32x7"), temperatures=(0.0, 1.0), tokens=64, limit=4, peers=(),
                      tasks=("cnn-dm@600", "demo/stdlib", "demo/algorithms"), data=EVAL, keep_loops=True),
    "variants": replace(BASE, drafters=("lookup@16x6", f"{HASS}@16x6"), limit=2,
                        variants=("eager", "plain", "int8"),
                        peers=("transformers", "transformers?cache=static", "transformers?lookup=10")),
    "temperatures": replace(BASE, drafters=(f"{HASS}@16x6", f"{CHAIN}@6x5"), rules=("coupled", "rejection", "typical"),
                            temperatures=(0.0, 0.3, 0.6, 1.0), limit=3),
    # What one of many tests refused (p 0.0002 of 4,435 tokens), with another seed and more tokens.
    "smollm2_distributions": replace(PAPERS, tokens=96, temperatures=(1.0,), limit=20, batch_sizes=(5,), seed=1,
                                     peers=(), explain=False, drafters=(
        f"16x5 without both={EAGLE}?scale=1&nodes=61&value=false&rerank=false@16x5@rejection",)),
    # Sampled under `rejection`.
    "demo_distributions": replace(BASE, tokens=256, temperatures=(1.0,), limit=23, batch_sizes=(23,), peers=(),
                    explain=False, keep_loops=True, drafters=tuple(f"{name}={spec}@rejection" for name, spec in (
                        ("chain of 5", "model?tree=chain@6x5"), ("sampled tree", "model@3,2,1"),
                        ("dynamic tree", "eagle:demo?scale=1@16x5"),
                        ("dynamic tree without both", "eagle:demo?scale=1&value=false&rerank=false@16x5")))),
    "calibration": replace(BASE, drafters=tuple(f"{label}={spec}" for label, spec in (
                               ("hass", "eagle:demo/hass?scale=1"), ("hass fitted", "eagle:demo/hass"),
                               ("eagle", "eagle:demo?scale=1"), ("eagle fitted", "eagle:demo"),
                               ("model", "model?scale=1"), ("model fitted", "model"))),
                           budgets=("16x6",), rules=("coupled", "rejection"), temperatures=(0.0, 1.0), limit=13,
                           observe=("all",), peers=()),
    "typical": replace(BASE, drafters=("Medusa=medusa:demo?scale=1@16x4",), temperatures=(0.7,),
                       rules=("coupled", *TYPICAL), limit=3),
    "ladder": replace(BASE, drafters=tuple(f"{name}={MEDUSA}?{tree}@16x4" for name, tree in LADDER.items()), limit=9,
                      temperatures=(0.0, 1.0), keep_loops=True, judge="demo", peers=()),
    **{name: replace(BASE, model=f"{heads}/target", drafters=(f"Medusa-2=medusa:{heads}@16x4",),
                     tasks=("demo",), limit=9, temperatures=(0.0, 1.0), keep_loops=True, judge="demo", peers=())
       for name, heads in MEDUSA2.items()},
    # EAGLE on the demo target and on the mixture that `papers.ablations.moe` makes of it, the same trainings of both.
    "dense": replace(MIXED, drafters=("EAGLE=eagle:runs/demo/ablations/eagle/best?scale=1@16x6",)),
    "mixture": replace(MIXED, model=f"{MIXTURE}/target", drafters=(f"EAGLE=eagle:{MIXTURE}/best?scale=1@16x6",)),
    "mamba": replace(BASE, drafters=MAMBAS, temperatures=(0.0, 1.0), limit=13, peers=()),
    "mamba_calibration": replace(BASE, drafters=tuple(f"{label}={CHAINS[f'{kind} 1.5M']}" for label, kind in (
                                     ("mamba", "Mamba"), ("transformer", "Llama"))), budgets=("16x6",),
                                 temperatures=(0.0, 1.0), limit=13, observe=("all",), peers=()),
    **{f"context_{n}": contexts.study(n, CHAINS) for n in contexts.LENGTHS},
    **{f"smollm2_context_{n}": contexts.smollm2(n, OVER_CONTEXTS) for n in contexts.LENGTHS},
    "t5": Study("runs/t5/larger", ("T5=model:runs/t5/smaller?tree=chain",), ("runs/t5/heldout.jsonl",), (0.0, 1.0),
                rules=("rejection", "coupled"), budgets=("4x3", "6x5", "8x7"), peers=(), tokens=40, limit=12, repeats=3,
                 dtype="float32", keep_loops=True),
    "engine": replace(OWN, drafters=("model", "model chain 5=model?tree=chain@6x5", "model@8x3",
                                     "model (3,2,2,1,1)=model?tree=static@64x5"),
                      peers=("transformers", "transformers:demo"), variants=("eager", "plain")),
    "summaries": replace(OWN, tasks=("cnn-dm@800",), data=EVAL, limit=6,
                         drafters=("lookup", "suffix"), variants=("eager", "plain"),
                         peers=("transformers", "transformers?lookup=10")),
    "untrained": replace(OWN, drafters=("lookup@16x8", "suffix@16x8", "ngram@16x5", "lookahead@16x5", "model@16x5"),
                         variants=("eager",), peers=()),
    # "plain top-k" drafts the likeliest tokens, as EAGLE-2 does, judged as point masses by rejection.
    "rules": replace(OWN, temperatures=(1.0,), variants=("eager",), peers=(), drafters=(
        "coupled=model@16x4", "plain top-k=model@16x4@rejection",
        *(f"{rule} (3,1,1,1)=model@3,1,1,1@{rule}" for rule in ("coupled", "rejection")),
        *(f"{rule} chain=model?tree=chain@5x4@{rule}" for rule in ("coupled", "rejection", "block")))),
    "oracle": oracles.study,
}  # fmt: skip
# Run beside other work: their times say nothing, and are not kept.
UNTIMED = ("smollm2_confidence", "smollm2_taus", "eagle2_trees", "eagle2_trees_demo")
# Kept of reliabilities.
BINS = "calibration", "smollm2_confidence", "eagle2_trees", "eagle2_trees_demo", "mamba_smollm2", "mamba_demo"
# Of these, pages show means over tasks alone.
MEANS = ("blocks", "smollm2_batches", "smollm2_summaries", "grafts")
TIMES = ("tokens_per_second", "speedup", "speedup_with_prefill", "over_stock", "prefill_ms", "round_ms")
UNSHOWN = ("faults", "reason", "prompt_tokens", "new_tokens", "label", "peer", "divergences")


Setting = tuple[str, float, int]  # task, temperature, batch size


def by_prompt(samples: Iterable[Sample], document: Document) -> dict[str, dict[str, list[list[int]]]]:
    """[tokens, rounds] of each batch of prompts by method and temperature, for comparisons in pairs: of the prompts
    that the figures over all tasks count. Those whose plain text repeats itself are not, nor those of an earlier run
    that were more.

    Args:
        samples: of the run's folder.
        document: its report.
    """
    given = document.run.arguments
    plain = next((c.method for c in document.cells if c.spec == PLAIN), "")
    limit, loops = given.get("limit"), given.get("keep_loops", False)
    there = [s for s in samples if limit is None or s.chunk < -(-limit // s.batch)]
    texts: dict[Setting, dict[int, bool]] = {}  # of plain decoding, by their prompts: does it repeat itself?
    for one in (s for s in there if s.method == plain):
        of = texts.setdefault((one.task, one.temperature, one.batch), {})
        of[one.digest] = of.get(one.digest, False) or (not loops and looping(one))
    calm = {setting: [d for d, repeats in of.items() if not repeats] for setting, of in texts.items()}
    whole = {t for _, t, _ in texts if not any(of for (_, other, _), of in calm.items() if other == t)}
    collected: dict[str, dict[str, dict[int, list[int]]]] = {}
    for one in there:
        setting = (one.task, one.temperature, one.batch)
        counted = texts.get(setting, {}) if one.temperature in whole else calm.get(setting, ())
        if one.repeat or one.digest not in counted:
            continue
        usages = [usage for turn in one.turns for usage in turn.usages]
        mine = collected.setdefault(one.method, {}).setdefault(f"{one.temperature:g}", {})
        mine[one.digest] = [sum(u.new_tokens - 1 for u in usages), sum(u.rounds for u in usages)]
    return {m: {t: [counts[key] for key in sorted(counts)] for t, counts in of.items()} for m, of in collected.items()}


def kept(
    document: Document, name: str, taus: Mapping[str, Any] = MappingProxyType({}), timed: bool = True
) -> dict[str, Any]:
    """A report without what no page shows, and without the folders of the machine; a method goes by its label or SPEC
    alone where no other has the same. `timed`: its times are kept."""
    report: dict[str, Any] = to_json(document)
    for folder in ("data", "out"):
        report["run"]["arguments"].pop(folder, None)
    short = {name: cell.label or cell.spec for name, cell in document.methods.items()}
    often = Counter(short.values())
    if taus:  # of `by_prompt`; a folder may hold methods that this run leaves out
        ours = {m: of for m, of in taus.items() if m in short}
        report["run"]["methods"] = {short[m] if often[short[m]] == 1 else m: of for m, of in ours.items()}
    for part in ("cells", "macro", "pooled", "explain", "capacity"):
        for row in report[part]:
            row["method"] = short[row["method"]] if often[short[row["method"]]] == 1 else row["method"]
            for time in () if timed else TIMES:
                row.pop(time, None)
    cells = [{k: v for k, v in c.items() if k not in UNSHOWN} for c in report["cells"]]
    cells = [] if name in MEANS else cells
    report["cells"] = [{k: v for k, v in c.items() if v not in (None, [], {})} for c in cells]
    for cell in report["cells"]:
        if name != "t5":
            cell.pop("theory", None)
        if "positions" in cell:
            few = [{k: v for k, v in p.items() if k != "counts"} for p in cell["positions"][:3]]
            cell["positions"] = cell["positions"] if cell["method"] == "positions" else few
        if "reliability" in cell and name.removesuffix(SPEEDS) not in BINS:
            cell["reliability"].pop("bins")
    return report


def commit() -> str:
    """The commit that is checked out."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip()


def write(name: str, document: dict[str, Any]) -> None:
    """Store a report of `kept`, with the commit that is checked out."""
    document["run"]["machine"]["commit"] = commit()
    path = RESULTS / f"{name}.json"
    text = json.dumps(document, separators=(",", ":")).replace('{"task"', '\n{"task"')
    path.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(STUDIES)}")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    unknown = [n for n in args.names if n not in STUDIES]
    if unknown:
        parser.error(f"there is no study {unknown[0]}; choose from {', '.join(STUDIES)}")
    for name in args.names or STUDIES:
        study = STUDIES[name]
        config = replace(study() if callable(study) else study, threads=args.threads, out=RUNS / name)
        try:
            document = run(config, **oracles.parts(config) if name == "oracle" else {})
        except InputError as error:
            parser.error(f"{name}: {error}")
        taus = by_prompt(read_samples(RUNS / name), document) if name in UNTIMED else {}
        write(name, kept(document, name, taus, timed=name not in UNTIMED))


if __name__ == "__main__":
    main()
