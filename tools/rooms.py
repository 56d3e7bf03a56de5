"""The rooms of `src/outrider` and what each may import from the others.

A room is a file or a folder; the folders of `backends` are rooms of their own, and `backends` stands for all of them.

This table is the one place of the rule. `tests/unit/test_architecture.py` holds the code to it, and `tools/pages.py`
writes the tables of docs/structure.md from it. Each room stands below all that it may import.
"""

from __future__ import annotations

# room: (what it may import, what it holds)
ROOMS: dict[str, tuple[str, str]] = {
    "params": ("", "what a caller asks for, checked without torch; `InputError`"),
    "machine": ("", "the processor: its threads and its name; the device that models are loaded to"),
    "files": ("params", "atomic writes"),
    "kept": ("files", "what is kept between runs, in the user's cache directory, and who else could have written it"),
    "hub": ("params", "whether the model hub can be reached"),
    "shipped": ("params", "the models and drafters that come with the package, by name"),
    "plugins": ("params", "drafters, objectives and peers by name: our files, and other packages' entry points"),
    "encoding": ("params", "a caller's prompts as token ids"),
    "infill": ("params", "fill-in-the-middle prompts"),
    "schema": ("params", "dataclasses from JSON and to it"),
    "prompts": ("params", "JSON lines as rows and as prompts"),
    "core": ("params", "trees, noise, sampling, verification, tokens to text, and the protocols of target and drafter"),
    "backends/native": (
        "params machine files kept core",
        "our own passes on CPUs, in C: model files read in place, their tokenizers",
    ),
    "names": ("params hub shipped backends/native", "what a model's name means"),
    "backends/torch": (
        "params machine files kept hub shipped schema core backends/native names",
        "stock models as targets, on any device; the trees, the noise and the rules in tensors",
    ),
    "backends/choose": ("params hub names core backends/native backends/torch", "which backend serves a model"),
    "nets": ("params schema core backends", "the small networks that drafters are made of"),
    "budgets": ("params machine kept schema core", "how much to draft in each round"),
    "testing": ("params core", "an exact table target, for tests of a drafter"),
    "checkpoints": (
        "params files hub shipped plugins schema names core backends nets",
        "drafters' weights on disk: the native layout and those of others",
    ),
    "drafters": (
        "params shipped plugins schema names core backends nets budgets checkpoints",
        "one file = one way to draft",
    ),
    "engine": (
        "params core budgets",
        "the loop: draft, verify, commit, for rows that come and go; requests and outputs",
    ),
    "llm": (
        "params names encoding core backends budgets engine drafters",
        "the public face: `load`, `LLM`",
    ),
    "training": (
        "params files plugins encoding schema prompts names core backends nets budgets engine checkpoints drafters",
        "objectives, data, and the one training loop",
    ),
    "integrations": (
        "params files names core backends budgets engine drafters training",
        "Outrider inside other libraries",
    ),
    "proofs": (
        "params names core backends budgets engine drafters checkpoints llm",
        "evidence of losslessness; parity with vLLM",
    ),
    "bench": (
        "params machine files shipped plugins encoding schema prompts names core backends budgets engine drafters llm "
        "proofs",
        "the benchmark: methods by tasks by temperatures by batch sizes",
    ),
    "serve": (
        "params machine kept encoding infill names core backends budgets engine drafters llm",
        "an OpenAI-compatible server, and its page",
    ),
    "commands": ("*", "one file = one command"),
    "cli": ("*", "parses, calls a command, turns errors into a sentence and an exit code"),
}


def may(room: str) -> set[str]:
    """The rooms that `room` may import; those with `*` may import every room above them."""
    wanted = ROOMS[room][0]
    above = list(ROOMS)[: list(ROOMS).index(room)]
    if wanted == "*":
        return set(above)
    return {other for other in ROOMS for name in wanted.split() if name in (other, other.partition("/")[0])}
