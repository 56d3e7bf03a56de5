"""Trains one T5 of the pair: Muon for matrices, AdamW for the rest; resumable, deterministic by seed."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration

from recipes.t5.pairs import Pairs, collate


@dataclass(frozen=True)
class Recipe:
    name: str
    hidden: int
    inner: int
    layers: int  # of the encoder, and again of the decoder
    heads: int
    head_dim: int
    steps: int
    rows: int = 32
    warmup: int = 50
    cooldown: float = 0.3
    matrix_rate: float = 4e-3
    other_rate: float = 4e-3
    seed: int = 1

    def rate(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup, (self.steps - step) / (self.cooldown * self.steps))


LARGER = Recipe("larger", hidden=192, inner=320, layers=4, heads=3, head_dim=64, steps=500)
SMALLER = Recipe("smaller", hidden=96, inner=192, layers=2, heads=2, head_dim=48, steps=500)


def network(recipe: Recipe, tokenizer) -> T5ForConditionalGeneration:
    """A freshly drawn stock model; the decoder starts with the padding mark, as T5 does."""
    torch.manual_seed(recipe.seed)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer), d_model=recipe.hidden, d_ff=recipe.inner, d_kv=recipe.head_dim,
            num_layers=recipe.layers, num_heads=recipe.heads, dropout_rate=0.0, feed_forward_proj="gated-gelu",
            relative_attention_num_buckets=32, relative_attention_max_distance=128,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def optimisers(recipe: Recipe, model) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for name, p in model.named_parameters():
        inside = p.ndim == 2 and "shared" not in name and "relative" not in name and "lm_head" not in name
        (matrices if inside else others).append(p)
    muon = torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0)]


def train(recipe: Recipe, tokenizer, pairs: Pairs, work: Path, stop: int | None = None, every: float = 120, say=print):
    """To `recipe.steps` (or `stop`), from the last checkpoint if there is one; returns the model."""
    folder = work / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    path, model = folder / "checkpoint.pt", network(recipe, tokenizer)
    optims, start, mean = optimisers(recipe, model), 0, 0.0
    peaks = [o.param_groups[0]["lr"] for o in optims]
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        for o, saved in zip(optims, state["optims"], strict=True):
            o.load_state_dict(saved)
        start, mean = state["step"], state["loss"]
        say(f"{recipe.name}: continuing at step {start}")
    end, began, tokens = min(recipe.steps, stop or recipe.steps), time.monotonic(), 0
    kept = began
    for step in range(start, end):
        batch = pairs.batch(recipe.seed, step, recipe.rows)
        tokens += int(batch["attention_mask"].sum() + (batch["labels"] >= 0).sum())
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o, peak in zip(optims, peaks, strict=True):
            o.param_groups[0]["lr"] = peak * recipe.rate(step)
            o.step()
            o.zero_grad()
        mean = loss.item() if step == 0 else mean + (loss.item() - mean) * max(0.02, 1 / (step + 1))
        done, now = step + 1, time.monotonic()
        if done % 20 == 0 or done == end:
            pace = (done - start) / (now - began)
            say(
                f"{recipe.name} step {done}/{recipe.steps} loss {loss.item():.4f} mean {mean:.4f} "
                f"{tokens / (now - began):.0f} tokens/s eta {(recipe.steps - done) / pace / 60:.1f} min"
            )
        if done == end or now - kept > every:
            state = {"model": model.state_dict(), "optims": [o.state_dict() for o in optims]}
            torch.save({**state, "step": done, "loss": mean}, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
            kept = now
    return model.eval()


@torch.no_grad()
def heldout_loss(model, rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, float]:
    """Mean loss per reply token in nats, and its perplexity."""
    total, count = 0.0, 0
    for i in range(0, len(rows), 32):
        batch = collate(rows[i : i + 32], pad)
        n = int((batch["labels"] >= 0).sum())
        total, count = total + model(**batch).loss.item() * n, count + n
    return {"replies": len(rows), "tokens": count, "loss": total / count, "perplexity": math.exp(total / count)}
