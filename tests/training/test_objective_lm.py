"""Small language models as drafters: losses against documents one by one, stages that follow each other, folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from objective_world import VOCAB, packed, target, texts
from torch import Tensor

from outrider import drafters
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.engine import Engine, Request, generate
from outrider.nets import mamba as ssm
from outrider.params import InputError, Sampling
from outrider.training import checkpoint, data, loop, objectives
from outrider.training.data import Document
from outrider.training.features import see
from outrider.training.objectives._losses import DIVERGENCES
from outrider.training.recipe import Recipe

SIZES: dict[str, dict[str, Any]] = {
    "mamba": {"kind": "mamba", "hidden": 16, "layers": 2, "state": 4},
    "mamba2": {"kind": "mamba2", "hidden": 16, "layers": 2, "state": 4, "head": 8},
    "draft-lm": {"hidden": 16, "layers": 2, "heads": 2},
}
RECIPE = Recipe("mamba", steps=4, rows=2, length=32, lr=1e-2, warmup=1, evaluate=4, prompts=2, tokens=12)


def method(name: str) -> str:
    return "draft-lm" if name == "draft-lm" else "mamba"


def logits_alone(net: Any, tokens: list[int]) -> Tensor:
    if net.config.model_type in ssm.KINDS:
        return net.lm_head(ssm.run(net, torch.tensor([tokens]), ssm.empty(net, 1))[0])[0]
    return net(torch.tensor([tokens])).logits[0]


def by_hand(kind: str, student: Tensor, teacher: Tensor, token: int) -> float:
    q, p = student.softmax(-1).tolist(), teacher.softmax(-1)
    logs = p.log().tolist()
    if kind == "tokens":
        return -float(torch.tensor(q[token]).log())
    if kind == "tv":
        return 1 - sum(min(a, b) for a, b in zip(q, p.tolist(), strict=True))
    pairs = zip(q, p.tolist(), logs, strict=True)
    if kind == "forward-kl":
        return sum(b * (log - float(torch.tensor(a, dtype=torch.float64).log())) for a, b, log in pairs)
    return sum(a * (float(torch.tensor(a, dtype=torch.float64).log()) - log) for a, b, log in pairs)


@pytest.mark.parametrize("few", [0, 25])
@pytest.mark.parametrize("stage", ["pretrain", "sft", *DIVERGENCES])
@pytest.mark.parametrize("name", list(SIZES))
def test_losses_are_those_of_documents_alone(name: str, stage: str, few: int) -> None:
    of, options = target(), {**SIZES[name], "draft_vocab": few}
    options |= {"stage": "distil", "loss": stage} if stage in DIVERGENCES else {"stage": stage}
    torch.manual_seed(3)
    drafted = sorted(range(2, 2 + few)) or list(range(VOCAB))
    learned = Document(tuple(drafted), (True,) * len(drafted), "0")
    objective: Any = objectives.build(method(name), of, [learned], options)
    rows = [texts(1, [9, 5, 20]), texts(2, [30])]
    batch = packed(rows)
    loss, weight, parts = objective(batch, see(of, batch, objective.taps))
    total, count, right, asked = 0.0, 0, 0, 0
    with torch.no_grad():
        for tokens, learn in (text for row in rows for text in row):
            mine = logits_alone(objective.net, tokens)[:, drafted]
            theirs = of.model(torch.tensor([tokens])).logits[0, :, drafted]
            for i in range(len(tokens) - 1):
                if learn[i + 1] or stage == "pretrain":
                    asked += 1
                    if tokens[i + 1] not in drafted:
                        continue
                    kind, token = stage if stage in DIVERGENCES else "tokens", drafted.index(tokens[i + 1])
                    total += by_hand(kind, mine[i], theirs[i], token)
                    aim = int(theirs[i].argmax()) if stage in DIVERGENCES else token
                    right, count = right + (int(mine[i].argmax()) == aim), count + 1
    assert float(weight) == count
    assert few == 0 or 0 < count < asked
    assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
    assert float(parts["hit"]) == pytest.approx(right / asked)
    loss.backward()
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in objective.net.parameters())


@pytest.mark.parametrize("loss", list(DIVERGENCES))
def test_divergences_of_equal_distributions_are_zero(loss: str) -> None:
    a, b = torch.randn(5, 11, dtype=torch.float64), torch.randn(5, 11, dtype=torch.float64)
    assert float(DIVERGENCES[loss](a, a + 3).abs().max()) < 1e-6
    assert float(DIVERGENCES[loss](a, b).min()) > 1e-3


def documents(count: int = 24) -> list[Document]:
    """Counting up: a text that a small model learns at once."""
    made = []
    for i in range(count):
        tokens = tuple(1 + (i * 7 + j) % (VOCAB - 1) for j in range(20))
        made.append(Document(tokens, (False,) * 6 + (True,) * 14, f"{i:03d}"))
    return made


@pytest.mark.parametrize("few", [0, 40])
@pytest.mark.parametrize("name", list(SIZES))
def test_stages_follow_each_other(name: str, few: int, tmp_path: Path) -> None:
    of, last = target(torch.float32), ""
    for stage in ("pretrain", "sft", "distil"):
        options = {**SIZES[name], "stage": stage, "init": last, "loss": "tv", "draft_vocab": 0 if last else few}
        steps = 30 if stage == "pretrain" else 4
        recipe = replace(RECIPE, method=method(name), steps=steps, evaluate=steps, options=options)
        result = loop.train(of, documents(), tmp_path / stage, recipe, quiet=True)
        last = str(result.folder)
    config = json.loads((result.folder / "config.json").read_text(encoding="utf-8"))
    assert config["outrider_stages"] == ["pretrain", "sft", "tv"]
    lines = [json.loads(x) for x in (tmp_path / "pretrain" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    learned = [line["loss"] for line in lines if "loss" in line]
    assert learned[-1] < 0.8 * learned[0]
    assert len(config.get("outrider_draft_vocab", [])) == few
    spec, texts = f"{'model' if name == 'draft-lm' else 'mamba'}:{last}", []
    for given in ("none", spec, f"{spec}?tree=static&shape=2x2"):
        engine = Engine(of, drafters.load(given, of), FixedBudget(8, 3), GumbelNoise(VOCAB))
        pieces = list(generate(engine, [Request([5, 6, 7], 2, 20, Sampling(t)) for t in (0.0, 1.0)]))
        texts.append({p.row.index: p.row.output for p in pieces})
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("mamba", {"kind": "mamba3"}, "not 'mamba3'"),
        ("mamba", {"hidden": 20, "head": 32}, "do not divide"),
        ("mamba", {"stage": "finish"}, "a stage is pretrain, sft, distil"),
        ("draft-lm", {"loss": "kl"}, "forward-kl, reverse-kl, tv"),
        ("draft-lm", {"hidden": 30, "heads": 4}, "4 heads"),
        ("draft-lm", {"init": "nowhere/at/all"}, "nowhere/at/all"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        objectives.build(name, target(), [], options)


def test_a_draft_vocabulary_stays_with_its_folder(tmp_path: Path) -> None:
    of, learned = target(), [Document(tuple(range(40)), (True,) * 40, "0")]
    objectives.build("draft-lm", of, learned, {**SIZES["draft-lm"], "draft_vocab": 40}).save(tmp_path)
    with pytest.raises(InputError, match="drafts 40 tokens, not 20"):
        objectives.build("draft-lm", of, learned, {"init": str(tmp_path), "draft_vocab": 20})
    model: Any = drafters.load(f"model:{tmp_path}?scale=1", of)
    assert model.words.names.tolist() == list(range(40))
    assert model.model.vocab == 40
    with pytest.raises(InputError, match="learned to draft 40 of its tokens"):
        drafters.load(f"model:{tmp_path}?vocab=text", of)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for wrong, sentence in (([1, 1], "must be distinct token ids"), (["a"], "a list of token ids")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "outrider_draft_vocab": wrong}), encoding="utf-8")
        with pytest.raises(InputError, match=sentence):
            drafters.load(f"model:{tmp_path}", of)


@pytest.mark.parametrize("name", ["draft-lm", "mamba2"])
def test_a_run_goes_on_with_more_data_and_keeps_its_draft_vocabulary(tmp_path: Path, name: str) -> None:
    """Whatever is frequent in the new texts."""
    g = torch.Generator().manual_seed(7)
    drawn = [tuple(torch.randint(0, VOCAB // 2, (20,), generator=g).tolist()) for _ in range(12)]
    first = [Document(tokens, (True,) * 20, f"a{i}") for i, tokens in enumerate(drawn)]
    others = [Document(tuple(VOCAB - 1 - t for t in d.tokens), d.learn, f"b{d.key}") for d in first]
    recipe = replace(RECIPE, method=method(name), options={**SIZES[name], "draft_vocab": 12})
    loop.train(target(), first, tmp_path, recipe, stop=2, quiet=True)
    state = checkpoint.read(tmp_path / "checkpoint.pt")
    assert state is not None
    kept = state["module"]["ids"].tolist()
    result = loop.train(target(), [*first, *others, *others], tmp_path, recipe, quiet=True)
    saved = json.loads((result.folder / "config.json").read_text(encoding="utf-8"))["outrider_draft_vocab"]
    assert saved == kept
    assert max(kept) < VOCAB // 2


@pytest.mark.parametrize("name", list(SIZES))
def test_a_shape_that_the_folder_does_not_have_is_refused(tmp_path: Path, name: str) -> None:
    """And none need be given again."""
    of = target(torch.float32)
    objectives.build(method(name), of, (), SIZES[name]).save(tmp_path)
    begun: Any = objectives.build(method(name), of, (), {"init": str(tmp_path)})
    assert begun.net.config.hidden_size == 16
    objectives.build(method(name), of, (), {**SIZES[name], "init": str(tmp_path)})
    for option in SIZES[name]:
        wrong = {"kind": "mamba", "hidden": 96, "heads": 6}.get(option, 64)
        if (name, option) == ("mamba", "kind"):
            continue
        with pytest.raises(InputError, match=f"has {option}=.*; leave {option} out"):
            objectives.build(method(name), of, (), {option: wrong, "init": str(tmp_path)})


def test_pretraining_learns_from_parts_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long question before a short answer is in the rows; the other stages have no use for it."""
    packs: list[Any] = []
    monkeypatch.setattr(loop, "pack", lambda *given: packs.append(data.pack(*given)) or packs[-1])
    documents = [Document((*range(2, 60), i), (False,) * 58 + (True,), f"{i:03d}") for i in range(2, 26)]
    for stage in ("pretrain", "sft"):
        recipe = replace(RECIPE, steps=1, evaluate=1, length=16, options={**SIZES["mamba"], "stage": stage})
        loop.train(target(torch.float32), documents, tmp_path / stage, recipe, quiet=True)
    whole, _, answers, _ = (int((batch.documents >= 0).sum()) for batch in packs)
    assert answers % 11 == 0, "the last part of each document"
    assert whole == answers // 11 * 59


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    objectives.build("draft-lm", target(), [], SIZES["draft-lm"]).save(tmp_path)
    with pytest.raises(InputError, match="is a llama"):
        objectives.build("mamba", target(), [], {"init": str(tmp_path)})
