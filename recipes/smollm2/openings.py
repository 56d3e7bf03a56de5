"""Prompts from which SmolLM2 writes questions of its own: its chat template up to the opening of the user's turn.

Two thirds stop where the user would begin to speak; the rest give the first word or two, so that kinds of requests
that are rare otherwise appear as well.
"""

from __future__ import annotations

import random

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TURN = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
WORDS = (
    "What", "Who", "When", "Where", "Why does", "How do", "How can I", "Which", "Explain", "Describe", "Compare",
    "Write a short", "Write an", "Write a poem", "Write a Python", "Give me", "List", "Name", "Summarize", "Rewrite",
    "Translate", "Create", "Suggest", "Imagine", "Pretend", "Design", "Tell me", "Can you", "Could you", "Is it",
    "Are there", "I am", "I want to", "My friend", "Help me", "Find", "Calculate", "Solve", "If a", "Draft an email",
    "Identify", "Classify", "Discuss", "Provide", "Generate", "Propose", "Outline", "In what", "Do", "Should",
)  # fmt: skip


def openings(count: int, seed: int = 0) -> list[str]:
    """The first `count` prompts; a longer list begins with a shorter one."""
    draw = random.Random(seed)
    return [TURN + (draw.choice(WORDS) if i % 3 == 2 else "") for i in range(count)]
