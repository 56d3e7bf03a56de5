"""Speculation inside stock transformers: one more argument to `model.generate`.

python examples/transformers_dropin.py MODEL_FOLDER_OR_HUB_ID
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

inputs = tokenizer(["The sea was", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,"], return_tensors="pt", padding=True)
stock = model.generate(**inputs, max_new_tokens=32, do_sample=False)
ours = model.generate(
    **inputs, max_new_tokens=32, do_sample=False, custom_generate=outrider.custom_generate, drafter="lookup"
)
assert tokenizer.batch_decode(ours, skip_special_tokens=True) == tokenizer.batch_decode(stock, skip_special_tokens=True)
print(*tokenizer.batch_decode(ours, skip_special_tokens=True), sep="\n---\n")
