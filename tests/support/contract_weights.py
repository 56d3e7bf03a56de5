"""Random networks for drafters that need weights: losslessness and the life of a cache do not ask for good ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from outrider.checkpoints import native
from outrider.drafters import eagle, eagle3, hydra, medusa
from outrider.nets.block import BlockConfig, BlockNet
from outrider.nets.layer import LayerShape

VARIANTS = ("peagle",)  # drafters that share another one's name
OPTIONS = {"eagle": "?width=3&top_k=3", "eagle3": "?width=3&top_k=3", "mamba": "?top_k=3"}


def wide(hidden: int) -> bool:
    """Beside wide targets networks are such as compiled code reads."""
    return hidden > 32


def shape(hidden: int, inputs: int) -> LayerShape:
    head_dim, intermediate = (32, 96) if wide(hidden) else (8, 48)
    return LayerShape(hidden, heads=4, kv_heads=2, head_dim=head_dim, intermediate=intermediate, inputs=inputs)


def make_eagle(folder: Path, vocab: int, hidden: int) -> None:
    torch.manual_seed(3)
    native.save(folder, "eagle", eagle.EagleNet(eagle.EagleConfig(shape(hidden, hidden), vocab, hidden)).double())


def make_eagle3(folder: Path, vocab: int, hidden: int) -> None:
    """Narrower than its target, with a draft vocabulary of every token that no seventh is."""
    torch.manual_seed(4)
    kept = [t for t in range(vocab) if t % 7]
    own = shape(3 * hidden // 4, 3 * hidden // 2)
    more = {"own_embedding": True, "norm_before_residual": not wide(hidden)}
    config = eagle3.Eagle3Config(own, vocab, len(kept), hidden, (0, 1, 2), **more)
    net = eagle3.Eagle3Net(config).double()
    net.d2t = torch.tensor(kept) - torch.arange(len(kept))
    net.t2d = torch.tensor([t % 7 > 0 for t in range(vocab)])
    native.save(folder, "eagle3", net)


def make_peagle(folder: Path, vocab: int, hidden: int) -> None:
    """P-EAGLE of two layers that drafts five tokens, with a draft vocabulary of every token that no seventh is."""
    torch.manual_seed(9)
    kept = [t for t in range(vocab) if t % 7]
    net = eagle3.Eagle3Net(
        eagle3.Eagle3Config(
            shape(hidden, 2 * hidden), vocab, len(kept), hidden, (0, 1, 2), layers=2, parallel=5, mask_token=3
        )
    ).double()
    net.d2t = torch.tensor(kept) - torch.arange(len(kept))
    net.t2d = torch.tensor([t % 7 > 0 for t in range(vocab)])
    native.save(folder, "eagle3", net)


def make_medusa(folder: Path, vocab: int, hidden: int) -> None:
    torch.manual_seed(5)
    native.save(folder, "medusa", medusa.MedusaNet(medusa.MedusaConfig(vocab, hidden, heads=4)).double())


def make_hydra(folder: Path, vocab: int, hidden: int) -> None:
    """Hydra++: the one with a cache."""
    torch.manual_seed(6)
    config = hydra.HydraConfig(
        vocab, hidden, heads=4, layers=1 if wide(hidden) else 2, prefix=True, layer=shape(hidden, hidden)
    )
    native.save(folder, "hydra", hydra.HydraNet(config).double())


def make_block(folder: Path, vocab: int, hidden: int) -> None:
    """Two layers, with convolutions beside a narrow target, a draft vocabulary of every token that no seventh is, and a
    selector that says something."""
    torch.manual_seed(7)
    kept = [t for t in range(vocab) if t % 7]
    more = {"block": 5, "pair_head": "selector", "pair_rank": 6, "pair_top": 9, "seeded": True}
    more |= {} if wide(hidden) else {"conv": 2, "conv_group": 2}
    net = BlockNet(BlockConfig(shape(hidden, hidden), 2, vocab, len(kept), hidden, (0, 2), **more))
    torch.nn.init.normal_(net.markov_w2.weight)
    torch.nn.init.normal_(net.seed.weight, std=0.2)
    for layer in () if wide(hidden) else net.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            torch.nn.init.normal_(conv.base_kernel, std=0.5)
            torch.nn.init.normal_(conv.kernel_projection.weight, std=0.2)
    net.d2t = torch.tensor(kept) - torch.arange(len(kept))
    native.save(folder, "block", net.double())


def make_mamba(folder: Path, vocab: int, hidden: int) -> None:
    """A random Mamba-2, its vocabulary padded by three rows beside a narrow target."""
    torch.manual_seed(8)
    sizes = {"vocab_size": vocab + 3, "hidden_size": 16, "head_dim": 4, "n_groups": 2, "state_size": 6}
    if wide(hidden):
        sizes = {"vocab_size": vocab, "hidden_size": 64, "head_dim": 16, "n_groups": 1, "state_size": 16}
    config = Mamba2Config(num_hidden_layers=2, expand=2, num_heads=8, initializer_range=0.3, **sizes)
    Mamba2ForCausalLM(config).double().save_pretrained(folder)


MAKERS: dict[str, Callable[[Path, int, int], None]] = {
    "block": make_block,
    "eagle": make_eagle,
    "eagle3": make_eagle3,
    "hydra": make_hydra,
    "mamba": make_mamba,
    "medusa": make_medusa,
    "peagle": make_peagle,
}
