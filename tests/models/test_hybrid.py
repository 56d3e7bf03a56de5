"""Hybrids as drafters: their drafts against whole-text passes without a cache, and states that cannot be cloned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from mamba_world import TEXTS, VOCAB, path, small_target
from torch import Tensor

from outrider import drafters
from outrider.backends.torch.attention import switched
from outrider.backends.torch.families import experts_of
from outrider.budgets.budgeter import FixedBudget
from outrider.core.noise import GumbelNoise
from outrider.core.protocols import Round, Target, TargetOutput
from outrider.core.types import Budget, DraftTree, Rows
from outrider.drafters import _hybrid as hybrid
from outrider.drafters._hybrid import HybridDrafter
from outrider.engine import Engine, Request, generate
from outrider.params import InputError, Sampling

SHARED = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "initializer_range": 0.3, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": 256}
PLAIN, BOTH = {**SHARED, **HEADS}, {**SHARED, **HEADS, "num_key_value_heads": 2}
ONE = {"mamba_d_state": 4, "mamba_dt_rank": 1}
TWO = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 8}
TYPES = ["linear_attention", "full_attention"]
DELTA = {
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "layer_types": TYPES,
}  # fmt: skip
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
LOCAL = {"num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "Bamba": {**PLAIN, **TWO, "attn_layer_indices": [1]},
    "FalconH1": {**PLAIN, **TWO, "mamba_d_ssm": 32},
    "FalconMamba": {**SHARED, "state_size": 4, "time_step_rank": 1},
    "GraniteMoeHybrid": {**PLAIN, **TWO, "num_local_experts": 2, "shared_intermediate_size": 16, "layer_types": TYPES},
    "Jamba": {**PLAIN, **ONE, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2": {**PLAIN, "layer_types": ["conv", "full_attention"]},
    "MiniMax": {**PLAIN, "layer_types": TYPES, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
    "NemotronH": {
        **PLAIN, "head_dim": 8, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4, "ssm_state_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1,
        "chunk_size": 8, "n_routed_experts": 2, "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8,
    },
    "OlmoHybrid": {**PLAIN, **DELTA},
    "Qwen3Next": {**PLAIN, **DELTA, **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 8},
    "Zamba": {
        **BOTH, **ONE, "n_mamba_heads": 2, "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "Zamba2": {
        **BOTH, "n_mamba_heads": 4, "mamba_d_state": 4, "chunk_size": 8, "num_hidden_layers": 3, "adapter_rank": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
}  # fmt: skip
PROVED: dict[str, dict[str, Any]] = {  # relatives of the above, whose proof at load is enough here
    "BailingHybrid": {
        **BOTH, **LATENT, **LOCAL, "q_lora_rank": 8, "head_dim": 4, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "layer_group_size": 2, "num_mtp_layers": 0, "layer_types": TYPES,
    },
    "KimiLinear": {**BOTH, **LATENT, **LOCAL, "linear_head_dim": 4, "linear_num_heads": 2, "layer_types": TYPES},
    "Lfm2Moe": {**PLAIN, **EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "Lfm3": {**PLAIN, "head_dim": 8, "layer_types": ["conv", "full_attention"]},
    "Qwen3_5": {**PLAIN, **DELTA, "head_dim": 8},
    "Qwen3_5Moe": {**PLAIN, **DELTA, **EXPERTS, "head_dim": 8, "shared_expert_intermediate_size": 8},
    "Zaya": {**PLAIN, "head_dim": 8, "num_experts": 2, "moe_intermediate_size": 8, "router_hidden_size": 8},
    "xLSTM": {**SHARED, "hidden_size": 128, "num_heads": 2, "chunk_size": 8, "num_blocks": 2},
}  # fmt: skip
GRIFFIN = {
    **SHARED, "num_attention_heads": 2, "intermediate_size": 24, "lru_width": 16, "attention_window_size": 64,
    "num_hidden_layers": 3,
}  # fmt: skip
BUDGET = Budget(10, 4)
STACKED = hybrid.stacked


def net(kind: str, config: dict[str, Any]) -> Any:
    """In float64. Weights that a family's own initialisation leaves small are random too, so that states matter."""
    torch.manual_seed(2)
    shape = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
    made = getattr(transformers, f"{kind}ForCausalLM")(shape(**config)).double().eval()
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() > 1 and p.std() < 0.05:
                p.normal_(0, 0.3)
    return made


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


