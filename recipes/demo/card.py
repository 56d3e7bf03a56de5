"""Held-out losses, the draft's agreement with the target, unselected samples: the two model cards.

Everything is measured on the exported folders through stock transformers in float32, as the library
runs them, on documents that training never saw.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.demo.config import BETA2, DECAY, MUON_MOMENTUM, RECIPES
from recipes.demo.data import SOURCES, Schedule, documents, encode

WINDOW, SAMPLE_TOKENS = 1024, 96
LICENCE = "cc-by-sa-4.0"  # the one share-alike source asks for it; the others are met by the notices below


@dataclass
class Score:
    """Sums over the held-out tokens of one domain."""

    tokens: int = 0
    text_bytes: int = 0
    target: float = 0.0  # nats
    draft: float = 0.0
    same: int = 0  # positions where both models have the same first choice
    alpha: float = 0.0  # sum of min(p, q): the chance that a draft at temperature 1 is accepted

    def add(self, other: Score) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def row(self) -> dict[str, float]:
        """Loss in nats per token, bits per byte of text, and the agreement of the two models."""
        n, bits = self.tokens, 1 / math.log(2) / self.text_bytes
        return {
            "tokens": n,
            "loss": self.target / n,
            "bits_per_byte": self.target * bits,
            "draft_loss": self.draft / n,
            "draft_bits_per_byte": self.draft * bits,
            "same_first_choice": self.same / n,
            "alpha": self.alpha / n,
        }


@torch.no_grad()
def score(target, draft, ids: list[int], text_bytes: int) -> Score:
    """One document; a long one is read in windows of 1,024 tokens, each scored from its own start."""
    total = Score(text_bytes=text_bytes)
    for start in range(0, len(ids) - 1, WINDOW):
        x = torch.tensor([ids[start : start + WINDOW + 1]])
        labels = x[0, 1:, None]
        p, q = (m(x[:, :-1], use_cache=False).logits[0].log_softmax(-1) for m in (target, draft))
        total.add(
            Score(
                tokens=len(labels),
                target=-p.gather(1, labels).sum().item(),
                draft=-q.gather(1, labels).sum().item(),
                same=int((p.argmax(-1) == q.argmax(-1)).sum()),
                alpha=torch.minimum(p.exp(), q.exp()).sum().item(),
            )
        )
    return total


def evaluate(work: Path, package: Path, limit: int | None = None) -> dict[str, dict[str, float]]:
    """`results.json` of the work folder: domain -> measurements on all its held-out documents."""
    tokenizer = AutoTokenizer.from_pretrained(package / "target")
    target, draft = (
        AutoModelForCausalLM.from_pretrained(package / n, dtype=torch.float32).eval() for n in ("target", "draft")
    )
    rows, every = {}, Score()
    for domain in SOURCES:
        total = Score()
        for i, document in enumerate(documents(work, "heldout", domain)):
            if limit is None or i < limit:
                words = [w for _, w in document.messages] or [document.text]
                total.add(score(target, draft, encode(tokenizer, document), sum(len(w.encode()) for w in words)))
        rows[domain] = total.row()
        every.add(total)
        print(domain, json.dumps(rows[domain]), flush=True)
    rows["all"] = every.row()
    (work / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
    return rows


def first_prompts(package: Path) -> list[dict]:
    """The first held-out prompt of each domain, in file order: nobody chose them."""
    rows: dict[str, dict] = {}
    for line in (package / "heldout.jsonl").read_text(encoding="utf-8").split("\n"):
        if line:
            row = json.loads(line)
            rows.setdefault(row["domain"], row)
    return list(rows.values())


@torch.no_grad()
def samples(folder: Path, prompts: list[dict], seed: int = 1) -> str:
    """One continuation per prompt at temperature 0 and one at 0.8, as markdown."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parts = []
    for row in prompts:
        text = row.get("text") or tokenizer.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens="text" in row)["input_ids"]
        shown = row.get("text") or "\n".join(f"{m['role']}: {m['content']}" for m in row["messages"])
        parts.append(f"**{row['id']}**\n\n" + fenced(shown[-700:].lstrip("\n")))
        for name, options in (("T = 0", {"do_sample": False}), ("T = 0.8", {"do_sample": True, "temperature": 0.8})):
            torch.manual_seed(seed)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=SAMPLE_TOKENS, top_k=0, top_p=1.0, **options
            )
            parts.append(f"{name}:\n\n" + fenced(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)))
    return "\n\n".join(parts)


