"""The authors' own code of EAGLE-2, which HASS's weights fit; one text at a time. "source" in the job is a checkout.
Methods: plain (its loop without drafts), tree (its default: 60 nodes with the root, at most 8 deep) and small (16, at
most 6 deep). The drafter is a folder that `outrider export --to safeailab` wrote. The algorithm is not touched: the
number of nodes is given, since finding one by itself asks for a GPU."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from job import Texts, Write, serve
from safetensors import safe_open

SIZES = {  # a layer more than `depth` is drawn
    "plain": {"total_token": 16},
    "tree": {"total_token": 60, "depth": 7, "top_k": 10},
    "small": {"total_token": 16, "depth": 5, "top_k": 4},
}


def readable(model: Path, folder: Path) -> Path:
    """The model's folder as that code and older versions of transformers read it: with an index of its weights, which a
    single file does not need, the rotation's base where they look for it, and a tokenizer that they know (it is asked
    for the end of a text alone)."""
    config, tokenizer = (json.loads((model / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).symlink_to((model / name).resolve())
    with safe_open(model / "model.safetensors", "pt") as weights:
        index = {"weight_map": dict.fromkeys(weights.keys(), "model.safetensors")}
    theirs = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer["eos_token"]}
    base = {"rope_theta": (config.get("rope_parameters") or config)["rope_theta"]}
    files = {"config": config | base, "tokenizer_config": theirs, "model.safetensors.index": index}
    for name, given in files.items():
        (folder / f"{name}.json").write_text(json.dumps(given))
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

    def write(prompts: Texts, temperature: float, batch: int, goes_on: bool) -> Texts:
        torch.manual_seed(1)
        random.seed(1)  # what it accepts by
        most = job["tokens"] - 1  # it ends once there are more
        return [
            written(torch.tensor([ids]), temperature=temperature, max_new_tokens=most)[0, len(ids) :].tolist()
            for ids in prompts
        ]

    return f"transformers {transformers.__version__}, {job['dtype']}", write, None


serve(start)
