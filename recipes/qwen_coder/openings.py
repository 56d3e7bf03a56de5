"""Prompts from which Qwen2.5-Coder writes questions of its own: its chat template up to where the user would speak.

One third stop there; the others give the first words of a request, so that rare kinds of requests appear as well.
"""

from __future__ import annotations

import random

SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TURN = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
WORDS = (
    "Write a Python function that", "Write a function", "Write a class", "Write a SQL query", "Write a bash script",
    "Write a regular expression", "Write a JavaScript function", "Write a C program", "Write a Java class", "Write a",
    "Create a React component", "Create an HTML page", "Create a Dockerfile", "Create a", "Implement", "Design",
    "How do I", "How can I", "How does", "Why does", "Why is", "What is", "What does", "What are", "Which", "Explain",
    "Compare", "Refactor", "Fix the bug", "Optimize", "Convert", "Debug", "Given an array", "Given a string",
    "Given a list", "Given a table", "I have a Python script", "I am getting an error", "I want to", "My code",
    "Can you", "Help me", "Generate", "Parse", "Use pandas to", "Use numpy to", "In Rust,", "In Go,", "In C++,",
    "In TypeScript,", "Solve", "Calculate", "Describe", "List", "Summarize", "Suggest", "Translate",
)  # fmt: skip


def openings(count: int, seed: int = 0) -> list[str]:
    """The first `count` prompts; a longer list begins with a shorter one."""
    draw = random.Random(seed)
    return [TURN + (draw.choice(WORDS) if i % 3 else "") for i in range(count)]
