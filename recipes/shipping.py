"""A trained drafter as a folder of the package: weights in bf16, its config, and what it did on held-out text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def place(run: Path, folder: Path) -> tuple[int, str]:
    """Copy the best drafter of a training's folder; its number of parameters, and a table of the evaluations."""
    if not (run / "best" / "model.safetensors").is_file():
        raise SystemExit(f"there is no trained drafter in {run}; train it first")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(run / "best" / "model.safetensors")
    kept = {key: t.to(torch.bfloat16) if t.is_floating_point() else t for key, t in tensors.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for its owner alone
    config: dict[str, Any] = json.loads((run / "best" / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    results = [line for line in lines if "held_out_loss" in line]
    table = "\n".join(f"| {e['step']} | {e['held_out_loss']:.4f} | {e['tau']:.2f} |" for e in results)
    print(f"{folder}: {(folder / 'model.safetensors').stat().st_size / 1e6:.1f} MB")
    return sum(t.numel() for t in kept.values() if t.is_floating_point()), table
