"""The demo recipe in miniature: made-up sources in the real formats, a net of two tiny layers, six steps."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from recipes.demo import config, data, export, net, tokenizer, train

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT.parent / "shared" / "data" / "train"
CHAT = [
    {"role": "user", "content": "Is 12 + 30 = 42?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Sure?"},
]


def sentences(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    words = "the cat sat on a mat and saw 3 red hats in my old house near town"
    return [" ".join(draw.choices(words.split(), k=9)) + f" {draw.randrange(10**6)}." for _ in range(count)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Every source file, small and made up."""
    folder = tmp_path_factory.mktemp("texts")
    s = sentences(0, 4000)
    two = [f"User: {a}\nBot: {b}\nUser: {c}\nBot: {a}" for a, b, c in zip(s, s[1:], s[2:], strict=False)][:300]
    rows = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": f"{b} <<1+1=2>>2"}]}
        for a, b in zip(s[:400], s[400:800], strict=True)
    ]
    lines = "".join(json.dumps(r) + "\n" for r in rows)
    files = [
        f"# file: a/{i}.py\n" + "\n\n".join(f"x = '{t}'\ny = 1" for t in s[9 * i : 9 * i + 9]) + "\n"
        for i in range(200)
    ]
    texts = {
        "gsm8k_train.jsonl": lines,
        "oasst_en100_trees.jsonl": lines,
        "self_dialogue.txt": "\n\n".join(two),
        "sgd_train.txt": "\n\n".join(two),
        "cpython_3_11_7_stdlib.txt": "".join(files),
        "thealgorithms_python.txt": "".join(files),
        "tldr_pages_en.md": "\n\n".join(
            f"# tool{i}\n\n> {t}\n\n- {t}\n\n`tool{i} {{{{x}}}}`" for i, t in enumerate(s[:400])
        ),
        "tinystories_1000.txt": "\n".join(" ".join(s[3 * i : 3 * i + 3]) for i in range(300)),
        "classic_books_en.txt": "".join(
            f"\n# An Author/Book {i}\n\n" + "\n\n".join(s[70 * i : 70 * i + 70]) + "\n" for i in range(50)
        ),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "SOURCES.json").write_text(json.dumps([{"file": n, "licence": "CC0", "repo": "made/up"} for n in texts]))
    return folder


