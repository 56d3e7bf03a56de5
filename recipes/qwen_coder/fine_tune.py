"""A fine-tune of a model, for drafters to be adapted to.

`python -m recipes.qwen_coder.fine_tune MODEL --data FILE --out DIR`. A low-rank adapter (Hu et al. 2021) in all linear
layers but the head learns the answers of the data's first dialogues, and is merged into the weights: DIR/model is a
changed model like those that people publish. Prompts of the data's last dialogues go to DIR/questions.jsonl, for
`outrider data generate`: what a drafter learns from is the changed model's own text.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import outrider
from outrider import LLM, names
from outrider.backends.torch import load_tokenizer
from outrider.training.data import Document, document

LAST = 512  # tokens of a dialogue, at most


def tuned(llm: LLM, dialogues: list[Document], steps: int, rank: int, lr: float) -> Any:
    """The model with the adapter merged: one dialogue a step, the loss on its answers and the ends of these alone."""
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = llm.target.model.requires_grad_(False)
    adapted: Any = peft.LoraModel(model, config, "default")  # changes the model's modules in place
    learned = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(learned, lr=lr, weight_decay=0.0)
    order = random.Random(0)
    shuffled: list[Document] = []
    for step in range(steps):
        if not shuffled:
            shuffled = order.sample(dialogues, len(dialogues))
        dialogue = shuffled.pop()
        tokens, wanted = torch.tensor(dialogue.tokens[:LAST]), torch.tensor(dialogue.learn[1:LAST])
        logits = model(input_ids=tokens[None]).logits[0, :-1][wanted]
        loss = functional.cross_entropy(logits.float(), tokens[1:][wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        for group in optimiser.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20, (steps - step) / (0.2 * steps))
        optimiser.step()
        optimiser.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return adapted.merge_and_unload()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a chat model: smollm2, a .gguf file, a folder or a hub id")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with messages: a question and an answer")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--steps", type=int, default=300, help="dialogues that are learned, one a step")
    parser.add_argument("--questions", type=int, default=200, help="prompts to write after these")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--lr", type=float, default=2e-4, help="learning rate")
    a = parser.parse_args()
    try:
        with a.data.open(encoding="utf-8") as file:
            lines = [json.loads(line)["messages"] for line in file]
    except (OSError, ValueError, KeyError, TypeError):
        parser.error(f"{a.data} cannot be read as JSON lines with messages")
    if len(lines) <= a.questions:
        parser.error(f"{a.data} has {len(lines)} dialogues, no more than --questions")
    first, rest = lines[: min(a.steps, len(lines) - a.questions)], lines[-a.questions :]
    torch.manual_seed(0)
    llm, tokenizer = outrider.load(a.model, "none"), load_tokenizer(names.find(a.model))
    made = [document({"messages": line}, f"dialogue {i} of {a.data}", tokenizer) for i, line in enumerate(first, 1)]
    dialogues = [one for one in made if any(one.learn[1:LAST])]
    if not dialogues:
        parser.error(f"no dialogue of {a.data} has an answer among its first {LAST} tokens")
    tuned(llm, dialogues, a.steps, a.rank, a.lr).save_pretrained(a.out / "model")
    tokenizer.save_pretrained(a.out / "model")
    asked = [json.dumps({"messages": messages[:1]}) + "\n" for messages in rest]
    (a.out / "questions.jsonl").write_text("".join(asked), encoding="utf-8")


if __name__ == "__main__":
    main()
