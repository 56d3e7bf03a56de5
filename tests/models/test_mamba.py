"""Mamba drafters: their drafts against whole-text passes, foreign layouts, bounds, memory, and the meta device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mamba_world import TEXTS, VOCAB, path, small_target
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from outrider import drafters, hub
from outrider.backends.torch import load_target
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Target
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters._words import Same
from outrider.drafters.mamba import MambaDrafter, StateBuffer
from outrider.engine import Batch, Engine, Request, Row, generate
from outrider.nets import mamba as ssm
from outrider.params import InputError, Sampling

KINDS = ["mamba", "mamba2"]


def net(kind: str, vocab: int = VOCAB, hidden: int = 16, **changes: Any) -> Any:
    torch.manual_seed(2)
    shared = {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": 2, "initializer_range": 0.4}
    if kind == "mamba":
        return MambaForCausalLM(MambaConfig(**{**shared, "state_size": 4, "time_step_rank": 1, **changes})).eval()
    heads = {"num_heads": 2 * hidden // 4, "head_dim": 4, "state_size": 4, "n_groups": 1}
    return Mamba2ForCausalLM(Mamba2Config(**{**shared, **heads, **changes})).eval()


def folder(made: Any, place: Path) -> str:
    made.save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


def load(spec: str, target: Target) -> MambaDrafter:
    drafter = drafters.load(spec, target).uncalibrated
    assert isinstance(drafter, MambaDrafter)
    return drafter


def watched(target: Target, drafter: Any, temperature: float, rule: str, budget: FixedBudget) -> Any:
    """(texts with their roots, rows, tree) of every drafting round of a ragged batch that rows join and leave, with
    rounds that draft nothing between."""
    engine = Engine(target, drafter, budget, GumbelNoise(VOCAB), rule)
    requests = [Request(t, i, 9 if i == 1 else 60, Sampling(temperature)) for i, t in enumerate(TEXTS)]
    batch, _ = Batch.start(engine, [Row(r, i) for i, r in enumerate(requests[:2])])
    assert batch is not None
    for turn in range(7):
        if turn == 2:
            batch = batch.join(Batch.start(engine, [Row(requests[2], 2)])[0])
        if turn in (3, 4):
            batch.engine = replace(engine, budget=FixedBudget(1, 0))
            batch.round()
            batch.engine = engine
            continue
        results: list[tuple[Rows, DraftTree]] = []
        inner, drafting = batch.drafting.propose, batch.drafting

        def seen(rows: Rows, budget: Budget, inner: Any = inner, results: Any = results) -> DraftTree:
            results.append((rows, inner(rows, budget)))
            return results[-1][1]

        drafting.propose = seen
        batch = batch.leave()
        assert batch is not None
        texts = [[*row.request.prompt, *row.output] for row in batch.rows]
        batch.round()
        del drafting.propose
        yield texts, *results[0]


def law_after(made: Any, text: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return made.lm_head(ssm.run(made, torch.tensor([list(text)]), ssm.empty(made, 1))[0])[0, -1]


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options", ["?tree=chain", "?top_k=3", "?tree=best&top_k=3&width=2", "?tree=static&shape=3,2,1"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_equal_those_of_full_passes(
    kind: str, options: str, temperature: float, target: Target, tmp_path: Path
) -> None:
    """Every child is among the candidates that the model, run over the whole text and path, ranks best."""
    where = folder(net(kind).double(), tmp_path / "net")
    drafter = load(f"mamba:{where}{options}", target)
    most = 1 if "chain" in options else 3
    for texts, rows, tree in watched(target, drafter, temperature, "coupled", FixedBudget(10, 4)):
        for b, text in enumerate(texts):
            assert int(tree.size[b]) > 1
            for node in range(1, int(tree.size[b])):
                above = int(tree.parents[b, node])
                logits = law_after(drafter.net, text + path(tree, b, above))
                depth = int(tree.depths[b, node])
                if temperature:
                    logits = logits.log_softmax(-1) + temperature * torch.from_numpy(rows.noise(depth)[b])
                assert int(tree.tokens[b, node]) in logits.topk(most).indices.tolist()


@torch.no_grad()
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_trees_keep_their_distributions(kind: str, replacement: bool, target: Target, tmp_path: Path) -> None:
    where = folder(net(kind).double(), tmp_path / "net")
    drafter = load(f"mamba:{where}?tree=static&shape=3,2&replacement={str(replacement).lower()}", target)
    twins = 0
    for texts, _, tree in watched(target, drafter, 1.0, "rejection", FixedBudget(10, 2)):
        assert tree.q is not None
        assert tree.replacement == replacement
        for b, text in enumerate(texts):
            for node in range(tree.q.shape[1]):
                truth = law_after(drafter.net, text + path(tree, b, node)).softmax(-1)
                assert np.allclose(tree.q[b, node], truth.numpy(), atol=1e-10)
                children = [int(tree.tokens[b, c]) for c in range(1, tree.nodes) if int(tree.parents[b, c]) == node]
                twins += len(children) - len(set(children))
    assert (twins > 0) == replacement


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_agrees_accepts_everything(kind: str, temperature: float, tmp_path: Path) -> None:
    """A target of one token's memory, and a Mamba whose state has no effect: their distributions are equal."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=None, bos_token_id=None, initializer_range=0.5, rms_norm_eps=1e-5,
    )  # fmt: skip
    llama, made = LlamaForCausalLM(config).double().eval(), net(kind, tie_word_embeddings=False).double()
    with torch.no_grad():
        for layer in llama.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for block in made.backbone.layers:
            block.mixer.out_proj.weight.zero_()
        made.backbone.embeddings.weight.copy_(llama.model.embed_tokens.weight)
        made.lm_head.weight.copy_(llama.lm_head.weight)
    target = load_target(llama)
    drafter = load(f"mamba:{folder(made, tmp_path / 'net')}?tree=chain", target)
    engine = Engine(target, drafter, FixedBudget(5, 4), GumbelNoise(VOCAB))
    requests = [Request(t, 3 + i, 41, Sampling(temperature)) for i, t in enumerate(TEXTS)]
    rows = [piece.row for piece in generate(engine, requests) if piece.row.finish]
    assert len(rows) == 3
    assert all(row.usage.tau == 5.0 for row in rows)


