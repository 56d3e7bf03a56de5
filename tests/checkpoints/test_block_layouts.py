"""Folders of DFlash, DFlash 2, JetSpec and DSpark from their published key tables: read strictly, run as by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import layouts_foreign as foreign
import pytest
import torch
from layouts_foreign import HEADS, KV, LAYERS, LLAMA, D, H, V
from layouts_reference import rms, rotated
from torch import Tensor

from outrider import cli
from outrider.checkpoints import Checkpoint, Facts, method_of, native, read
from outrider.checkpoints.check import check
from outrider.checkpoints.write import write
from outrider.params import InputError

BLOCK, RANK, TAPS = 4, 6, (2, 5)
CONFIG = {**LLAMA, "num_hidden_layers": 2, "head_dim": D, "block_size": BLOCK}
DFLASH = {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 4]}}
DSPARK = {
    "architectures": ["Qwen3DSparkModel"], "mask_token_id": 60, "target_layer_ids": [1, 4], "markov_rank": RANK,
    "is_causal": True,
}  # fmt: skip
DFLASH2 = {
    "architectures": ["DFlash2DraftModel"], "is_causal": False,
    "dflash_config": {
        "mask_token_id": 60, "target_layer_ids": [1, 4], "conv_kernel_size": 2, "conv_group_size": 8,
        "selector_rank": RANK, "selector_top_k": 7,
    },
}  # fmt: skip


def tensors(markov: bool = False, second: bool = False) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 2 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(2):
        at = f"layers.{i}."
        shapes |= foreign.layer(at, H)
        shapes |= {f"{at}input_layernorm.weight": (H,)}
        shapes |= {f"{at}self_attn.{n}_norm.weight": (D,) for n in "qk"}
    if markov:
        shapes |= {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (V, RANK)}
        shapes |= {"confidence_head.proj.weight": (1, H + RANK), "confidence_head.proj.bias": (1,)}
    if second:
        shapes |= {f"candidate_selector.{name}_codebook": (V, RANK) for name in ("predecessor", "successor")}
        shapes |= {"candidate_selector.hidden_projection.weight": (RANK, H)}
        for at in (f"layers.{i}.{part}_conv." for i in range(2) for part in ("attention", "mlp")):
            shapes |= {f"{at}base_kernel": (2, 2, H), f"{at}kernel_projection.weight": (4 * H // 8, H)}
    return foreign.fill(shapes)


def mixed(p: dict[str, Tensor], name: str, side: int, given: Tensor, y: Tensor) -> Tensor:
    """One of DFlash 2's convolutions of the slots y, with the weights that `given` selects; y where there is none."""
    if f"{name}.base_kernel" not in p:
        return y
    made = []
    for j in range(len(y)):
        own = (p[f"{name}.kernel_projection.weight"] @ given[j]).view(2, 2, H // 8)
        taps = [
            (p[f"{name}.base_kernel"][side, o] + own[side, o].repeat_interleave(8)) * y[j - o] for o in (0, 1) if j >= o
        ]
        made.append(torch.stack(taps).sum(0))
    return torch.stack(made)


def reference(w: dict[str, Tensor], features: Tensor, slots: Tensor, causal: bool) -> Tensor:
    """Normed slot states, one slot and one head after the other."""
    context, x = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"]), slots
    first = len(features)
    for i in range(2):
        p = {name.removeprefix(f"layers.{i}."): t for name, t in w.items()}
        given, made = rms(x, p["input_layernorm.weight"]), []
        normed = mixed(p, "attention_conv", 0, given, given)

        def keys(y: Tensor, position: int, p: dict[str, Tensor] = p) -> tuple[Tensor, Tensor]:
            k, v = ((p[f"self_attn.{n}_proj.weight"] @ y).view(KV, D) for n in "kv")
            return rotated(rms(k, p["self_attn.k_norm.weight"]), position, 10000.0), v

        seen = [keys(y, t) for t, y in enumerate(context)] + [keys(y, first + j) for j, y in enumerate(normed)]
        for j, y in enumerate(normed):
            q = (p["self_attn.q_proj.weight"] @ y).view(HEADS, D)
            q = rotated(rms(q, p["self_attn.q_norm.weight"]), first + j, 10000.0)
            visible = seen[: first + j + 1] if causal else seen
            heads = []
            for h in range(HEADS):
                g = h // (HEADS // KV)
                scores = torch.stack([q[h] @ k[g] / math.sqrt(D) for k, _ in visible]).softmax(0)
                heads.append(scores @ torch.stack([v[g] for _, v in visible]))
            made.append(p["self_attn.o_proj.weight"] @ torch.cat(heads))
        x = x + mixed(p, "attention_conv", 1, given, torch.stack(made))
        given, made = rms(x, p["post_attention_layernorm.weight"]), []
        for n in mixed(p, "mlp_conv", 0, given, given):
            gate = torch.nn.functional.silu(p["mlp.gate_proj.weight"] @ n) * (p["mlp.up_proj.weight"] @ n)
            made.append(p["mlp.down_proj.weight"] @ gate)
        x = x + mixed(p, "mlp_conv", 1, given, torch.stack(made))
    return rms(x, w["norm.weight"])


def run(result: Checkpoint, features: Tensor, slots: Tensor) -> Tensor:
    of = native.network("block")
    net: Any = of.module(of.read(result.config, "the file")).double().eval()
    net.load_state_dict(result.tensors, strict=True)
    n, size = len(features), net.config.block
    turn = net.rope.at(torch.arange(n + size)[None], features.dtype)
    keys, values = net.keys_values(net.context(features[None]), turn[:, :n])
    seen = torch.ones(size, size, dtype=torch.bool)
    seen = seen.tril() if net.config.causal else seen
    own = torch.zeros(size, size, dtype=features.dtype).masked_fill_(~seen, -math.inf)
    mask = torch.cat([torch.zeros(size, n, dtype=features.dtype), own], 1)[None, None]
    return net(slots[None], turn[:, n:], keys, values, mask)[0].detach()


@pytest.mark.parametrize(
    ("config", "causal", "from_anchor", "layout"),
    [
        (DFLASH, False, False, "DFlash"),
        ({**DFLASH, "dflash_config": {**DFLASH["dflash_config"], "causal_head": True}}, True, False, "DFlash"),
        ({**DFLASH, "is_causal": True}, True, False, "DFlash"),
        (DSPARK, True, True, "DSpark"),
        (DFLASH2, False, False, "DFlash 2"),
    ],
)
def test_read(tmp_path: Path, config: dict[str, Any], causal: bool, from_anchor: bool, layout: str) -> None:
    raw = tensors(markov=layout == "DSpark", second=layout == "DFlash 2")
    checkpoint = read(foreign.folder(tmp_path, {**CONFIG, **config}, raw))
    assert (checkpoint.method, checkpoint.layout, method_of(tmp_path)) == ("block", layout, "block")
    assert (checkpoint.config["causal"], checkpoint.config["sample_from_anchor"]) == (causal, from_anchor)
    assert checkpoint.config["taps"] == list(TAPS)
    assert checkpoint.config["mask_token"] == 60
    features, slots = foreign.some(6, 2 * H, seed=3), foreign.some(BLOCK, H, seed=4)
    torch.testing.assert_close(
        run(checkpoint, features, slots), reference(raw, features, slots, causal), rtol=0, atol=1e-6
    )
    if layout == "DSpark":
        assert torch.equal(checkpoint.tensors["markov_w1.weight"], raw["markov_head.markov_w1.weight"])
        assert any("confidence_head" in note for note in checkpoint.notes)
    if layout == "DFlash 2":
        assert (checkpoint.config["pair_head"], checkpoint.config["pair_rank"], checkpoint.config["pair_top"]) == (
            "selector",
            RANK,
            7,
        )
        assert torch.equal(checkpoint.tensors["markov_w2.weight"], raw["candidate_selector.successor_codebook"])


def test_read_speculators(tmp_path: Path) -> None:
    """Its layers are counted as hidden states, and a draft vocabulary has a head of its own."""
    config = {
        "speculators_model_type": "dspark", "transformer_layer_config": CONFIG, "block_size": BLOCK,
        "aux_hidden_state_layer_ids": list(TAPS), "mask_token_id": 60, "is_causal": True, "sample_from_anchor": True,
    }  # fmt: skip
    raw = {**tensors(), **foreign.mapping(), "lm_head.weight": foreign.some(foreign.VD, H, seed=5)}
    checkpoint = read(foreign.folder(tmp_path, config, raw))
    assert method_of(tmp_path) == "block"
    assert checkpoint.config["taps"] == list(TAPS)
    assert checkpoint.config["draft_vocab"] == foreign.VD
    assert torch.equal(checkpoint.tensors["d2t"], raw["d2t"])


def test_token_ids_where_offsets_belong_are_refused(tmp_path: Path) -> None:
    config = {
        "speculators_model_type": "dspark", "transformer_layer_config": CONFIG, "block_size": BLOCK,
        "aux_hidden_state_layer_ids": list(TAPS), "mask_token_id": 60, "is_causal": True, "sample_from_anchor": True,
    }  # fmt: skip
    raw = {**tensors(), **foreign.mapping(), "lm_head.weight": foreign.some(foreign.VD, H, seed=5)}
    ids = raw["d2t"] + torch.arange(foreign.VD)
    with pytest.raises(InputError, match="holds token ids where offsets belong"):
        read(foreign.folder(tmp_path / "ids", config, {**raw, "d2t": ids}))
    alone = {name: tensor for name, tensor in raw.items() if name != "t2d"}
    assert torch.equal(read(foreign.folder(tmp_path / "alone", config, alone)).tensors["d2t"], raw["d2t"])


def test_read_dflash_2_of_speculators(tmp_path: Path) -> None:
    config = {
        "speculators_model_type": "dflash2", "transformer_layer_config": CONFIG, "block_size": BLOCK,
        "aux_hidden_state_layer_ids": list(TAPS), "mask_token_id": 60, "is_causal": False, "selector_top_k": 5,
    }  # fmt: skip
    checkpoint = read(foreign.folder(tmp_path, config, tensors(second=True)))
    assert checkpoint.layout == "speculators DFlash 2"
    assert (checkpoint.config["conv"], checkpoint.config["conv_group"], checkpoint.config["pair_top"]) == (2, 8, 5)
    assert not checkpoint.config["sample_from_anchor"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"is_causal": False, "dflash_config": {**DFLASH["dflash_config"], "causal_head": True}},
            "say which, as in block:DIR\\?causal=true",
        ),
        ({"dflash_config": {"mask_token_id": 61, "target_layer_ids": [1, 4]}}, "outside the vocabulary"),
        ({"dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 1]}}, "distinct layers"),
        ({"dflash_config": {"target_layer_ids": [1, 4]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 60}}, "target_layer_ids"),
        ({"block_size": 1}, "at least 2 slots"),
        ({"layer_types": ["sliding_attention"] * 2}, "say which, as in block:DIR\\?causal=true"),
    ],
)
def test_bad_configs(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    foreign.folder(tmp_path, {**CONFIG, **DFLASH, **config}, tensors())

    def judged() -> None:
        native.check(read(tmp_path), tmp_path)

    with pytest.raises(InputError, match=says):
        judged()


@pytest.mark.parametrize(("said", "causal"), [("--causal", True), ("--no-causal", False)])
def test_a_folder_without_a_causality_field_needs_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str, causal: bool
) -> None:
    open_ = {"is_causal": False, "dflash_config": {**DFLASH["dflash_config"], "causal_head": True}}
    where = str(foreign.folder(tmp_path / "d", {**CONFIG, **DFLASH, **open_}, tensors()))
    assert cli.main(["import", where]) == 2
    assert "outrider import DIR --causal" in capsys.readouterr().err
    assert cli.main(["import", where, said, "--out", str(tmp_path / "n")]) == 0
    assert read(tmp_path / "n").config["causal"] is causal


