"""Streaming text: complete characters, never the beginning of a stop string.

python examples/stream.py [MODEL]
"""

import sys

import outrider

llm = outrider.load(sys.argv[1] if len(sys.argv) > 1 else "demo")
for piece in llm.stream("Once upon a time", max_new_tokens=64, stop="\n\n"):
    print(piece, end="", flush=True)
print()

# A chat is a list of messages; it goes through the model's own template.
chat = [{"role": "user", "content": "How many legs do three cats have?"}]
for piece in llm.stream(chat, max_new_tokens=64):
    print(piece, end="", flush=True)
print()