def authors(made: Any, place: Path, pickled: bool = False, **changes: Any) -> Path:
    """A model of transformers in the layout of mamba_ssm."""
    c, mixer = made.config, {"d_state": made.config.state_size}
    if c.model_type == "mamba2":
        mixer |= {"layer": "Mamba2", "headdim": c.head_dim, "ngroups": c.n_groups}
    else:
        mixer |= {"dt_rank": int(c.time_step_rank)}
    given = {
        "d_model": c.hidden_size, "n_layer": c.num_hidden_layers, "vocab_size": c.vocab_size - 3, "ssm_cfg": mixer,
        "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 8, **changes,
    }  # fmt: skip
    place.mkdir()
    (place / "config.json").write_text(json.dumps(given))
    tensors = {k.replace("embeddings", "embedding"): v.clone() for k, v in made.state_dict().items()}
    if pickled:
        torch.save(tensors, place / "pytorch_model.bin")
    else:
        save_file({k: v for k, v in tensors.items() if k != "lm_head.weight"}, place / "model.safetensors")
    return place


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_authors_layout(kind: str, pickled: bool, target: Target, tmp_path: Path) -> None:
    made = net(kind, tie_word_embeddings=True).double()
    drafter = load(f"mamba:{authors(made, tmp_path / 'authors', pickled)}", target)
    text = TEXTS[2]
    assert torch.allclose(law_after(drafter.net, text), law_after(made, text), atol=1e-12)


def test_a_folder_needs_no_method(target: Target, tmp_path: Path) -> None:
    made = net("mamba2").double()
    for where in (authors(made, tmp_path / "authors", ngroups=1), Path(folder(made, tmp_path / "stock"))):
        assert isinstance(drafters.load(str(where), target).uncalibrated, MambaDrafter)


