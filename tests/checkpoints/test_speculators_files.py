"""Block drafters that the library `speculators` 0.9.0 wrote, and what it computes (tools/speculators_files.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import layouts_foreign as foreign
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.backends.torch.padding import additive
from outrider.checkpoints import Checkpoint, Facts, native, read
from outrider.checkpoints.write import write
from outrider.params import InputError

FOLDERS = Path(__file__).parent / "speculators"
KINDS = ["dflash", "dflash2", "dspark"]
ALL = [*KINDS, *(f"{kind}_causal" for kind in KINDS)]
SPELLINGS = ["is_causal", "dflash_config.causal", "dflash_config.causal_head"]


def network(result: Checkpoint) -> Any:
    of = native.network("block")
    net: Any = of.module(of.read(result.config, "the file")).double().eval().requires_grad_(False)
    net.load_state_dict(result.tensors, strict=True)
    return net


def answers(kind: str) -> dict[str, Tensor]:
    return load_file(FOLDERS / kind / "answers.safetensors")


def states(net: Any, right: dict[str, Tensor], anchor: int, causal: bool | None = None) -> Tensor:
    """Normed states of the block after one anchor; `causal` unlike the network's is a fault."""
    size, table, context = net.config.block, right["table"], net.context(right["features"][None, :anchor])
    turn = net.rope.at(torch.arange(anchor + size)[None], table.dtype)
    keys, values = net.keys_values(context, turn[:, :anchor])
    x = net.slots(table[right["tokens"][anchor]][None, None], table[net.config.mask_token], torch.zeros(0))
    seen = torch.ones(size, size, dtype=torch.bool)
    own = additive(seen.tril() if (net.config.causal if causal is None else causal) else seen, table.dtype)
    mask = torch.nn.functional.pad(own, (anchor, 0))[None, None]
    return net(x, turn[:, anchor:], keys, values, mask)[0]


def same_answers(net: Any, right: dict[str, Tensor]) -> None:
    """Its norms and rotations are in float32, which moves a state by up to 5e-5, as float32 does here."""
    for i, anchor in enumerate(right["anchors"].tolist()):
        hidden = states(net, right, anchor)
        logits = hidden @ right["head"].T
        torch.testing.assert_close(hidden, right["hidden"][i], rtol=0, atol=1e-4)
        torch.testing.assert_close(logits, right["logits"][i], rtol=0, atol=1e-3)
        scores = net.choice(logits, net.corrected(logits, right["above"][i], hidden))
        known = right["scores"][i].isfinite()
        assert torch.equal(known, scores > -1000)
        torch.testing.assert_close(scores[known], right["scores"][i][known], rtol=0, atol=1e-3)
        assert known.all() == (net.config.pair_head != "selector")