def load(kind: str, target: Target, place: Path, options: str = "") -> HybridDrafter:
    net(kind, KINDS[kind]).save_pretrained(place / kind)
    drafter = drafters.load(f"mamba:{place / kind}{options}", target).uncalibrated
    assert isinstance(drafter, HybridDrafter)
    return drafter


class Whole:
    """The model over whole texts, without a cache."""

    def __init__(self, made: Any):
        self.net, self.known = made, dict[tuple[int, ...], Tensor]()

    def after(self, text: Sequence[int]) -> Tensor:
        key = tuple(text)
        if key not in self.known:
            with torch.no_grad(), switched(self.net.config, None, experts_of(self.net)):
                self.known[key] = self.net(torch.tensor([key]), use_cache=False).logits[0, -1]
        return self.known[key]


def rows_of(texts: list[list[int]], temperature: float) -> Rows:
    b, start = len(texts), tuple(len(t) - 1 for t in texts)
    root = tuple(t[-1] for t in texts)
    samplings = (Sampling(temperature),) * b
    return Rows(root, start, tuple(range(b)), (0,) * b, samplings, "coupled", (60,) * b,
                GumbelNoise(VOCAB))  # fmt: skip


def check(full: Whole, texts: list[list[int]], rows: Rows, tree: DraftTree, most: int) -> None:
    """Every child is among the candidates that the model, run over the whole text and path, ranks best."""
    for b, text in enumerate(texts):
        assert int(tree.size[b]) > 1
        for node in range(1, int(tree.size[b])):
            scores = full.after(text + path(tree, b, int(tree.parents[b, node])))
            if temperature := rows.sampling[b].temperature:
                noise = torch.from_numpy(rows.noise(int(tree.depths[b, node]))[b])
                scores = scores.log_softmax(-1) + temperature * noise
            least = scores.topk(most).values[-1]
            assert scores[int(tree.tokens[b, node])] > least - 0.01  # Zamba-2: see hybrid.ALLOWED


def accept(tree: DraftTree, rows: Rows, dice: random.Random) -> Round:
    """A round in which every row accepts the path to a node of its own, and the target adds a token."""
    paths = []
    for b in range(len(rows)):
        nodes = [dice.randrange(int(tree.size[b]))]
        while nodes[0]:
            nodes.insert(0, int(tree.parents[b, nodes[0]]))
        paths.append(nodes)
    following = [dice.randrange(VOCAB) for _ in paths]
    tokens = [
        [int(tree.tokens[b, n]) for n in p[1:]] + [t] for b, (p, t) in enumerate(zip(paths, following, strict=True))
    ]
    return Round(rows, tree, TargetOutput(np.zeros((len(rows), 1, VOCAB))), paths, following, tokens)


def lived(drafter: Any, temperature: float, most: int, turns: int = 3) -> None:
    """Ragged rows through rounds of partial acceptance; rows change places, fork, and one joins."""
    full, dice = Whole(drafter.net), random.Random(5)
    texts = [[*t, 7 + i] for i, t in enumerate(TEXTS[:2])]
    drafting = drafter.open([t[:-1] for t in texts], 128)
    drafting.pending = [t[-1:] for t in texts]
    for turn in range(turns):
        rows = rows_of(texts, temperature)
        tree = drafting.propose(rows, BUDGET)
        check(full, texts, rows, tree, most)
        done = accept(tree, rows, dice)
        drafting.observe(done)
        texts = [text + new for text, new in zip(texts, done.tokens, strict=True)]
        if turn == 1:
            other = drafter.open([TEXTS[2]], 128)
            other.pending = [[3]]
            drafting.join(other)
            drafting.select([2, 0, 0])
            texts = [[*TEXTS[2], 3], list(texts[0]), list(texts[0])]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_equal_those_of_full_passes(kind: str, target: Target, tmp_path: Path) -> None:
    """Chains and trees; and whatever was drafted, the text is that of plain decoding."""
    tree = load(kind, target, tmp_path, "?top_k=3")
    lived(tree, 0.0, 3)
    chain = HybridDrafter(tree.net, tree.words, drafters._growth.Growth("chain"))
    lived(chain, 0.0, 1)
    texts = []
    for drafter in (drafters.load("none", target), tree):
        engine = Engine(target, drafter, FixedBudget(8, 3), GumbelNoise(VOCAB))
        requests = [Request(t, i, 12, Sampling(0.0)) for i, t in enumerate(TEXTS[:2])]
        texts.append({p.row.index: p.row.output for p in generate(engine, requests)})
    assert texts[0] == texts[1]


