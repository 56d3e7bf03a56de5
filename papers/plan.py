"""What a drafter for a target takes: tokens, GPU hours, disk and network, from the target's config and a count of GPUs.

Nothing is run: the model is built without weights to count its parameters, and the rest are formulas, which
docs/scaling.md states in words and symbols and holds against published runs. Two efficiencies are fitted to those runs
(FEATURES, TRAINING); how fast answers are written is `cost.py`'s model of a pass. Left out: what GPUs lose to one
another, attention's arithmetic over long texts, evaluation, and runs that fail.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.commands.loading import located
from outrider.names import Place, find
from outrider.params import InputError

from . import command
from .cost import PEAKS, Cost, speeds

MEMORY = {"a100": 80e9, "h100": 80e9, "h200": 141e9, "b200": 180e9, "b300": 270e9, "rtx3090": 24e9, "rtx4090": 24e9}
WEIGHTS = 0.8  # of the memory that a copy's weights may take, so that texts have room
FULL = 0.9  # of the memory that weights and texts fill
ROWS = 256  # texts that a copy writes at a time, at most
FEATURES = 0.25  # of the peak arithmetic that passes over whole texts reached in published runs
TRAINING = 0.25  # and that training steps did
STEP = 8192  # tokens of one GPU between two exchanges of gradients
SCALES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Target:
    """The sizes of a model. Parameters are those that a pass multiplies: an embedding is only looked up."""

    name: str
    total: float  # all parameters
    parameters: float  # multiplied for every token
    experts: float  # of a mixture's routed experts
    share: float  # of the experts' parameters, that one token uses
    hidden: int
    queries: int  # heads * their size
    keys: int  # key-value heads * their size
    inner: int  # width of a dense layer's MLP
    vocab: int
    kv: float  # bytes that keys and values of one token take, in all layers
    bytes: float  # of one parameter, as it is served

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.parameters + self.share * self.experts

    def cost(self, gpu: str, count: int) -> Cost:
        """What its passes cost on `count` GPUs that hold one copy."""
        sizes = {"parameters": self.parameters, "experts": self.experts, "share": self.share}
        return Cost(f"{self.name}@{count}x{gpu}", bytes=self.bytes, kv=self.kv, **sizes, **speeds(gpu, count))


@dataclass(frozen=True)
class Kind:
    """A kind of drafter, as its published training has it."""

    features: int  # the target's hidden states that it reads
    stored: int  # those that are kept for each token, the last among them
    layers: int
    passes: float  # through layers and head, of each token in one epoch
    wide: int = 1  # hidden states that its attention takes in
    head: int = 0  # tokens of a trained head of its own; 0: the target's head, frozen

    def layer(self, target: Target) -> float:
        """Parameters of a layer."""
        h, q, k = target.hidden, target.queries, target.keys
        return self.wide * h * (q + 2 * k) + q * h + 3 * h * target.inner

    def fuse(self, target: Target) -> float:
        """Parameters that make one vector of the features; EAGLE's takes in the token beside its one feature."""
        return (self.features + (self.stored == 1)) * target.hidden**2

    def trained(self, target: Target) -> float:
        """Parameters that are trained."""
        head = min(self.head, target.vocab) * target.hidden
        return self.layers * self.layer(target) + self.fuse(target) + head

    def operations(self, target: Target) -> float:
        """Floating point operations to train on one token once."""
        head = 6 * min(self.head, target.vocab) if self.head else 4 * target.vocab  # a frozen one gets no gradient
        passed = 6 * self.layers * self.layer(target) + head * target.hidden
        return self.passes * passed + 6 * self.fuse(target) + 2 * target.vocab * target.hidden


KINDS = {
    "eagle": Kind(features=1, stored=1, layers=1, passes=1),
    "eagle3": Kind(features=3, stored=4, layers=1, passes=7, wide=2, head=32000),
    "dflash": Kind(features=5, stored=6, layers=5, passes=3),
}