def test_parts_of_domino_are_refused_by_name(tmp_path: Path) -> None:
    raw = {**tensors(), "prefix_gru.weight_ih_l0": foreign.some(2, H)}
    with pytest.raises(InputError, match="of Domino"):
        read(foreign.folder(tmp_path, {**CONFIG, **DFLASH}, raw))


def test_windows_are_noted(tmp_path: Path) -> None:
    config = {**CONFIG, **DFLASH, "is_causal": False, "layer_types": ["sliding_attention"] * 2, "sliding_window": 64}
    checkpoint = read(foreign.folder(tmp_path, config, tensors()))
    assert not checkpoint.config["causal"]
    assert any("read 64 positions" in note for note in checkpoint.notes)


def facts() -> Facts:
    return Facts("the target", V, H, LAYERS, 128, {}, foreign.embedding, foreign.head)


@pytest.mark.parametrize("to", ["vllm", "sglang"])
@pytest.mark.parametrize(("causal", "second"), [(True, False), (False, False), (False, True)])
def test_export_and_back(tmp_path: Path, to: str, causal: bool, second: bool) -> None:
    raw, given = tensors(second=second), DFLASH2 if second else DFLASH
    checkpoint = read(foreign.folder(tmp_path / "in", {**CONFIG, **given, "is_causal": causal}, raw))
    write(checkpoint, to, facts(), tmp_path / "out")
    assert check(tmp_path / "out", to, facts()) == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["is_causal"] == config["dflash_config"]["causal"] == config["dflash_config"]["causal_head"] == causal
    assert config["architectures"] == given["architectures"]
    again = read(tmp_path / "out")
    assert again.config == checkpoint.config
    assert all(torch.equal(again.tensors[name], t) for name, t in checkpoint.tensors.items())


def test_verify_finds_what_loaders_let_through(tmp_path: Path) -> None:
    checkpoint = read(foreign.folder(tmp_path / "in", {**CONFIG, **DFLASH}, tensors()))
    write(checkpoint, "vllm", facts(), tmp_path / "out")
    place = tmp_path / "out" / "config.json"
    config = json.loads(place.read_text())
    inner = config["dflash_config"]
    for change, says in (
        ({"is_causal": True}, "must all be present and agree"),
        ({"dflash_config": {**inner, "target_layer_ids": [1, 40]}}, "lie outside"),
        ({"dflash_config": {**inner, "mask_token_id": 99}}, "no token"),
        ({"num_hidden_layers": 3}, "missing"),
    ):
        place.write_text(json.dumps({**config, **change}))
        assert any(says in fault for fault in check(tmp_path / "out", "vllm", facts())), says


def test_export_refuses_what_dflash_has_no_place_for(tmp_path: Path) -> None:
    checkpoint = read(foreign.folder(tmp_path / "in", {**CONFIG, **DSPARK}, tensors(markov=True)))
    with pytest.raises(InputError, match=r"pair_head=none \(or selector with conv=2\), sample_from_anchor=false"):
        write(checkpoint, "vllm", facts(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
