"""The recipe of the Mambas in miniature: all stages of one of each kind, in a few steps, and what would ship."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.demo import drafters as demo
from recipes.mamba import drafters as recipe
from recipes.mamba import other
from tokenizers import decoders
from transformers import AutoModelForCausalLM

import outrider
from outrider.backends.torch import load_tokenizer
from outrider.drafters._words import Spelling
from outrider.training.data import read


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Documents of every domain from the held-out prompts that ship, and stages of two short steps."""
    place = tmp_path / "documents" / "train"
    place.mkdir(parents=True)
    rows = [json.loads(line) for line in (files("outrider") / "demo" / "heldout.jsonl").read_text().splitlines()]
    for domain in demo.DOMAINS:
        lines = []
        for row in (r for r in rows if r["domain"] == domain):
            answer = {"role": "assistant", "content": row["reference"]}
            kept = {"messages": [*row["messages"], answer]} if "messages" in row else {"text": row["text"]}
            lines.append(json.dumps(kept) + "\n")
        (place / f"{domain}.jsonl").write_text("".join(lines), encoding="utf-8")
    for stage in recipe.STAGES.values():
        monkeypatch.setitem(stage, "steps", 2)
    for name, value in {"rows": 2, "length": 64, "warmup": 1, "prompts": 1, "evaluate": 2, "bf16": False}.items():
        monkeypatch.setitem(recipe.SHARED, name, value)
    monkeypatch.setattr(recipe, "PRETRAIN", 3_000_000)
    return tmp_path


@pytest.mark.parametrize("name", ["mamba-0.5m", "llama-0.5m"])
def test_the_stages_and_what_ships(name: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["drafters", name, "--work", str(work), "--threads", str(torch.get_num_threads())])
    recipe.main()
    place = work / "shipped"
    place.mkdir()
    recipe.ship(name, place, work)
    config = json.loads((place / "config.json").read_text())
    assert config["outrider_stages"] == ["pretrain", "sft", "forward-kl"]
    net: Any = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
    assert net.dtype == torch.bfloat16
    assert 450_000 < sum(p.numel() for p in net.parameters()) < 600_000
    card = (place / "README.md").read_text()
    assert all(f"| {stage} | 2 |" in card for stage in recipe.STAGES)
    llm = outrider.load("demo", f"{'mamba' if 'mamba' in name else 'model'}:{place}")
    assert llm.generate("Once upon", max_new_tokens=4, seed=0)[0].usage.drafted > 0


def test_the_later_stages_read_the_documents_of_the_other_drafters(work: Path) -> None:
    assert len(recipe.texts("pretrain", work)) >= len(recipe.texts("sft", work)) == len(demo.documents(work)) > 100


def test_the_other_tokenizer_spells_its_texts(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [d for file in sorted((work / "documents" / "train").glob("*")) for d in file.read_text().splitlines()]
    monkeypatch.setattr(other, "sample", lambda work: iter(texts))
    other.stand_in(work / "target", work)
    tokenizer = load_tokenizer(str(work / "target"))
    assert len(tokenizer) <= other.VOCAB
    assert isinstance(tokenizer.backend_tokenizer.decoder, decoders.Sequence)
    spelling = Spelling.of(tokenizer, "here")
    for text in ("Two  words, 12.", "na\u00efve \u6771"):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert b"".join(spelling.bytes_of(t) or b"" for t in tokens) == b" " + text.encode()
        assert tokenizer.decode(tokens) == text
    documents = list(read([work / "documents" / "train" / "gsm8k.jsonl"], tokenizer))
    assert documents[0].tokens[0] == tokenizer.bos_token_id
