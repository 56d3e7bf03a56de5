"""Memory and time of drafters over the length of the context: the studies `context_1024` to `context_8192`, and
`smollm2_context_1024` to `smollm2_context_8192`.

A context of N tokens is a prompt of held-out books and code, cut to N - 32 tokens, and the 32 tokens that follow it.
Every drafter drafts a chain of 5 at T = 0. SmolLM2 has 8,192 positions. The demo target was trained on rows of up to
TRAINED tokens: beyond them only time and memory are claimed. Beyond its 2,048 positions target and drafters run with
YaRN (a Mamba has no positions), untuned.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path

from .measure import Study

LENGTHS, TRAINED, TOKENS = (1024, 2048, 4096, 8192), 1024, 32
DOCUMENTS, PLACE = Path("runs/demo/documents/heldout"), Path("runs/bench/contexts")
DOMAINS, EACH = ("books", "stdlib"), 6  # prompts of each domain
LETTERS = 8 * max(LENGTHS)  # of a prompt before it is cut
DEMO = Path(str(files("outrider") / "demo"))


def study(context: int, chains: Mapping[str, str]) -> Callable[[], Study]:
    """The run at one length; what it reads is written when it is asked for."""

    def made() -> Study:
        names = {"Mamba 1.5M": chains["Mamba 1.5M"], "Transformer 1.5M": chains["Llama 1.5M"]}
        drafters = [f"{n}={_spec(spec, context)}" for n, spec in {**names, "EAGLE": f"eagle:{DEMO / 'eagle'}"}.items()]
        return Study(
            str(stretched(DEMO / "target", context)), tuple(f"{d}?tree=chain@6x5" for d in drafters),
            (f"{prompts()}@{context - TOKENS}",), peers=(), variants=("eager",), tokens=TOKENS, keep_loops=True,
            limit=None if context <= TRAINED else len(DOMAINS), explain=False, dtype="float32",
        )  # fmt: skip

    return made


def smollm2(context: int, drafters: Mapping[str, str]) -> Callable[[], Study]:
    """The run of SmolLM2 at one length."""

    def made() -> Study:
        named = tuple(f"{name}={spec}?tree=chain@6x5" for name, spec in drafters.items())
        return Study("smollm2", named, (f"{prompts()}@{context - TOKENS}",), weights="full", peers=(), tokens=TOKENS,
                     keep_loops=True, limit=2 * len(DOMAINS), explain=False)  # fmt: skip

    return made


def _spec(spec: str, context: int) -> str:
    method, _, folder = spec.partition(":")
    return f"{method}:{stretched(Path(folder), context)}"


def prompts() -> Path:
    """JSON lines of texts that are longer than every context: documents one after another."""
    made = PLACE / "prompts.jsonl"
    texts = []
    for domain in DOMAINS:
        lines = (DOCUMENTS / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
        whole = "\n\n".join(json.loads(line)["text"] for line in lines)
        step = len(whole) // EACH
        texts += [{"id": f"{domain} {i}", "text": (whole[i * step :] + whole)[:LETTERS]} for i in range(EACH)]
    PLACE.mkdir(parents=True, exist_ok=True)
    made.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    return made


def stretched(folder: Path, context: int) -> Path:
    """The folder, or a copy with YaRN where it has rotary positions and fewer of them than the context."""
    positions = json.loads((DEMO / "target" / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ropes = config["layer"]["rope"] if "layer" in config else config.get("rope_parameters")
    if context <= positions or ropes is None:
        return folder
    ropes |= {
        "rope_type": "yarn", "factor": context / positions, "original_max_position_embeddings": positions,
    }  # fmt: skip
    if "max_position_embeddings" in config:
        config["max_position_embeddings"] = context
    made = PLACE / f"{context}-{folder.resolve().as_posix().strip('/').replace('/', '-')}"
    if not made.exists():
        shutil.copytree(folder, made)
        (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made