def read(place: Place) -> Target:
    """The sizes of a model from its config alone; weights are neither needed nor read.

    Raises:
        InputError: There is no config that transformers can read, or it is none of a decoder.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM

    from outrider.backends.torch import gguf

    try:
        where = Path(place.where)
        config = gguf.read_config(where / place.gguf) if place.gguf else AutoConfig.from_pretrained(place.where)
        if config.is_encoder_decoder:
            raise InputError(f"{place.name} has an encoder; a plan is for decoders alone")
        text = config.get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, StrictDataclassError) as error:
        line = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{place.name} has no config of a decoder that transformers can read: {line}") from None
    sizes = dict(model.named_parameters())
    experts = sum(p.numel() for name, p in sizes.items() if ".experts." in name)
    total = sum(p.numel() for p in sizes.values())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    counts = [getattr(text, key, None) for key in ("n_routed_experts", "num_local_experts", "num_experts")]
    routed = next((int(n) for n in counts if n), 0)
    heads = int(text.num_attention_heads)
    size = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    if rank := getattr(text, "kv_lora_rank", None):  # latent attention keeps less, and a drafter's layer is a plain one
        size, groups, kept = text.hidden_size // heads, heads, rank + text.qk_rope_head_dim
    else:
        kept = 2 * groups * size
    kinds = getattr(text, "layer_types", None) or ["attention"] * text.num_hidden_layers
    layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    inner = int(getattr(text, "intermediate_size", None) or getattr(text, "n_inner", None) or 4 * text.hidden_size)
    return Target(
        place.name, total, total - experts - (0 if embedding is head else embedding.numel()), experts,
        int(text.num_experts_per_tok) / routed if experts else 0.0,
        int(text.hidden_size), heads * size, groups * size, inner, int(text.vocab_size), 2.0 * layers * kept,
        width(config),
    )  # fmt: skip


def width(config: Any) -> float:
    """Bytes of a parameter as engines serve it: 16 bits, or what the weights were quantised to."""
    quantised = getattr(config, "quantization_config", None) or {}
    quantised = quantised if isinstance(quantised, dict) else quantised.to_dict()
    if bits := quantised.get("bits"):
        return float(bits) / 8
    return 1.0 if quantised.get("quant_method") == "fp8" else 2.0


def gpus_of(text: str) -> tuple[int, str]:
    """8xh100 -> (8, "h100"). Raises InputError for anything else."""
    match = re.fullmatch(r"(?:(\d+)x)?([\w-]+)", text.strip().lower())
    number = int(match[1] or 1) if match else 0
    if not match or match[2] not in MEMORY or number < 1:
        raise InputError(f"--gpus takes COUNTxGPU, as in 8xh100, with one of {', '.join(MEMORY)}, not {text!r}")
    return number, match[2]


def tokens_of(text: str) -> float:
    """100M -> 1e8: a number of tokens, with K, M, G, B or T after it. Raises InputError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kKMGBT]?)", text.strip())
    number = float(match[1]) * SCALES[match[2].upper()] if match else 0.0
    if not 1 <= number < math.inf:
        raise InputError(f"--tokens takes a number of at least 1, as in 100M or 1.2G, not {text!r}")
    return number


