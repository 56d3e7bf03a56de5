"""Generate text by speculative decoding: the same text as without drafts, faster.

python examples/generate.py [MODEL]
"""

import sys

import outrider

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
llm = outrider.load(model)

# One prompt or many; each has its own seed, and its text does not depend on its neighbours.
prompts = ["Once upon a time", "def binary_search(items, wanted):"]
for output in llm.generate(prompts, max_new_tokens=48, temperature=0.7, seed=1):
    usage = output.usage
    print(f"--- {prompts[output.prompt]!r}, ended by {output.finish_reason}")
    print(output.text)
    print(f"--- {usage.new_tokens} tokens in {usage.rounds} rounds, {usage.tau:.2f} a round\n")

# The promise: with the same seed, the text is the one that plain decoding writes.
drafted = llm.generate(prompts, max_new_tokens=48, temperature=0.7, seed=1)
plain = outrider.load(model, "none").generate(prompts, max_new_tokens=48, temperature=0.7, seed=1)
assert [d.tokens for d in drafted] == [p.tokens for p in plain]
print("the texts equal those of plain decoding")
