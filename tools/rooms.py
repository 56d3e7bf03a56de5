"""The rooms of `src/outrider` (a room is a file or a folder of it) and what each may import from the others.

This table is the one place of the rule. `tests/unit/test_architecture.py` holds the code to it, and `tools/pages.py`
writes the tables of docs/structure.md from it. Each room stands below all that it may import.
"""

from __future__ import annotations

# room: (what it may import, what it holds)
ROOMS: dict[str, tuple[str, str]] = {
    "params": ("", "what a caller asks for, checked without torch; `InputError`"),
    "price": ("", "what the nodes of a round cost, and how many of them pay"),
    "types": ("params price", "plain values and the protocols of target and drafter"),
    "files": ("params", "atomic writes"),
    "kept": ("files", "what is kept between runs, in the user's cache directory, and who else could have written it"),
    "hub": ("params", "whether the model hub can be reached"),
    "shipped": ("params", "the models and drafters that come with the package, by name"),
    "plugins": ("params", "drafters, objectives and peers by name: our files, and other packages' entry points"),
    "encoding": ("params", "a caller's prompts as token ids"),
    "prompts": ("params", "JSON lines as rows and as prompts"),
    "core": ("types", "trees, noise, sampling, verification, tokens to text, ends of text: no models"),
    "backends": ("params", "ways to compute a target's passes: model files read in place, their tokenizers"),
    "native": ("kept", "passes of Llama-shaped layers in C, built for this processor when they are first wanted"),
    "nets": (
        "params types core native",
        "the small networks that drafters are made of; fast products with fixed weights",
    ),
    "budgets": ("params types kept", "how much to draft in each round"),
    "testing": ("types core", "an exact table target, for tests of a drafter"),
    "targets": (
        "params files kept hub shipped types core backends native nets",
        "stock models as targets: tree cache, masks, positions, compiled and recorded passes",
    ),
    "checkpoints": (
        "params types files hub shipped plugins nets",
        "drafters' weights on disk: the native layout and those of others",
    ),
    "drafters": ("types shipped plugins core nets budgets targets checkpoints", "one file = one way to draft"),
    "request": ("params types core", "what an output is asked to be, the row that it becomes, and the output"),
    "engine": ("params types core budgets request", "the loop: draft, verify, commit, for rows that come and go"),
    "llm": ("params types encoding core budgets request engine targets drafters", "the public face: `load`, `LLM`"),
    "training": (
        "params types files plugins prompts core nets budgets engine targets checkpoints drafters",
        "objectives, data, and the one training loop",
    ),
    "integrations": (
        "params types files core budgets request engine targets drafters training",
        "Outrider inside other libraries",
    ),
    "proofs": (
        "params types core budgets engine targets drafters checkpoints llm",
        "evidence of losslessness; parity with vLLM",
    ),
    "bench": (
        "params types files plugins encoding prompts core budgets engine request targets drafters llm proofs",
        "the measuring instrument",
    ),
    "serve": (
        "params types kept core request engine budgets targets drafters llm",
        "an OpenAI-compatible server, and its page",
    ),
    "commands": ("*", "one file = one command"),
    "cli": ("*", "parses, calls a command, turns errors into a sentence and an exit code"),
}


def may(room: str) -> set[str]:
    """The rooms that `room` may import; those with `*` may import every room above them."""
    wanted = ROOMS[room][0]
    above = list(ROOMS)[: list(ROOMS).index(room)]
    return set(above) if wanted == "*" else set(wanted.split())
