"""The authors' own code for EAGLE-2 and HASS, of which "source" in the job is a checkout; one text at a time. Methods:
plain (its loop without drafts), tree (what it draws by default: 60 nodes, 7 deep) and small (16 nodes, 6 deep). The
drafter is a folder that `outrider export --to safeailab` wrote. The algorithm is not touched: the number of nodes is
given, since finding one by itself asks for a GPU."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from job import Texts, Write, serve
from safetensors import safe_open

SIZES = {
    "plain": {"total_token": 16},
    "tree": {"total_token": 60, "depth": 7, "top_k": 10},
    "small": {"total_token": 16, "depth": 6, "top_k": 4},
}


def readable(model: Path, folder: Path) -> Path:
    """The model's folder as that code reads it: with an index of its weights, which a single file does not need, and
    with a tokenizer that older versions of transformers know. Of it, only the end of a text is asked."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    index, tokenizer = folder / "model.safetensors.index.json", folder / "tokenizer_config.json"
    if not index.exists():
        with safe_open(model / "model.safetensors", "pt") as weights:
            index.write_text(json.dumps({"weight_map": dict.fromkeys(weights.keys(), "model.safetensors")}))
    ends = json.loads(tokenizer.read_text())["eos_token"]
    tokenizer.unlink()
    tokenizer.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends}))
    return folder


def start(job: dict[str, Any]) -> tuple[str, Write, None]:
    sys.path.insert(0, job["source"])
    from eagle.model.ea_model import EaModel

    with tempfile.TemporaryDirectory() as folder:
        model = EaModel.from_pretrained(
            use_eagle3=False,
            base_model_path=str(readable(Path(job["model"]), Path(folder))),
            ea_model_path=job["drafter"],
            torch_dtype=getattr(torch, job["dtype"]),
            **SIZES[job["method"]],
        ).eval()
    written = model.naivegenerate if job["method"] == "plain" else model.eagenerate

    def write(prompts: Texts, temperature: float, batch: int) -> Texts:
        torch.manual_seed(1)
        return [
            written(torch.tensor([ids]), temperature=temperature, max_new_tokens=job["tokens"])[0, len(ids) :].tolist()
            for ids in prompts
        ]

    return f"transformers {transformers.__version__}, {job['dtype']}", write, None


serve(start)
