"""A smaller file of a trained drafter: `python -m recipes.trim FROM TO --size 4096 --target MODEL --data FILE ...`.

A draft vocabulary is rows of a head, the target's or (EAGLE-3) the drafter's own, so it can be cut without another
training: of the tokens that the drafter knows, those stay that the answers have most often. A smaller head is read in
less time, and misses more. `--intermediate 4480` keeps so many neurons of an EAGLE-3's MLP: those whose weights have
the greatest product of norms. `--bits 5` rounds matrices to so many binary places (bfloat16 has 7): a wheel packs them
into a sixth less.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider import files
from outrider.backends.torch import load_tokenizer, vocabulary
from outrider.checkpoints import native
from outrider.nets import int8
from outrider.params import InputError
from outrider.training import data

PLACES = 7  # of bfloat16, after the leading one
BESIDE = ("outrider_method", "format", "target_weights")  # of config.json, besides the network's own
MLP = "midlayer.mlp"  # of an EAGLE-3's layer


def coarse(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers of bfloat16 rounded to so many binary places after the leading one, to the nearest."""
    dropped = PLACES - bits
    whole = weight.view(torch.int16).int()
    size = ((whole & 0x7FFF) + (1 << dropped >> 1)) >> dropped << dropped
    return (size | whole & 0x8000).to(torch.int16).view(torch.bfloat16)


def cut(tensors: dict[str, torch.Tensor], places: torch.Tensor, kept: torch.Tensor, table: dict[str, Any]) -> None:
    """These places of the draft vocabulary alone, whose token ids are `kept`, in the drafter's own tensors: all whose
    rows are the vocabulary's, by the shapes that `table` has for the smaller one."""
    for name, tensor in tensors.items():
        if name != "d2t" and tuple(tensor.shape) != table.get(name) and len(tensor) == len(tensors["d2t"]):
            tensors[name] = tensor[places].contiguous()
    if "t2d" in tensors:
        tensors["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill_(0, kept, True)
    vocabulary.keep(tensors["d2t"].resize_(len(kept)), kept)


def narrow(tensors: dict[str, torch.Tensor], size: int) -> None:
    """The `size` neurons of the layer's MLP with the greatest product of the norms of what they read and write."""
    gate, up, down = (f"{MLP}.{name}_proj.weight" for name in ("gate", "up", "down"))
    norms = [tensors[gate].float().norm(dim=1), tensors[up].float().norm(dim=1), tensors[down].float().norm(dim=0)]
    stay = torch.stack(norms).prod(0).topk(size).indices.sort().values
    for name in (gate, up):
        tensors[name] = tensors[name][stay].contiguous()
    tensors[down] = tensors[down][:, stay].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of a drafter with a draft vocabulary")
    parser.add_argument("out", type=Path, help="folder of the new one")
    parser.add_argument("--size", type=int, help="tokens that stay; all if it is not given")
    parser.add_argument("--intermediate", type=int, help="neurons of EAGLE-3's MLP that stay; all if it is not given")
    parser.add_argument(
        "--bits", type=int, choices=range(2, PLACES + 1), default=PLACES, help="binary places that stay"
    )
    parser.add_argument("--target", default="smollm2", help="the drafter's model")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="what the drafter was trained on")
    a = parser.parse_args()
    if not (a.source / "model.safetensors").is_file():
        parser.error(f"there is no drafter in {a.source}")
    if missing := [str(file) for file in a.data if not file.is_file()]:
        parser.error(f"there is no file {missing[0]}")
    tensors = load_file(a.source / "model.safetensors")
    config = json.loads((a.source / "config.json").read_text(encoding="utf-8"))
    if any(name.endswith(int8.SCALE) for name in tensors):
        parser.error(f"{a.source} is in eight bits already; trim the folder that `outrider import --int8` was given")
    size = config.get("draft_vocab", 0) if a.size is None else a.size
    if not 0 < size <= config.get("draft_vocab", 0):
        parser.error(f"this drafter drafts {config.get('draft_vocab') or 'all'} tokens; give a size up to that")
    layer = config.get("layer", {})
    if a.intermediate is not None:
        if f"{MLP}.down_proj.weight" not in tensors or not 0 < a.intermediate <= layer["intermediate"]:
            parser.error(
                f"this drafter's MLP has {layer.get('intermediate', 'no')} neurons; give up to so many, or none"
            )
        narrow(tensors, a.intermediate)
        config["layer"] = {**layer, "intermediate": a.intermediate}
        if config.get("layers", 1) > 1:
            parser.error("this drafter has several layers, of which --intermediate can narrow none alone")
    known, counts = vocabulary.ids_of(tensors["d2t"]), torch.zeros(config["vocab"], dtype=torch.long)
    for document in data.read(a.data, load_tokenizer(a.target)):
        learned = torch.tensor(document.tokens)[torch.tensor(document.learn)]
        counts.index_add_(0, learned, torch.ones_like(learned))
    by_count = counts[known].sort(descending=True, stable=True).indices[:size]
    stay = by_count[known[by_count].argsort()]
    kept = known[stay]
    config["draft_vocab"] = size
    table = native.table(config["outrider_method"], {k: v for k, v in config.items() if k not in BESIDE}, a.source)
    cut(tensors, stay, kept, table)
    for name, tensor in tensors.items():
        if a.bits < PLACES and tensor.is_floating_point() and tensor.dim() == 2:
            tensors[name] = coarse(tensor.to(torch.bfloat16), a.bits)
    try:
        native.exact(tensors, table, a.out)
        with files.folder(a.out) as made:
            save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
            (made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except InputError as error:
        parser.error(str(error))
    shares = [f"{len(ids)}: {float(counts[ids].sum() / counts.sum()):.1%}" for ids in (known, kept)]
    print(f"answers' tokens that can be drafted, {', '.join(shares)}")


if __name__ == "__main__":
    main()
