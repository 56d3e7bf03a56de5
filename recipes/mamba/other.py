"""A Mamba with another tokenizer than its target's: `python -m recipes.mamba.other` (after `recipes.demo.build`).

Sentencepiece-like pieces of 2,048 entries with byte fallback, from the same texts; the smaller Mamba's shape, its rate,
and 8.2 million of its own tokens of the first stage. A tiny random Llama stands in as the target: of its target, that
stage reads the vocabulary alone. (So the acceptance in the run's log means nothing.)
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.backends.torch import load_target, load_tokenizer
from outrider.training.loop import train
from recipes.demo.drafters import documents
from recipes.demo.tokenizer import SPECIALS, sample, save
from recipes.mamba.drafters import PRETRAIN, recipe

VOCAB = 2048


def pieces(work: Path) -> Tokenizer:
    before = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    learnt = Tokenizer(models.BPE())
    learnt.normalizer = before
    words = (" " + word for text in sample(work) for word in text.split())  # no piece runs over a space
    size = VOCAB - 256
    learnt.train_from_iterator(words, trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIALS)))
    model = json.loads(learnt.to_str())["model"]
    vocab = dict(model["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(m) for m in model["merges"]], byte_fallback=True))
    made.normalizer = before
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(list(SPECIALS))
    return made


def stand_in(folder: Path, work: Path) -> None:
    """A tokenizer, and a model of its vocabulary."""
    if (folder / "config.json").exists():
        return
    save(pieces(work), folder)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        bos_token_id=0, eos_token_id=1, pad_token_id=4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/demo"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = args.work / "mamba" / "other"
    stand_in(folder / "target", args.work)
    target, tokenizer = load_target(str(folder / "target"), dtype="float32"), load_tokenizer(str(folder / "target"))
    settings = replace(recipe("mamba-0.5m", "pretrain", args.work), prompts=1)
    result = train(target, documents(args.work, PRETRAIN, tokenizer), folder / "pretrain", settings)
    print(f"other: held-out loss {result.best:.4f} per token of its own")


if __name__ == "__main__":
    main()