def writing(target: Target, gpu: str, number: int, length: int) -> tuple[int, float]:
    """(GPUs that hold a copy, tokens/s of all copies) while answers are written.

    Raises:
        InputError: The GPUs do not hold one copy.
    """
    weights = target.total * target.bytes
    least = math.ceil(weights / (WEIGHTS * MEMORY[gpu]))
    copy = 1 << (least - 1).bit_length()
    if copy > number:
        raise InputError(
            f"{target.name} takes {weights / 1e9:.0f} GB, for which {copy} {gpu} are needed; give --gpus {copy}x{gpu}"
        )
    room = FULL * copy * MEMORY[gpu] - weights
    rows = max(1, min(ROWS, int(room / (target.kv * length)) if target.kv else ROWS))
    seconds = target.cost(gpu, copy).pass_seconds(rows, rows * length // 2)
    return copy, number // copy * rows / seconds


def plan(
    target: Target, kind: Kind, tokens: float, number: int, gpu: str, epochs: int, length: int = 1000
) -> dict[str, Any]:
    """What every step takes on `number` GPUs, as JSON; `length`: tokens of a text, prompt and answer.

    Raises:
        InputError: The GPUs do not hold one copy of the target.
    """
    copy, rate = writing(target, gpu, number, length)
    answers, features = number * tokens / rate, reading(target, tokens, gpu)
    training = teaching(target, kind, tokens, gpu)
    stored, gradients = 2.0 * target.hidden * kind.stored, 4 * kind.trained(target)  # bytes: of a token, of a step
    steps = {"answers": answers, "features": features, "training": epochs * training}
    return {
        "target": target.name, "gpus": f"{number}x{gpu}", "tokens": tokens, "epochs": epochs, "length": length,
        "parameters": target.total, "active": target.active, "weights_bytes": target.total * target.bytes,
        "gpus_of_a_copy": copy, "drafter_parameters": kind.trained(target), "tokens_per_second": rate,
        "gpu_hours": {name: seconds / 3600 for name, seconds in steps.items()},
        "hours": {name: seconds / 3600 / number for name, seconds in steps.items()},
        "disk_bytes": {"tokens": 4 * tokens, "features": stored * tokens, "features_of_a_token": stored},
        "network_bytes_per_second": {
            "features_written": stored * tokens * number / features,
            "features_read": stored * tokens * number / training,
            "gradients_of_a_gpu": gradients * tokens / training / STEP if number > 1 else 0.0,
        },
    }  # fmt: skip


def reading(target: Target, tokens: float, gpu: str) -> float:
    """Seconds of one GPU to make the features of these tokens once."""
    return 2 * target.active * tokens / (FEATURES * PEAKS[gpu][1])


def teaching(target: Target, kind: Kind, tokens: float, gpu: str) -> float:
    """Seconds of one GPU to train on these tokens once, the features being there."""
    return kind.operations(target) * tokens / (TRAINING * PEAKS[gpu][1])


def lines(made: dict[str, Any]) -> list[str]:
    """A plan for people."""
    hours, wall, disk, net = (made[key] for key in ("gpu_hours", "hours", "disk_bytes", "network_bytes_per_second"))
    again = made["epochs"] - 1
    rows = [
        f"target    {short(made['parameters'])} parameters, {short(made['active'])} for a token; weights "
        f"{short(made['weights_bytes'])}B, a copy on {made['gpus_of_a_copy']} of {made['gpus']}",
        f"drafter   {short(made['drafter_parameters'])} parameters to train",
    ]
    says = {
        "answers": f"{short(made['tokens_per_second'])} tokens/s",
        "features": f"made once: {short(disk['features_of_a_token'])}B a token",
        "training": f"{made['epochs']} epochs",
        "stored": f"in all, features on a disk of {short(disk['features'])}B, written at "
        f"{short(net['features_written'])}B/s, read at {short(net['features_read'])}B/s",
        "anew": f"in all, features made in every epoch; {short(disk['tokens'])}B of tokens on disk",
    }
    for name, words in says.items():
        each = [
            amount(sum(h.values()) + again * h["features"] * (name == "anew") if name not in h else h[name])
            for h in (hours, wall)
        ]
        rows.append(f"{name:9} {each[0]:>10} GPU hours {each[1]:>10} h   {words}")
    if rate := net["gradients_of_a_gpu"]:
        rows.append(f"gradients {short(rate)}B/s to and from every GPU, at {STEP} tokens a step")
    return rows


def amount(hours: float) -> str:
    """Hours with two decimals, or two digits where that would be 0.00.

    >>> amount(1234.5), amount(0.00123), amount(0)
    ('1,234.50', '0.0012', '0.00')
    """
    decimals = 2 if hours >= 0.1 or hours == 0 else 1 - math.floor(math.log10(hours))
    return f"{hours:,.{decimals}f}"


def short(number: float) -> str:
    """16060522496 -> "16.1 G"."""
    for name in ("T", "G", "M", "k"):
        if number >= 0.9995 * (scale := SCALES[name.upper()]):
            return f"{number / scale:.3g} {name}"
    return f"{number:.3g} "


def chosen(drafter: str) -> Kind:
    """The kind of drafter of a name. Raises InputError for a name that is none."""
    if drafter not in KINDS:
        raise InputError(f"a plan knows the drafters {', '.join(KINDS)}, not {drafter!r}")
    return KINDS[drafter]


def main(
    target: Annotated[
        str,
        typer.Option(metavar="CONFIG", help="A folder or config.json, a hub id, smollm2, demo; needs no weights."),
    ],
    tokens: Annotated[str, typer.Option(metavar="N", help="Tokens to train on, prompts and answers: 100M, 1.2G.")],
    gpus: Annotated[str, typer.Option(metavar="COUNTxGPU", help="As in 8xh100.")],
    drafter: Annotated[str, typer.Option(help="eagle, eagle3 or dflash.")] = "eagle3",
    epochs: Annotated[int, typer.Option(help="Times that the drafter sees each token.", min=1)] = 5,
    length: Annotated[int, typer.Option(help="Tokens of a text, prompt and answer.", min=1)] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else there.")] = False,
) -> None:
    """Work out what a drafter for a target takes: GPU hours, disk and network.

    For example: python -m papers.plan --target config.json --tokens 100M --gpus 8xh100
    """
    number, gpu = gpus_of(gpus)
    amount, kind = tokens_of(tokens), chosen(drafter)
    place = find(target) if Path(target).is_file() else located(target)
    made = plan(read(place), kind, amount, number, gpu, epochs, length)
    typer.echo(json.dumps(made) if as_json else "\n".join(lines(made)))


if __name__ == "__main__":
    command.main(main)
