"""Every foreign layout, from its key table with random weights: a forward of our network is that of the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import layouts_foreign as foreign
import layouts_reference as reference
import pytest
import torch
from layouts_foreign import DRAFTED, LLAMA, SIZES, VD, H, V
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider.checkpoints import Checkpoint, Facts, method_of, native, read
from outrider.checkpoints.write import keep
from outrider.schema import to_dict

TEXT = 6


def net(result: Checkpoint) -> Any:
    """The drafter's network, filled strictly."""
    of = native.network(result.method)
    made = of.read(result.config, "the file")
    assert to_dict(made) == json.loads(json.dumps(result.config)), "every field is said"
    filled: nn.Module = of.module(made).double()
    for p in filled.parameters():
        nn.init.constant_(p, float("nan"))
    filled.load_state_dict(result.tensors, strict=True)
    return filled.requires_grad_(False)


def close(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert float((a - b).abs().max()) < 1e-6, float((a - b).abs().max())


def features(n: int = 1) -> Tensor:
    return foreign.some(TEXT, n * H, seed=7)


def embeds() -> Tensor:
    return foreign.embedding()[[3, 1, 4, 1, 5, 9]]


def said(result: Checkpoint, what: str) -> bool:
    return any(what in note for note in result.notes)


POSITIONS = torch.arange(TEXT)[None]


# --- EAGLE -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    ("bias", "qkv", "config"),
    [
        (True, False, {}),  # "bias" absent means true, "rope_theta" absent means 10000
        (True, True, {"bias": True, "qkv_bias": True, "rope_theta": 500.0}),
        (False, False, {"bias": False, "rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}}),
        (False, False, {"bias": False, "rope_theta": 300, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ],
)
def test_eagle(tmp_path: Path, bias: bool, qkv: bool, config: dict[str, Any], file: str) -> None:
    raw = foreign.eagle(bias, qkv)
    extra = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # old folders hold it
    checkpoint = read(foreign.folder(tmp_path, {**LLAMA, **config}, {**raw, **extra}, file))
    assert (checkpoint.method, checkpoint.layout) == ("eagle", "SafeAILab EAGLE")
    assert method_of(tmp_path) == "eagle"
    theta = config.get("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 10000.0))
    factor = config.get("rope_scaling", {}).get("factor", 1.0)
    sizes = {**SIZES, "theta": float(theta), "factor": factor}
    made = net(checkpoint)(features()[None], embeds()[None], POSITIONS)[0]
    close(made, reference.eagle(raw, sizes, features(), embeds()))
    other = reference.eagle(raw, {**sizes, "theta": 123.0}, features(), embeds())
    assert float((made - other).abs().max()) > 1e-4, "another rotary base must show"


def test_the_embedding_must_be_the_targets(tmp_path: Path) -> None:
    facts = Facts.at(foreign.target(tmp_path / "t"))
    raw = foreign.eagle()
    rounded = {**raw, "embed_tokens.weight": raw["embed_tokens.weight"].half().double()}
    checkpoint = read(foreign.folder(tmp_path / "d", dict(LLAMA), rounded), facts)
    assert said(checkpoint, "is the target's")
    assert "embed_tokens.weight" not in checkpoint.tensors
    assert said(read(tmp_path / "d"), "unchecked")
    headed = {**raw, "lm_head.weight": foreign.head()}
    assert said(read(foreign.folder(tmp_path / "l", dict(LLAMA), headed)), "lm_head")


# --- EAGLE-3 ---------------------------------------------------------------------------------------------------------

FLAGS: list[dict[str, bool]] = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
]


def same_eagle3(
    result: Checkpoint, raw: dict[str, Tensor], sizes: Any, at: str, given: Tensor, e: Tensor, **flags: bool
) -> None:
    filled = net(result)
    hidden = filled(filled.fuse(given[None]), e[None], POSITIONS)
    expected, logits = reference.eagle3(raw, sizes, given, e, at, **flags)
    close(hidden[0], expected)
    close(filled.logits(hidden)[0], logits)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "+".join(f) or "plain")
@pytest.mark.parametrize("at", ["midlayer.", "layers.0."])
def test_eagle3(tmp_path: Path, at: str, flags: dict[str, bool]) -> None:
    raw = foreign.eagle3(at, **flags)
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}
    checkpoint = read(foreign.folder(tmp_path, {**LLAMA, "draft_vocab_size": VD, **layers, **flags}, raw))
    assert method_of(tmp_path) == checkpoint.method == "eagle3"
    assert checkpoint.config["taps"] == [1, 5, 9]
    assert not checkpoint.config["own_embedding"]
    assert said(checkpoint, "layers.0") == (at == "layers.0.")
    same_eagle3(checkpoint, raw, SIZES, at, features(3), embeds(), **flags)
    assert net(checkpoint).ids().tolist() == DRAFTED


def test_eagle3_leaves_things_to_its_target(tmp_path: Path) -> None:
    """No LM head, no d2t, no layers: all of them the target's."""
    facts = Facts.at(foreign.target(tmp_path / "t"))
    raw = foreign.eagle3(few=V)
    bare = {k: t for k, t in raw.items() if k != "lm_head.weight"}
    nested = {"rope_scaling": {"rope_theta": 50.0, "rope_type": "default"}}
    checkpoint = read(foreign.folder(tmp_path / "d", {**LLAMA, **nested}, bare), facts)
    assert checkpoint.config["taps"] == [2, 6, 9]
    assert checkpoint.config["draft_vocab"] == V
    assert said(checkpoint, "no lm_head")
    assert said(checkpoint, "full one")
    same_eagle3(
        checkpoint,
        {**raw, "lm_head.weight": foreign.head()},
        {**SIZES, "theta": 50.0},
        "midlayer.",
        features(3),
        embeds(),
    )
    tied = Facts.at(foreign.target(tmp_path / "tied", tied=True))
    part = {k: t for k, t in foreign.eagle3().items() if k != "lm_head.weight"}
    checkpoint = read(foreign.folder(tmp_path / "p", {**LLAMA, "draft_vocab_size": VD}, part), tied)
    close(checkpoint.tensors["lm_head.weight"], foreign.embedding()[DRAFTED])


def test_eagle3_of_another_width(tmp_path: Path) -> None:
    raw = {**foreign.eagle3(wide=48), "embed_tokens.weight": foreign.embedding()}
    inner = {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 5, 8]}}
    config = {**LLAMA, "draft_vocab_size": VD, "target_hidden_size": 48, **inner}
    checkpoint = read(foreign.folder(tmp_path, config, raw))
    assert checkpoint.config["own_embedding"]
    assert checkpoint.config["taps"] == [2, 6, 9]
    assert said(checkpoint, "SGLang")
    same_eagle3(checkpoint, raw, SIZES, "midlayer.", foreign.some(TEXT, 144, seed=7), embeds())
    close(net(checkpoint).embed_tokens.weight, foreign.embedding())