def test_a_hub_id(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either layout: the snapshot is a folder."""
    import huggingface_hub

    made = net("mamba").double()
    places = {"some/authors": str(authors(made, tmp_path / "a")), "some/stock": folder(made, tmp_path / "b")}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: places[name])
    monkeypatch.setattr(hub, "ensure", lambda name, hint="": True)
    distributions = [law_after(load(f"mamba:{name}", target).net, TEXTS[0]) for name in places]
    assert torch.equal(*distributions)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"d_model": None}, "d_model"),
        ({"n_layer": 0}, "n_layer"),
        ({"ssm_cfg": [1]}, "ssm_cfg"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 5}}, "heads of 5"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 4, "dt_limit": [0]}}, "dt_limit"),
        ({"attn_layer_idx": [1]}, "attention layers"),
        ({"rms_norm": False}, "LayerNorm"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "Mamba3"),
        ({"ssm_cfg": {"d_gate": 4}}, "ssm_cfg.d_gate"),
        ({"ssm_cfg": {"d_state": 9}}, "A_log"),
    ],
)
def test_layouts_that_are_something_else(changes: dict, sentence: str, target: Target, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        load(f"mamba:{authors(net('mamba'), tmp_path / 'authors', **changes)}", target)


def test_vocabularies_padded_otherwise(tmp_path: Path) -> None:
    """The paper's own pair has 50,280 rows beside 50,432."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=50432, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        eos_token_id=None, bos_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    target = load_target(LlamaForCausalLM(config).eval())
    drafter = load(f"mamba:{folder(net('mamba', 50280, 8), tmp_path / 'net')}", target)
    prompt = [50431, 7, 50280, 12]  # tokens that the drafter does not have
    texts = []
    for which in (drafters.load("none", target), drafter):
        engine = Engine(target, which, FixedBudget(8, 3), GumbelNoise(50432))
        pieces = list(generate(engine, [Request(prompt, 1, 12, Sampling(t)) for t in (0.0, 1.0)]))
        texts.append({p.row.index: p.row.output for p in pieces})
    assert texts[0] == texts[1]


def test_a_vocabulary_too_far_off(target: Target, tmp_path: Path) -> None:
    where = folder(net("mamba", VOCAB + 600), tmp_path / "net")
    with pytest.raises(InputError, match="more apart than padding"):
        load(f"mamba:{where}", target)


@torch.no_grad()
def test_a_long_stretch_without_drafts(target: Target, tmp_path: Path) -> None:
    """What was not read meanwhile is read in pieces; the next draft is that of the whole text."""
    drafter = load(f"mamba:{folder(net('mamba2').double(), tmp_path / 'net')}?tree=chain", target)
    drafting: Any = drafter.open([TEXTS[0], TEXTS[1]], 512)
    more = torch.randint(0, VOCAB, (2, 2 * ssm.PIECE)).tolist()
    for row, tokens in zip(drafting.pending, more, strict=True):
        row.extend(tokens)
    logits = drafting._read(16)
    assert max(map(len, drafting.pending)) == 1
    for row, (text, rest) in enumerate(zip(TEXTS[:2], more, strict=True)):
        assert torch.allclose(logits[row, 0], law_after(drafter.net, [*text, *rest]), atol=1e-9)


def test_memory_is_constant_in_the_context(target: Target, tmp_path: Path) -> None:
    drafter = load(f"mamba:{folder(net('mamba2').double(), tmp_path / 'net')}", target)
    sizes = []
    for length in (5, 200):
        drafting = drafter.open([[1 + i % 40 for i in range(length)]], 256)
        sizes.append(drafting.state.bytes)
    assert sizes[0] == sizes[1] > 0


def test_a_batch_too_large_is_refused(target: Target, tmp_path: Path) -> None:
    where = folder(net("mamba").double(), tmp_path / "net")
    with pytest.raises(InputError, match="advances 25 states in one pass, and at most 20"):
        load(f"mamba:{where}?tree=static&shape=5,5,1&batch=20", target)
    with pytest.raises(InputError, match="batch must be at least 1"):
        load(f"mamba:{where}?batch=0", target)
    drafter = load(f"mamba:{where}?tree=static&shape=4,4,1&batch=20", target)
    engine = Engine(target, drafter, FixedBudget(40, 3), GumbelNoise(VOCAB))
    assert len(list(generate(engine, [Request(TEXTS[0], 1, 6, Sampling())]))) > 0
    with pytest.raises(InputError, match="32 states in one pass, and at most 20"):
        list(generate(engine, [Request(TEXTS[0], i, 20, Sampling()) for i in range(2)]))


def test_what_cannot_be_loaded(target: Target, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="more apart than padding"):  # the demo's, without a path
        drafters.load("mamba", target)
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                 num_attention_heads=1)).save_pretrained(tmp_path / "llama")  # fmt: skip
    with pytest.raises(InputError, match="not llama"):
        load(f"mamba:{tmp_path / 'llama'}", target)
    with pytest.raises(InputError, match="no precision 'int8'"):
        load(f"mamba:{tmp_path / 'llama'}?dtype=int8", target)


def one_step(made: Any, device: str) -> tuple[MambaDrafter, StateBuffer, Tensor, Tensor]:
    """A drafter of this network, states of two rows, and tokens and parents of three nodes each."""
    drafter = MambaDrafter(made, Same(VOCAB, VOCAB), drafters._growth.Growth())
    buffer = StateBuffer.like(ssm.empty(made, 2), 8)
    tokens = torch.ones(6, 1, dtype=torch.long, device=device)
    return drafter, buffer, tokens, torch.zeros(2, 3, dtype=torch.long, device=device)


def stepped(drafter: MambaDrafter, buffer: StateBuffer, tokens: Tensor, parents: Tensor) -> Tensor:
    logits, state = drafter.advance(tokens, buffer.take(parents))
    buffer.put(state, 1)
    return logits


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_never_waits_for_the_device(kind: str) -> None:
    """On the meta device nothing can be read back: what runs there can be captured as a CUDA graph."""
    assert stepped(*one_step(net(kind).to("meta"), "meta")).shape == (6, VOCAB)


@torch.no_grad()
@pytest.mark.skipif(not torch.cuda.is_available(), reason="capturing a CUDA graph needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_captured(kind: str) -> None:
    drafter, buffer, tokens, parents = one_step(net(kind).cuda(), "cuda")
    buffer.conv.zero_(), buffer.ssm.zero_()
    truth = stepped(drafter, buffer, tokens, parents).clone()
    buffer.conv.zero_(), buffer.ssm.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = stepped(drafter, buffer, tokens, parents)
    graph.replay()
    assert torch.allclose(result, truth)


def test_a_slab_grows_and_keeps(target: Target) -> None:
    state = ssm.State(torch.randn(2, 3, 4, 3), torch.randn(2, 3, 4, 5))
    buffer = StateBuffer.like(state, 1)
    buffer.put(state, 0)
    wider = buffer.grown(2)
    result = wider.take(torch.zeros(3, 1, dtype=torch.long))
    assert wider.nodes == 2
    assert torch.equal(result.conv, state.conv)
    assert torch.equal(result.ssm, state.ssm)
    assert replace(state).bytes == state.bytes
