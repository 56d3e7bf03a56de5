"""P-EAGLE's layouts: published folders against a slow reference, round trips, what engines ask, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import layouts_foreign as foreign
import layouts_reference as reference
import pytest
import torch
from layouts_foreign import LAYERS, LLAMA, SIZES, VD, H, V, config_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.checkpoints import Checkpoint, Facts, method_of, native, read
from outrider.checkpoints.check import check
from outrider.checkpoints.write import keep, write
from outrider.params import InputError

TAPS = {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}
TOKEN = 11


def tensors(mask: tuple[int, ...] = (1, 1, 3 * H), at: str = "layers.0.", spare: bool = False) -> dict[str, Tensor]:
    """Three layers, an embedding of its own. `spare`: norms of the upper layers that nobody reads, as vLLM has them."""
    made = {**foreign.eagle3(at), "embed_tokens.weight": foreign.some(V, H, seed=3), "mask_hidden": foreign.some(*mask)}
    for i in (1, 2):
        shapes = {**foreign.layer(f"layers.{i}.", H), f"layers.{i}.input_layernorm.weight": (H,)}
        made |= foreign.fill({**shapes, f"layers.{i}.hidden_norm.weight": (H,)} if spare else shapes)
    return made


def published(**changes: Any) -> dict[str, Any]:
    return {**LLAMA, **TAPS, "num_hidden_layers": 3, "draft_vocab_size": VD, "ptd_token_id": TOKEN, **changes}


def speculators(**changes: Any) -> dict[str, Any]:
    config = foreign.speculators()
    inner = {**config["transformer_layer_config"], "num_hidden_layers": 3}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 6}
    settings = {**config["speculators_config"], "algorithm": "peagle", "proposal_methods": [proposal]}
    named = {"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle", "norm_before_residual": False}
    return {
        **config, **named, "mask_token_id": TOKEN, "transformer_layer_config": inner, "speculators_config": settings,
        **changes,
    }  # fmt: skip


def logits(raw: dict[str, Tensor], sizes: Any, features: Tensor, tokens: list[int], at: str = "layers.0.") -> Tensor:
    """Of every pair, and of two masks after them, by plain matrices."""
    given = torch.cat([features, raw["mask_hidden"].reshape(1, -1).expand(2, -1)])
    embeds = raw["embed_tokens.weight"][[*tokens, TOKEN, TOKEN]]
    hidden = list(reference.eagle3(raw, sizes, given, embeds, at)[0])
    for i in (1, 2):
        normed = [reference.rms(x, raw[f"layers.{i}.input_layernorm.weight"], sizes["eps"]) for x in hidden]
        hidden = list(reference.layer(raw, f"layers.{i}.", normed, hidden, **sizes))
    normed = [reference.rms(x, raw["norm.weight"], sizes["eps"]) for x in hidden]
    return torch.stack([raw["lm_head.weight"] @ x for x in normed])


@torch.no_grad()
def same_logits(result: Checkpoint, raw: dict[str, Tensor], sizes: Any, at: str = "layers.0.") -> None:
    net = native.network("eagle3").module(native.network("eagle3").read(result.config, "it")).double()
    net.load_state_dict(result.tensors, strict=True)
    features, tokens = foreign.some(4, 3 * H, seed=7), [3, 1, 4, 1]
    given = torch.cat([net.fuse(features[None]), net.fuse(net.mask_hidden).expand(1, 2, -1)], 1)
    embeds = net.embed_tokens(torch.tensor([[*tokens, net.config.mask_token, net.config.mask_token]]))
    made = net.logits(net(given, embeds, torch.arange(6)[None]))[0]
    torch.testing.assert_close(made, logits(raw, sizes, features, tokens, at), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mask", [(1, 1, 3 * H), (1, 3 * H)])
@pytest.mark.parametrize(("at", "spare"), [("layers.0.", False), ("layers.0.", True), ("midlayer.", False)])
def test_published_folders(tmp_path: Path, mask: tuple[int, ...], at: str, spare: bool) -> None:
    raw = tensors(mask, at, spare)
    checkpoint = read(foreign.folder(tmp_path, published(), raw))
    assert method_of(tmp_path) == checkpoint.method == "eagle3"
    assert (checkpoint.config["layers"], checkpoint.config["parallel"], checkpoint.config["mask_token"]) == (
        3,
        8,
        TOKEN,
    )
    assert checkpoint.config["own_embedding"]
    assert any("so it is 8" in note for note in checkpoint.notes)
    assert sum("hidden_norm" in note for note in checkpoint.notes) == (2 if spare else 0)
    same_logits(checkpoint, raw, SIZES, at)


def test_speculators(tmp_path: Path) -> None:
    raw = tensors()
    checkpoint = read(foreign.folder(tmp_path, speculators(), raw))
    assert (checkpoint.layout, checkpoint.config["parallel"], checkpoint.config["mask_token"]) == (
        "speculators P-EAGLE",
        6,
        TOKEN,
    )
    same_logits(checkpoint, raw, {**SIZES, "theta": 500.0})


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("to", ["vllm", "speculators"])
def test_round_trips_lose_nothing(tmp_path: Path, facts: Facts, to: str, own: bool) -> None:
    foreign.folder(tmp_path / "in", published(outrider={"parallel": 5, "scale": 0.75}), tensors())
    checkpoint = read(tmp_path / "in")
    if not own:
        config = {**checkpoint.config, "own_embedding": False}
        rest = {k: t for k, t in checkpoint.tensors.items() if k != "embed_tokens.weight"}
        checkpoint = Checkpoint(checkpoint.layout, checkpoint.method, config, rest)
    write(checkpoint, to, facts, tmp_path / "out")
    assert check(tmp_path / "out", to, facts) == []
    back = read(tmp_path / "out", facts)
    assert back.config == checkpoint.config
    assert back.tensors.keys() == checkpoint.tensors.keys()
    assert all(torch.equal(back.tensors[name], t) for name, t in checkpoint.tensors.items())
    keep(back, tmp_path / "again")


def test_a_p_eagle_export_has_the_fields_of_engines(tmp_path: Path, facts: Facts) -> None:
    checkpoint = read(foreign.folder(tmp_path / "in", published(outrider={"parallel": 5}), tensors()))
    write(checkpoint, "vllm", facts, tmp_path / "vllm")
    config, kept = config_of(tmp_path / "vllm"), load_file(tmp_path / "vllm" / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["num_hidden_layers"], config["ptd_token_id"], config["pard_token"]) == (3, TOKEN, TOKEN)
    assert kept["mask_hidden"].numel() == 3 * H
    assert {name.split(".")[1] for name in kept if name.startswith("layers.")} == {"1", "2"}
    write(checkpoint, "speculators", facts, tmp_path / "spec")
    config, kept = config_of(tmp_path / "spec"), load_file(tmp_path / "spec" / "model.safetensors")
    assert (config["speculators_model_type"], config["architectures"]) == ("peagle", ["PEagleSpeculator"])
    assert (config["mask_token_id"], config["transformer_layer_config"]["num_hidden_layers"]) == (TOKEN, 3)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert {name.split(".")[1] for name in kept if name.startswith("layers.")} == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("to", "spoil", "says"),
    [
        ("vllm", lambda c, t: c.pop("ptd_token_id"), "ptd_token_id is None"),
        ("vllm", lambda c, t: c.update(pard_token=V), f"pard_token is {V}"),
        ("vllm", lambda c, t: t.pop("layers.2.mlp.up_proj.weight"), "layers.2.mlp.up_proj.weight is missing"),
        ("speculators", lambda c, t: c.update(mask_token_id=-1), "mask_token_id is -1"),
        ("speculators", lambda c, t: c.update(speculators_model_type="eagle3"), "another one's"),
    ],
)
def test_the_checker_finds(tmp_path: Path, facts: Facts, to: str, spoil: Any, says: str) -> None:
    checkpoint = read(foreign.folder(tmp_path / "in", published(), tensors()))
    write(checkpoint, to, facts, tmp_path / "out")
    config, kept = config_of(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    spoil(config, kept)
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    save_file(kept, tmp_path / "out" / "model.safetensors")
    assert any(says in fault for fault in check(tmp_path / "out", to, facts))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (published(ptd_token_id=None), "must have one mask token"),
        (published(pard_token=TOKEN + 1), "must have one mask token"),
        (published(ptd_token_id=V), "outside the vocabulary"),
        (published(num_hidden_layers=2), "layers.2"),
    ],
)
def test_bad_folders(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        read(foreign.folder(tmp_path, config, tensors()))


def test_layers_need_masks(tmp_path: Path) -> None:
    raw = {name: t for name, t in tensors().items() if name != "mask_hidden"}
    with pytest.raises(InputError, match="has 3 layers"):
        read(foreign.folder(tmp_path, published(), raw))


@pytest.mark.parametrize(
    ("to", "changes", "says"),
    [
        ("sglang", {}, "SGLang does not draft in parallel"),
        ("safeailab", {"eagle_aux_hidden_state_layer_ids": [2, LAYERS // 2, LAYERS - 3]}, "does not draft in parallel"),
        ("speculators", {"norm_output": True}, "no fc_norm and no norm_output"),
    ],
)
def test_refused_exports(tmp_path: Path, facts: Facts, to: str, changes: dict[str, Any], says: str) -> None:
    checkpoint = read(foreign.folder(tmp_path / "in", published(**changes), tensors()))
    with pytest.raises(InputError, match=says):
        write(checkpoint, to, facts, tmp_path / "out")
    assert not (tmp_path / "out").exists()