def test_speculators(tmp_path: Path) -> None:
    raw = {**foreign.eagle3("layers.0."), "embed_tokens.weight": foreign.embedding()}
    checkpoint = read(foreign.folder(tmp_path, foreign.speculators(), raw))
    assert (checkpoint.layout, checkpoint.method, method_of(tmp_path)) == ("speculators EAGLE-3", "eagle3", "eagle3")
    assert said(checkpoint, "made for some/model")
    sizes = {**SIZES, "theta": 500.0}
    same_eagle3(checkpoint, raw, sizes, "layers.0.", features(3), embeds(), norm_before_residual=True)


# --- Medusa and Hydra ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@torch.no_grad()
def test_medusa(tmp_path: Path, file: str) -> None:
    raw, f = foreign.medusa(), foreign.some(H, seed=7)
    checkpoint = read(foreign.folder(tmp_path, {"medusa_num_heads": 5, "medusa_num_layers": 1}, raw, file))
    assert method_of(tmp_path) == checkpoint.method == "medusa"
    assert said(checkpoint, "says 5 heads and the weights have 3")
    assert (checkpoint.config["layers"], checkpoint.config["lossy"]) == (2, False)
    for a, b in zip(net(checkpoint)(f[None]), reference.medusa(raw, "", 3, 2, f, None), strict=True):
        close(a[0], b)


