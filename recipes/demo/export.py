"""Checkpoint -> a stock Hugging Face folder in bf16 beside its tokenizer, and the held-out prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from recipes.demo.config import RECIPES, Recipe
from recipes.demo.data import SOURCES, Document, documents
from recipes.demo.net import stock_config
from recipes.demo.tokenizer import build
from recipes.demo.train import load

PROMPTS, PROMPT_CHARACTERS, REFERENCE_CHARACTERS = 20, 1000, 1000
KINDS = {
    "gsm8k": "maths",
    "oasst": "chat",
    "self_dialogue": "chat",
    "sgd": "booking",
    "stdlib": "code",
    "algorithms": "code",
    "tldr": "help",
    "stories": "stories",
    "books": "stories",
}


def stock_model(recipe: Recipe, work: Path, tokenizer) -> LlamaForCausalLM:
    """The trained weights in a stock model, in bf16."""
    marks = {f"{k}_token_id": getattr(tokenizer, f"{k}_token_id") for k in ("bos", "eos", "pad")}
    model = LlamaForCausalLM(stock_config(recipe, **marks))
    missing, unexpected = model.load_state_dict(load(recipe, work).stock_state(), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"The checkpoint does not fit the stock model: {missing}, {unexpected}.")
    model.tie_weights()
    model = model.to(torch.bfloat16).eval()
    model.generation_config = GenerationConfig(do_sample=False, **marks)
    return model


def prompt(document: Document, turn: int = 0) -> dict | None:
    """A held-out document as a prompt and the words that followed; None where nothing can be asked.

    Of a dialogue: everything up to a user's turn (the last one before 60 % of the turns), and the reply. Of a text:
    its first lines, about a third and at most 1,000 characters, and the rest up to 1,000 characters.
    """
    if document.messages:
        replies = [i for i, (role, _) in enumerate(document.messages) if role == "assistant" and i]
        early = [i for i in replies if i <= max(1, round(0.6 * len(document.messages)))]
        if not early:
            return None
        last = early[-1]
        while last > 2 and sum(len(w) for _, w in document.messages[:last]) > 2 * PROMPT_CHARACTERS:
            last -= 2
        asked = [{"role": r, "content": w} for r, w in document.messages[:last]]
        return {"messages": asked, "reference": document.messages[last][1]}
    text, aim = document.text, min(PROMPT_CHARACTERS, len(document.text) // 3)
    least = min(200, len(text) // 2)  # of what followed
    cut = text.find("\n", aim) + 1
    if not 40 <= cut <= 2 * PROMPT_CHARACTERS or len(text) - cut < least:
        cut = text.find(" ", aim)  # a text of one line; the space belongs to the next word
    if cut < 40 or len(text) - cut < least:
        return None
    return {"text": text[:cut], "reference": text[cut : cut + REFERENCE_CHARACTERS]}


def write_heldout(data: Path, work: Path, path: Path) -> None:
    """`heldout.jsonl`: up to 20 prompts per domain, no two of one group where there are enough groups."""
    licences = {row["file"]: row["licence"] for row in json.loads((data / "SOURCES.json").read_text())}
    rows = []
    for domain, source in SOURCES.items():
        ranked: dict[str, int] = {}
        ordered = []
        for d in documents(work, "heldout", domain):
            ranked[d.group] = ranked.get(d.group, 0) + 1
            ordered.append((ranked[d.group], d))
        ordered.sort(key=lambda pair: pair[0])
        seen: set[str] = set()
        for _, d in ordered:
            row = prompt(d)
            key = json.dumps((row or {}).get("messages") or (row or {}).get("text"))
            if row and len(seen) < PROMPTS and key not in seen:
                name = {"id": f"{domain}-{len(seen)}", "domain": domain, "kind": KINDS[domain]}
                rows.append({**name, **row, "licence": licences[source.file].split(" (")[0]})
                seen.add(key)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def export(data: Path, work: Path, package: Path, names: tuple[str, ...] = tuple(RECIPES)) -> None:
    """Writes the package data: one folder per model and `heldout.jsonl`."""
    tokenizer = build(work)
    package.mkdir(parents=True, exist_ok=True)
    write_heldout(data, work, package / "heldout.jsonl")
    for name in names:
        folder = package / name
        stock_model(RECIPES[name], work, tokenizer).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(work / "tokenizer" / file, folder / file)
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner alone
    size = sum(f.stat().st_size for f in package.rglob("*") if f.is_file())
    print(f"{package.name}: {size / 1e6:.1f} MB")
