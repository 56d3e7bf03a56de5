"""EAGLE on a mixture of experts: `python -m papers.ablations.moe` (after `recipes.demo.build`).

The demo target is made a Mixtral: attention and embeddings are its own, every expert starts as its layer's MLP with
some noise, the router at random (sparse upcycling). It then learns from the demo's documents for STEPS steps of 4 rows
of 512 tokens, and EAGLE learns on it with the budget of `papers.ablations.demo`, whose table it joins.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from recipes.demo.drafters import demo, documents
from rich.progress import track
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from outrider import drafters
from outrider.backends.torch import HFTarget, load_tokenizer
from outrider.training.data import Batch, order, pack, split
from outrider.training.features import hidden
from outrider.training.loop import train

from .demo import compared, eagle, prompts

EXPERTS, STEPS, RATE, NOISE = 4, 300, 1e-3, 0.3


def upcycled(dense: LlamaForCausalLM, seed: int = 0) -> MixtralForCausalLM:
    """A Mixtral of EXPERTS experts a layer, two of them used for each token, that begins near the dense model."""
    c, g = dense.config, torch.Generator().manual_seed(seed)
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
            "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
    config = MixtralConfig(num_local_experts=EXPERTS, num_experts_per_tok=2, **{k: getattr(c, k) for k in same})
    torch.manual_seed(seed)
    made = MixtralForCausalLM(config)
    given = dense.state_dict()

    def expert(weight: Tensor) -> Tensor:
        return weight * (1 + NOISE * torch.randn(weight.shape, generator=g))

    state = made.state_dict()
    for name in state:
        if name in given:
            state[name] = given[name]
        elif name.endswith("mlp.experts.down_proj"):
            down = given[name.replace("experts.down_proj", "down_proj.weight")]
            state[name] = torch.stack([expert(down) for _ in range(EXPERTS)])
        elif name.endswith("mlp.experts.gate_up_proj"):
            gate, up = (given[name.replace("experts.gate_up_proj", f"{x}_proj.weight")] for x in ("gate", "up"))
            state[name] = torch.stack([expert(torch.cat((gate, up))) for _ in range(EXPERTS)])
        else:
            assert name.endswith("mlp.gate.weight"), name
    made.load_state_dict(state)
    return made


def loss_of(model: HFTarget, batch: Batch) -> Tensor:
    """The mean cross-entropy of the next token."""
    places = batch.same(1)
    logits = model.head(hidden(model, batch)[-1][places]).float()
    return functional.cross_entropy(logits, batch.ahead(1)[places])


@torch.no_grad()
def held_out(model: HFTarget, batch: Batch) -> float:
    losses = [float(loss_of(model, batch.rows([i]))) for i in range(len(batch.keys))]
    return sum(losses) / len(losses)


def learn(model: HFTarget, rows: Batch, rest: Batch) -> dict[str, Any]:
    net, starts = model.model.train(), held_out(model, rest)
    for p in net.parameters():
        p.requires_grad_(True)
    optimiser = torch.optim.AdamW(net.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    queue = order(len(rows.keys), 0, 0)
    for step in track(range(STEPS), "the mixture of experts"):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        first = 4 * step % (len(queue) - 3)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, rows.rows(queue[first : first + 4]))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
    net.eval().requires_grad_(False)
    return {"target_held_out_loss": [round(starts, 4), round(held_out(model, rest), 4)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/demo"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--each", type=int, default=14, help="prompts of every domain")
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder, text = args.work / "ablations" / "eagle_on_a_mixture_of_experts", documents(args.work)
    place, tokenizer = folder / "target", load_tokenizer(demo())
    if not (place / "about.json").exists():
        net = upcycled(LlamaForCausalLM.from_pretrained(demo(), dtype=torch.float32))
        training, rest = split(text)
        about = learn(HFTarget(net), pack(training, 512), pack(rest[:64], 512))
        net.save_pretrained(place)
        (place / "about.json").write_text(json.dumps(about), encoding="utf-8")
    tokenizer.save_pretrained(place)
    about = json.loads((place / "about.json").read_text(encoding="utf-8"))
    model = HFTarget(MixtralForCausalLM.from_pretrained(place, dtype=torch.float32))
    result = train(model, text, folder, eagle())
    given, eos = prompts(args.each), tokenizer.eos_token_id
    rows = compared(model, drafters.load(f"eagle:{result.folder}", model), given, args.tokens, eos)
    row = {"name": "eagle on a mixture of experts", "options": about, "held_out_loss": result.best, **rows}
    (folder / "result.json").write_text(json.dumps(row, indent=1), encoding="utf-8")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