@torch.no_grad()
def test_medusa_that_shares_the_head(tmp_path: Path) -> None:
    facts, f = Facts.at(foreign.target(tmp_path / "t")), foreign.some(H, seed=7)
    raw = foreign.medusa(share=True)
    checkpoint = read(foreign.folder(tmp_path / "d", {}, raw, "medusa_lm_head.safetensors"), facts)
    assert checkpoint.config["share_head"]
    made = net(checkpoint)(f[None], lambda x: x @ foreign.head().T)
    for a, b in zip(made, reference.medusa(raw, "", 3, 2, f, foreign.head()), strict=True):
        close(a[0], b)


@torch.no_grad()
def test_medusa_2(tmp_path: Path) -> None:
    """The heads inside a whole model, in shards."""
    raw, f = foreign.medusa("medusa_head.", layers=1), foreign.some(H, seed=7)
    rest = {"model.embed_tokens.weight": foreign.embedding(), "lm_head.weight": foreign.head()}
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 3, **LLAMA}))
    save_file(rest, tmp_path / "a.safetensors")
    save_file(raw, tmp_path / "b.safetensors")
    places = {**dict.fromkeys(rest, "a.safetensors"), **dict.fromkeys(raw, "b.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    checkpoint = read(tmp_path)
    assert method_of(tmp_path) == "medusa"
    assert checkpoint.config["lossy"]
    assert said(checkpoint, "changed model")
    for a, b in zip(net(checkpoint)(f[None]), reference.medusa(raw, "medusa_head.", 3, 1, f, None), strict=True):
        close(a[0], b)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_medusa_of_vllm(tmp_path: Path, bias: bool) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        for j in range(3):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (H, H)
            shapes |= {f"blocks.{i}.layers.{j}.bias": (H,)} if bias else {}
        shapes[f"lm_heads.{i}.weight"] = (V, H)
    raw, f = foreign.fill(shapes), foreign.some(H, seed=7)
    config = {"model_type": "medusa", "hidden_size": H, "vocab_size": V, "num_heads": 2, "medusa_fc_bias": bias}
    checkpoint = read(foreign.folder(tmp_path, config, raw))
    assert method_of(tmp_path) == checkpoint.method
    for a, b in zip(net(checkpoint)(f[None]), reference.medusa_vllm(raw, 2, 3, f), strict=True):
        close(a[0], b)


@pytest.mark.parametrize("prefix", [False, True])
@torch.no_grad()
def test_hydra(tmp_path: Path, prefix: bool) -> None:
    facts = Facts.at(foreign.target(tmp_path / "t"))
    raw = foreign.hydra(prefix=prefix)
    arch = {"hydra_head_arch": "prefix-mlp" if prefix else "mlp", "grounded_heads": True, "hydra_num_heads": 3}
    checkpoint = read(foreign.folder(tmp_path / "d", arch, raw, "hydra_lm_head.pt"), facts)
    assert method_of(tmp_path / "d") == checkpoint.method == "hydra"
    filled, seen = net(checkpoint), features()
    if prefix:
        expected = reference.hydra_prefix(raw, SIZES, seen)
        seen = filled.prefix(seen[None], POSITIONS)[0]
        close(seen, expected)
    for i in range(3):
        path = embeds()[: i + 1]
        close(filled(i, seen[:1], path[None])[0], reference.hydra(raw, i, 3, seen[0], path))


# --- native ----------------------------------------------------------------------------------------------------------


def test_native_is_kept_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = read(foreign.folder(tmp_path / "f", dict(LLAMA), foreign.eagle()))
    keep(checkpoint, tmp_path / "n")
    again = read(tmp_path / "n")
    assert (again.layout, again.method, again.config) == ("native", checkpoint.method, checkpoint.config)
    assert again.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(again.tensors[k], checkpoint.tensors[k]) for k in checkpoint.tensors)
    assert method_of(tmp_path / "n") == "eagle"