@pytest.mark.parametrize("options", ["?tree=best&top_k=3&width=2", "?tree=static&shape=3,2,1"])
@pytest.mark.parametrize("kind", ["Jamba", "FalconH1"])
def test_every_shape_and_temperature(kind: str, options: str, target: Target, tmp_path: Path) -> None:
    """Best first, nodes of several depths are expanded in one step."""
    lived(load(kind, target, tmp_path, options), 1.0, 3)


@pytest.mark.parametrize("kind", PROVED)
def test_relatives_pass_the_proof(kind: str) -> None:
    hybrid.check(net(kind, PROVED[kind]))


def test_a_long_stretch_without_drafts(target: Target, tmp_path: Path) -> None:
    drafter = load("Bamba", target, tmp_path, "?tree=chain")
    drafting: Any = drafter.open([TEXTS[0], TEXTS[1]], 256)
    more = torch.randint(0, VOCAB, (2, hybrid.LONG + 5)).tolist()
    drafting.pending = [more[0], more[1][:3]]
    texts = [TEXTS[0] + more[0], TEXTS[1] + more[1][:3]]
    rows = rows_of(texts, 0.0)
    check(Whole(drafter.net), texts, rows, drafting.propose(rows, BUDGET), 1)


def test_a_batch_too_large_is_refused(target: Target, tmp_path: Path) -> None:
    drafter = load("Lfm2", target, tmp_path, "?tree=static&shape=4,4,1&batch=16")
    texts = [TEXTS[0], TEXTS[0]]
    drafting: Any = drafter.open([t[:-1] for t in texts], 64)
    drafting.pending = [t[-1:] for t in texts]
    with pytest.raises(InputError, match="32 states in one pass, and at most 16"):
        drafting.propose(rows_of(texts, 0.0), Budget(40, 3))


def forgetful(parts: Sequence[Any]) -> Any:
    """A copy without its recurrent state."""
    made = STACKED(parts)
    for layer in made.layers:
        if getattr(layer, "recurrent_states", None):
            layer.recurrent_states = {i: s.zero_() for i, s in layer.recurrent_states.items()}
    return made


def shared(parts: Sequence[Any]) -> Any:
    """A copy that is none where there is one cache, and whose state is written to in place."""
    return hybrid.mapped(parts, lambda rows: rows[0].expand(len(rows), *rows[0].shape[1:]))


@pytest.mark.parametrize("lie", [forgetful, shared])
def test_a_cache_that_lies(lie: Any, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "stacked", lie)
    with pytest.raises(InputError, match="the state of bamba cannot be cloned"):
        load("Bamba", target, tmp_path)


@pytest.mark.parametrize(
    ("kind", "config", "sentence"),
    [
        ("RecurrentGemma", GRIFFIN, "the state of recurrent_gemma cannot be cloned .its forward returns none"),
        ("Rwkv", {**SHARED, "context_length": 64}, "the state of rwkv cannot be cloned: a copy's logits"),
        ("Llama", PLAIN, "not llama; model:DIR is for those"),
    ],
)
def test_what_is_refused(kind: str, config: dict[str, Any], sentence: str) -> None:
    """Griffin keeps its state in its modules; a stock RWKV that reads one token mixes the rows of a batch."""
    with pytest.raises(InputError, match=sentence):
        hybrid.check(net(kind, config))