def fenced(text: str) -> str:
    return "~~~~text\n" + text.replace("~~~~", "~ ~ ~ ~").rstrip("\n") + "\n~~~~"


def table(rows: dict[str, dict[str, float]], name: str) -> str:
    mark = "" if name == "target" else "draft_"
    lines = ["| domain | held-out tokens | loss, nats/token | bits per byte |", "|---|--:|--:|--:|"]
    for domain, r in rows.items():
        label = f"**{domain}**" if domain == "all" else domain
        lines.append(f"| {label} | {r['tokens']:,} | {r[mark + 'loss']:.3f} | {r[mark + 'bits_per_byte']:.3f} |")
    return "\n".join(lines)


def agreement(rows: dict[str, dict[str, float]]) -> str:
    lines = ["| domain | same first choice | alpha at T = 1 |", "|---|--:|--:|"]
    lines += [f"| {d} | {100 * r['same_first_choice']:.1f} % | {r['alpha']:.3f} |" for d, r in rows.items()]
    return "\n".join(lines)


def sources(data: Path, work: Path, steps: int, per_step: int) -> str:
    """Data, licences and how often each source was read."""
    total, shares = steps * per_step, sum(s.share for s in SOURCES.values())
    described = {row["file"]: row for row in json.loads((data / "SOURCES.json").read_text())}
    lines = ["| domain | source | licence | share | epochs |", "|---|---|---|--:|--:|"]
    for domain, source in SOURCES.items():
        row, size = described[source.file], (work / "tokens" / f"{domain}.bin").stat().st_size / 2
        part = source.share / shares
        place = "the standard library of CPython 3.11.7" if "cpython" in source.file else row["repo"]
        licence = row["licence"].split(" (")[0]
        lines.append(f"| {domain} | {place} | {licence} | {100 * part:.0f} % | {part * total / size:.1f} |")
    return "\n".join(lines)


def write_cards(data: Path, work: Path, package: Path) -> None:
    rows = evaluate(work, package)
    began = time.monotonic()
    template = (Path(__file__).parent / "card.md").read_text(encoding="utf-8")
    for name, recipe in RECIPES.items():
        step = torch.load(work / name / "checkpoint.pt", weights_only=True)["step"]
        per_step = recipe.blocks * Schedule.BLOCK
        weights = AutoModelForCausalLM.from_pretrained(package / name)
        about = (
            "A small language model, deep and thin, for demonstrating and testing speculative decoding on any machine."
            if name == "target"
            else "The draft model beside the demo target: same tokenizer, same data; it guesses what the target writes."
        )
        how = (
            "Every step learnt the text's next token."
            if not recipe.teacher
            else (
                f"The first {100 * (1 - recipe.taught):.0f} % of the steps learnt the text's next token, the rest the "
                f"target's whole distribution at each position."
            )
        )
        card = template.format(
            name=name,
            about=about,
            how=how,
            licence=LICENCE,
            recipe=recipe,
            parameters=f"{weights.num_parameters():,}",
            tokens=f"{step * per_step / 1e6:.1f}M",
            steps=f"{step:,}",
            per_step=f"{per_step:,}",
            muon=MUON_MOMENTUM,
            beta2=BETA2,
            decay=DECAY,
            losses=table(rows, name),
            agreement=agreement(rows),
            sources=sources(data, work, step, per_step),
            samples=samples(package / name, first_prompts(package)),
        )
        (package / name / "README.md").write_text(card, encoding="utf-8")
    print(f"cards written in {time.monotonic() - began:.0f} s")
