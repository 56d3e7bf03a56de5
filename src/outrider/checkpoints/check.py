"""`check`: errors of an exported folder that the engines' own loaders accept.

They initialise missing tensors randomly, skip unknown ones, and mistake absolute ids for offsets; the only symptom is a
low acceptance. The folder is compared with its own config and the target, not with the code that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..params import InputError
from ..schema import to_dict
from . import dflash, medusa, native, peagle, speculators
from .files import Weights, json_of, weights_of
from .parts import Shape, flag, layer_of, number
from .target import Facts

EAGLE = ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
EAGLE3 = ["LlamaForCausalLMEagle3"]
MEDUSA = ["MedusaModel"]
DFLASH, DFLASH2 = ["DFlashDraftModel"], [dflash.DFLASH2]


def check(folder: str | Path, to: str, facts: Facts) -> list[str]:
    """One sentence per error; none if the engine `to` loads the drafter correctly."""
    folder = Path(folder)
    try:
        return list(_faults(folder, to, facts))
    except InputError as error:
        return [str(error)]


def _faults(folder: Path, to: str, facts: Facts) -> Iterator[str]:
    config = json_of(folder / "config.json")
    if to == "medusa":
        from .read import read

        if not any((folder / name).is_file() for name in medusa.FILES):
            yield f"it holds neither {' nor '.join(medusa.FILES)}, of which medusa loads one"
            return
        native.check(read(folder, facts), folder)  # `read` is strict
        return
    weights = weights_of(folder)
    architectures = config.get("architectures")
    allowed = {
        "safeailab": (EAGLE, EAGLE3),
        "sglang": (EAGLE, EAGLE3, DFLASH, DFLASH2),
        "vllm": (EAGLE, EAGLE3, MEDUSA, DFLASH, DFLASH2),
        "speculators": tuple([name] for name in speculators.ARCHITECTURES.values()),
    }[to]
    if architectures not in allowed:
        yield f"architectures is {architectures}, where {to} needs {' or '.join(map(str, allowed))}"
        return
    if architectures == MEDUSA:
        table, free = medusa.table_of(config, folder), frozenset[str]()
        yield from _sizes(number(config, "vocab_size", folder), number(config, "hidden_size", folder), facts)
    elif architectures in (DFLASH, DFLASH2):
        table, free = dflash.table_of(config, folder), frozenset[str]()
        yield from dflash.faults(config, folder, facts)
        yield from _sizes(number(config, "vocab_size", folder), number(config, "hidden_size", folder), facts)
    else:
        inner = config.get("transformer_layer_config") if to == "speculators" else config
        if not isinstance(inner, dict):
            yield "transformer_layer_config is missing"
            return
        yield from _llama(inner, folder, peagle.MASK in weights)
        if architectures == EAGLE:
            table, free = _eagle(config, to, folder)
            wide = number(config, "hidden_size", folder)
        else:
            table, free = _eagle3(config, inner, to, folder, frozenset(weights), facts)
            wide = number(config, "target_hidden_size", folder, number(inner, "hidden_size", folder))
            yield from _layers(config, to, facts)
        yield from _sizes(number(inner, "vocab_size", folder), wide, facts)
    if to == "speculators":
        yield from _speculators(config, facts)
    yield from _tensors(weights, table, free)
    if architectures == EAGLE and to == "vllm" and "fc.bias" in weights and bool(weights["fc.bias"].any()):
        yield "fc.bias is not zero, and vLLM ignores it"
    if peagle.MASK in weights:
        yield from _mask_token(config, to, facts)
    if "d2t" in weights:
        yield from _vocabulary(weights, table, facts)
    if "embed_tokens.weight" in weights and (architectures == EAGLE or to == "speculators"):
        yield from _embedding(weights, config, facts)


def _sizes(vocab: int, hidden: int, facts: Facts) -> Iterator[str]:
    if vocab != facts.vocab:
        yield f"vocab_size is {vocab} and {facts.name} has {facts.vocab} tokens: this is another target's drafter"
    if hidden != facts.hidden:
        yield f"the target's features are {hidden} wide here and {facts.hidden} in {facts.name}"


def _llama(config: Mapping[str, Any], folder: Path, parallel: bool) -> Iterator[str]:
    for name, value in (("model_type", "llama"), ("num_hidden_layers", 1), ("tie_word_embeddings", False)):
        if config.get(name) != value and not (parallel and name == "num_hidden_layers"):
            yield f"{name} is {config.get(name)!r}, where engines need {value!r}"
    nested = config.get("rope_parameters")
    if "rope_theta" not in config or not isinstance(nested, dict) or "rope_theta" not in nested:
        yield "rope_theta and rope_parameters must both be there: old and new loaders read one each, and guess"
    elif float(config["rope_theta"]) != float(nested["rope_theta"]):
        yield f"rope_theta is {config['rope_theta']:g} and rope_parameters say {nested['rope_theta']:g}"
    for name in ("head_dim", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"):
        if config.get(name) is None:
            yield f"{name} is missing, and loaders guess it"
    if config.get("attention_bias") or config.get("bias"):
        yield "attention_bias or bias is true, which vLLM takes for biases of the attention's output too"


def _eagle(config: Mapping[str, Any], to: str, folder: Path) -> tuple[dict[str, Shape], frozenset[str]]:
    layer, vocab = layer_of(config, folder), number(config, "vocab_size", folder)
    made = {"layer": to_dict(layer), "vocab": vocab, "target_hidden": layer.hidden, "bias": True}
    table = {**native.table("eagle", made, folder), "embed_tokens.weight": (vocab, layer.hidden)}
    return table, frozenset({"fc.bias"} if to == "vllm" else ())


def _eagle3(
    config: Mapping[str, Any], inner: Mapping[str, Any], to: str, folder: Path, names: frozenset[str], facts: Facts
) -> tuple[dict[str, Shape], frozenset[str]]:
    layer, vocab = layer_of(inner, folder, 2), number(inner, "vocab_size", folder)
    h = layer.hidden
    wide = number(config, "target_hidden_size", folder, h)
    few, parallel = number(config, "draft_vocab_size", folder), peagle.MASK in names
    made = {
        "layer": to_dict(layer), "vocab": vocab, "draft_vocab": few, "target_hidden": wide, "taps": [0, 1, 2],
        "own_embedding": h != wide, "parallel": int(parallel), "layers": number(inner, "num_hidden_layers", folder),
        "norm_before_fc": flag(config, "norm_before_fc", folder), "fc_norm": flag(config, "fc_norm", folder),
    }  # fmt: skip
    table = native.table("eagle3", made, folder)
    if few == vocab:
        del table["d2t"], table["t2d"]
    middle = "layers.0." if to == "speculators" else "midlayer."
    table = {peagle.named(name, middle): shape for name, shape in table.items()}
    stated = to == "safeailab" and "target_hidden_size" in config  # its code then takes the file's embedding
    if to == "speculators" or h != wide or facts.scaled or stated or "embed_tokens.weight" in names:
        table["embed_tokens.weight"] = (vocab, h)
    return table, frozenset()


def _layers(config: Mapping[str, Any], to: str, facts: Facts) -> Iterator[str]:
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(top, list) or len(top) != 3 or not all(isinstance(i, int) for i in top):
        yield f"eagle_aux_hidden_state_layer_ids is {top}, where three numbers belong; engines guess without"
        return
    if len(set(top)) < 3:
        yield f"eagle_aux_hidden_state_layer_ids {top} names a layer twice"
    if min(top) < 1 or max(top) >= facts.layers:
        yield f"eagle_aux_hidden_state_layer_ids {top} lie outside 1 to {facts.layers - 1}, the layers of {facts.name}"
    if to != "speculators":
        inner = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if inner != [i - 1 for i in top]:
            yield f"eagle_config names {inner}, and SGLang counts one less than {top}"
        if to == "sglang" and config.get("norm_before_residual"):
            yield "norm_before_residual is true, which SGLang ignores"


def _speculators(config: Mapping[str, Any], facts: Facts) -> Iterator[str]:
    for name in ("speculators_version", "draft_vocab_size", "norm_before_residual"):
        if config.get(name) is None:
            yield f"{name} is missing"
    kind = config.get("speculators_model_type")
    if config.get("architectures") != [speculators.ARCHITECTURES.get(str(kind))]:
        yield f"speculators_model_type is {kind!r}, and the architecture {config.get('architectures')} another one's"
    given = config.get("speculators_config") or {}
    methods = given.get("proposal_methods") or [{}]
    if given.get("default_proposal_method") not in [m.get("proposal_type") for m in methods]:
        yield "default_proposal_method is none of proposal_methods"
    if not isinstance(methods[0].get("speculative_tokens"), int):
        yield "proposal_methods says no speculative_tokens"
    verifier = given.get("verifier") or {}
    if not verifier.get("name_or_path"):
        yield "speculators_config names no verifier"
    if not facts.architectures or verifier.get("architectures") != facts.architectures:
        yield f"the verifier is {verifier.get('architectures')}, and {facts.name} is {facts.architectures}"


def _mask_token(config: Mapping[str, Any], to: str, facts: Facts) -> Iterator[str]:
    for name in ("mask_token_id",) if to == "speculators" else peagle.VLLM:
        token = config.get(name)
        if not isinstance(token, int) or not 0 <= token < facts.vocab:
            yield f"{name} is {token}, where the number of a token of {facts.name} belongs"


def _tensors(weights: Weights, table: Mapping[str, Shape], free: frozenset[str]) -> Iterator[str]:
    for name in sorted(table.keys() - set(weights) - free):
        yield f"{name} is missing; engines would leave it random"
    for name in sorted(set(weights) - table.keys()):
        yield f"{name} is none of this layout's; engines skip it or stop"
    for name in sorted(table.keys() & set(weights)):
        tensor = weights[name]
        if tuple(tensor.shape) != table[name]:
            yield f"{name} is {list(tensor.shape)}, where the config says {list(table[name])}"
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield f"{name} has entries that are NaN or infinite"


def _vocabulary(weights: Weights, table: Mapping[str, Shape], facts: Facts) -> Iterator[str]:
    d2t = weights["d2t"]
    if d2t.dtype != torch.int64 or tuple(d2t.shape) != table.get("d2t"):
        yield f"d2t is {d2t.dtype} {list(d2t.shape)}, where int64 offsets {list(table.get('d2t', ()))} belong"
        return
    ids = torch.arange(len(d2t)) + d2t
    if int(ids.min()) < 0 or int(ids.max()) >= facts.vocab or len(ids.unique()) < len(ids):
        yield "d2t gives draft tokens no ids of their own (id = i + d2t[i]); are these ids, and not offsets?"
        return
    if "t2d" in weights:
        marked = torch.zeros(facts.vocab, dtype=torch.bool)
        marked[ids] = True
        if not torch.equal(weights["t2d"].bool(), marked):
            yield "t2d does not mark the tokens that d2t names (id = i + d2t[i]); are these ids, and not offsets?"


def _embedding(weights: Weights, config: Mapping[str, Any], facts: Facts) -> Iterator[str]:
    """Check the embedding: EAGLE's is always the target's; EAGLE-3's, unless it is the drafter's own."""
    copy, own = weights["embed_tokens.weight"], facts.embedding()
    block = config.get("outrider") or {}
    if block.get("own_embedding"):
        return
    if copy.shape == own.shape and not torch.equal(copy.float(), own.float()):
        yield f"embed_tokens.weight is not the embedding of {facts.name}"