@pytest.fixture(scope="module")
def work(sources, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    data.write_split(sources, folder)
    tokenizer.save(tokenizer.train(tokenizer.sample(folder, 20_000), vocab=400), folder / "tokenizer")
    data.write_tokens(folder, tokenizer.build(folder))
    return folder


@pytest.fixture(scope="module")
def tok(work):
    return tokenizer.build(work)


TINY = config.Recipe(
    "target",
    layers=2,
    steps=6,
    hidden=32,
    intermediate=48,
    heads=2,
    head_dim=16,
    vocab=400,
    blocks=2,
    rows=2,
    warmup=2,
    cooldown=0.5,
    long=0.34,
    compile=False,
)


def losses(recipe, work, **options) -> list[str]:
    lines: list[str] = []
    train.train(recipe, work, say=lines.append, **options)
    return [line.split(" grad")[0] for line in lines if " loss " in line]


def copy_of(work: Path, folder: Path) -> Path:
    (folder / "tokens").symlink_to(work / "tokens")
    return folder


def test_an_interrupted_run_continues_bit_for_bit(work, tmp_path_factory):
    full, parts = (copy_of(work, tmp_path_factory.mktemp(n)) for n in ("whole", "parts"))
    assert TINY.length(2) == 512
    assert TINY.length(5) == 1024
    expected = losses(TINY, full)
    losses(TINY, parts, stop=3)
    assert losses(TINY, parts) == expected
    a, b = (torch.load(f / "target" / "checkpoint.pt", weights_only=True) for f in (full, parts))
    assert a["step"] == b["step"] == 6
    assert torch.load(full / "target" / "plateau.pt", weights_only=True)["step"] == 3
    for kind in ("net", "first", "second"):
        assert all(torch.equal(a[kind][name], b[kind][name]) for name in a[kind])


def test_a_teachers_distribution_is_learnt(work, tmp_path):
    folder = copy_of(work, tmp_path)
    losses(TINY, folder, stop=1)
    student = dataclasses.replace(TINY, name="draft", layers=1, teacher="target", taught=0.5)
    recipes = train.RECIPES.copy()
    train.RECIPES["target"] = TINY
    try:
        said: list[str] = []
        train.train(student, folder, say=said.append)
    finally:
        train.RECIPES.update(recipes)
    assert any("target's distribution" in line for line in said)


def test_a_batch_depends_on_seed_and_step_alone(work):
    short, longer = (data.Schedule(work, 1, 4, steps) for steps in (10, 500))
    other = data.Schedule(work, 2, 4, 10)
    for step in (0, 9):
        assert (short.batch(step, 512) == longer.batch(step, 512)).all()
    assert short.batch(3, 512).shape == (8, 513)
    assert short.batch(3, 1024).shape == (4, 1025)
    assert not (short.batch(3, 512) == other.batch(3, 512)).all()


def test_the_lean_net_is_the_stock_model():
    from transformers import LlamaForCausalLM

    lean = net.Net(dataclasses.replace(TINY, heads=4, kv_heads=2), torch.float32)
    for p in (lean.norm1, lean.norm2, lean.norm):
        torch.nn.init.uniform_(p, 0.5, 1.5)
    stock = LlamaForCausalLM(net.stock_config(lean.recipe)).eval()
    missing, unexpected = stock.load_state_dict(lean.stock_state(), strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    stock.tie_weights()
    tokens = torch.randint(0, 400, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(lean.logits(tokens), stock(tokens).logits, rtol=1e-4, atol=1e-4)


def test_muon_makes_updates_orthogonal():
    draw = torch.Generator().manual_seed(0)
    for shape in ((2, 24, 64), (2, 64, 24)):
        values = torch.linalg.svdvals(train.orthogonal(torch.randn(shape, generator=draw)))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_the_rate_warms_up_stays_and_falls_to_nothing():
    r = config.TARGET
    assert r.rate(0) < 0.05
    assert r.rate(r.warmup) == 1.0 == r.rate(r.steps // 2)
    assert 0 < r.rate(r.steps - 1) < 0.01


def test_held_out_documents_are_not_trained_on(work):
    for domain in data.SOURCES:
        check_disjoint(work, domain)


@pytest.mark.skipif(not REAL.exists(), reason="the training texts (../shared/data/train) are not on this machine")
@pytest.mark.parametrize("domain", ["gsm8k", "oasst", "stories", "algorithms", "tldr"])
def test_held_out_documents_of_the_real_texts_are_not_trained_on(domain, tmp_path):
    data.write_split(REAL, tmp_path, (domain,))
    check_disjoint(tmp_path, domain)


def check_disjoint(work: Path, domain: str) -> None:
    kept, held = (list(data.documents(work, part, domain)) for part in ("train", "heldout"))
    assert len(held) >= data.HELD_OUT_LEAST
    assert len(kept) > 20
    assert not {d.group for d in kept} & {d.group for d in held}
    assert not {" ".join(d.content.split()) for d in kept} & {" ".join(d.content.split()) for d in held}


def test_stretches_join_to_the_text_and_are_cut_at_blank_lines():
    text = "\n\n".join(f"line {i}\n  more" for i in range(50)) + "\n"
    pieces = data.stretches(text, 100)
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert all(p.endswith("\n\n") and len(p) <= 120 for p in pieces[:-1])


def test_dialogue_lines_become_turns_of_two_roles(tmp_path):
    (tmp_path / "d.txt").write_text("Bot: hello\nUser: a: b\nUser: c\nand so on\nBot: d\n\nUser: alone\n")
    (only,) = data.dialogues("sgd", tmp_path / "d.txt")
    assert only.messages == (("user", "a: b\nc\nand so on"), ("assistant", "d"))


@pytest.mark.parametrize(
    "text", ["plain words 1234", "Zoë 日本語 🙂 naïve", "def f(x):\n\treturn x**2\n\n\n", "  a  b\r\n\x00", ""]
)
def test_the_tokenizer_gives_back_every_text(tok, text):
    ids = tok(text, add_special_tokens=False)["input_ids"]
    assert tok.decode(ids, clean_up_tokenization_spaces=False) == text
    assert tok(text)["input_ids"] == [tok.bos_token_id, *ids]


def test_digits_stay_alone(tok):
    assert tok.tokenize("12345") == list("12345")


def test_the_chat_template_writes_what_training_reads(tok):
    written = tok.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert written == (
        "<|begin|><|user|>Is 12 + 30 = 42?<|end|><|assistant|>Yes.<|end|><|user|>Sure?<|end|><|assistant|>"
    )
    ids = tok(written, add_special_tokens=False)["input_ids"]
    document = data.Document("gsm8k", "g", messages=tuple((m["role"], m["content"]) for m in CHAT))
    assert ids == [*data.encode(tok, document), tok.convert_tokens_to_ids("<|assistant|>")]
    system = tok.apply_chat_template([{"role": "system", "content": "Be brief."}, *CHAT[:1]], tokenize=False)
    assert system == "<|begin|><|user|>Be brief.\n\nIs 12 + 30 = 42?<|end|>"
    with pytest.raises(Exception, match="roles system, user and assistant, not tool"):
        tok.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_the_export_is_a_stock_folder_with_cards(sources, work, tmp_path, monkeypatch):
    from recipes.demo import card
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = copy_of(work, tmp_path)
    for name in ("tokenizer", "documents"):
        (folder / name).symlink_to(work / name)
    recipes = {"target": TINY, "draft": dataclasses.replace(TINY, name="draft", layers=1)}
    for module in (export, card):
        monkeypatch.setattr(module, "RECIPES", recipes)
    for recipe in recipes.values():
        losses(recipe, folder, stop=1)
    export.export(sources, folder, tmp_path / "demo", tuple(recipes))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "target")
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == model.config.eos_token_id
    assert AutoTokenizer.from_pretrained(tmp_path / "demo" / "draft").eos_token == "<|end|>"
    monkeypatch.setattr(card, "SAMPLE_TOKENS", 4)
    monkeypatch.setattr(card, "evaluate", lambda *a, f=card.evaluate: f(*a, limit=2))
    card.write_cards(sources, folder, tmp_path / "demo")
    text = (tmp_path / "demo" / "target" / "README.md").read_text()
    assert "| **all** |" in text
    assert "What it is not" in text
    assert "gsm8k-0" in text


def test_held_out_prompts_come_from_held_out_documents(sources, work, tmp_path):
    export.write_heldout(sources, work, tmp_path / "heldout.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().split("\n") if line]
    for domain in data.SOURCES:
        mine = [r for r in rows if r["domain"] == domain]
        assert 3 <= len(mine) <= export.PROMPTS
        held = [d.content for d in data.documents(work, "heldout", domain)]
        for row in mine:
            assert row["reference"]
            assert row["licence"]
            first = row["messages"][0]["content"] if "messages" in row else row["text"]
            assert any(first in content for content in held)
            assert "messages" not in row or row["messages"][-1]["role"] == "user"
