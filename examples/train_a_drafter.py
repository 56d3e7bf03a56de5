"""Train a drafter for a model on text, then write with it. The command line does the same: `outrider train`.

python examples/train_a_drafter.py MODEL_FOLDER_OR_HUB_ID TEXT_FILE OUT [STEPS]
"""

import sys

import outrider
from outrider.backends.torch import load_target, load_tokenizer
from outrider.training import data, loop
from outrider.training.recipe import Recipe

model, text, out, steps = (*sys.argv[1:], "300")[:4]
target = load_target(model, dtype="float32")
documents = list(data.read([text], load_tokenizer(model)))
recipe = Recipe("eagle", steps=int(steps), rows=4, length=128, lr=3e-3, prompts=2)
result = loop.train(target, documents, out, recipe)
print(f"{result.folder}: held-out loss {result.best:.3f}, {result.tau:.2f} tokens per round")

llm = outrider.load(model, str(result.folder), dtype="float32")
print(llm.generate("def read(path):", max_new_tokens=48)[0].text)