@pytest.mark.parametrize("kind", ALL)
def test_every_slot_has_the_librarys_logits(kind: str) -> None:
    net = network(read(FOLDERS / kind))
    assert net.config.causal is kind.endswith("_causal")
    assert net.config.sample_from_anchor == kind.startswith("dspark")
    same_answers(net, answers(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_shift_mask_or_head_shows(kind: str) -> None:
    """The comparison is not blind: one position, one slot's neighbour or one factor more, and it fails."""
    net, right = network(read(FOLDERS / kind)), answers(kind)
    anchor = int(right["anchors"][0])
    assert not torch.allclose(states(net, right, anchor - 1), right["hidden"][0], atol=1e-2)
    logits, hidden, above = right["logits"][0], right["hidden"][0], right["above"][0]
    if kind != "dflash":
        moved = net.corrected(logits, above.roll(1), hidden)
        assert not torch.allclose(moved, net.corrected(logits, above, hidden), atol=1e-2)


@pytest.mark.parametrize("kind", ALL)
def test_the_other_causality_shows_in_every_slot(kind: str) -> None:
    net, right = network(read(FOLDERS / kind)), answers(kind)
    for i, anchor in enumerate(right["anchors"].tolist()):
        wrong = states(net, right, anchor, causal=not net.config.causal)
        assert float((wrong - right["hidden"][i]).abs().amax(-1).min()) > 1e-3, "ten times what agreement allows"


def spelled(kind: str, said: dict[str, bool]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The library's drafter as its authors would have published it: config and tensors."""
    config = json.loads((FOLDERS / kind / "config.json").read_text())
    layer = {k: v for k, v in config["transformer_layer_config"].items() if k not in ("layer_types", "sliding_window")}
    ids = {"mask_token_id": config["mask_token_id"], "target_layer_ids": [1, 4]}
    made = {**layer, "block_size": config["block_size"], **{k: v for k, v in said.items() if "." not in k}}
    tensors = load_file(FOLDERS / kind / "model.safetensors")
    if kind.startswith("dspark"):
        return {**made, **ids, "architectures": ["Qwen3DSparkModel"], "markov_rank": config["markov_rank"]}, tensors
    inner = {**ids, **{k.partition(".")[2]: v for k, v in said.items() if "." in k}}
    if kind.startswith("dflash2"):
        inner |= {k: config[k] for k in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")}
    name = "DFlash2DraftModel" if kind.startswith("dflash2") else "DFlashDraftModel"
    return {**made, "architectures": [name], "dflash_config": inner}, tensors


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("kind", "spelling"),
    [*((kind, spelling) for kind in ("dflash", "dflash2") for spelling in SPELLINGS), ("dspark", "is_causal")],
)
def test_each_spelling_alone_has_the_librarys_logits(tmp_path: Path, kind: str, spelling: str, causal: bool) -> None:
    checkpoint = read(foreign.folder(tmp_path, *spelled(kind, {spelling: causal})))
    assert checkpoint.config["causal"] is causal
    same_answers(network(checkpoint), answers(f"{kind}_causal" if causal else kind))


@pytest.mark.parametrize("to", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", [kind for kind in ALL if "dspark" not in kind])
def test_an_export_writes_each_spelling_and_one_is_enough(tmp_path: Path, kind: str, to: str) -> None:
    given = read(FOLDERS / kind)
    facts = Facts("the target", 61, 16, 6, 64, {}, foreign.embedding, foreign.head)
    write(given, to, facts, tmp_path / "out")
    place, causal = tmp_path / "out" / "config.json", kind.endswith("_causal")
    config = json.loads(place.read_text())
    inner = config["dflash_config"]
    assert {config["is_causal"], inner["causal"], inner["causal_head"]} == {causal}
    for spelling in SPELLINGS:
        outer, _, name = spelling.rpartition(".")
        kept = {k: v for k, v in inner.items() if k not in ("causal", "causal_head") or (outer and k == name)}
        alone = {k: v for k, v in config.items() if k != "is_causal" or not outer}
        place.write_text(json.dumps({**alone, "dflash_config": kept}))
        back = read(tmp_path / "out")
        assert back.config == given.config
        same_answers(network(back), answers(kind))


def test_mixed_layers_with_windows_are_refused_without_the_option(tmp_path: Path) -> None:
    config = json.loads((FOLDERS / "dflash_causal" / "config.json").read_text())
    tensors = load_file(FOLDERS / "dflash_causal" / "model.safetensors")
    layer = {**config["transformer_layer_config"], "layer_types": ["sliding_attention", "full_attention"]}
    mixed = {**config, "transformer_layer_config": layer}
    with pytest.raises(InputError, match="say which, as in block:DIR"):
        native.check(read(foreign.folder(tmp_path / "mixed", mixed, tensors)), tmp_path)
    for i, (change, causal) in enumerate([({"sliding_window_non_causal": True}, False), ({"is_causal": True}, True)]):
        assert read(foreign.folder(tmp_path / str(i), {**mixed, **change}, tensors)).config["causal"] is causal
