"""Random networks for drafters that need weights: losslessness and the life of a cache do not ask for good ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from outrider.drafters import eagle, eagle3, hydra, medusa
from outrider.nn import LayerShape

OPTIONS = {"eagle": "?width=3&kids=3", "eagle3": "?width=3&kids=3"}


def shape(hidden: int, inputs: int) -> LayerShape:
    return LayerShape(hidden, heads=4, kv_heads=2, head_dim=8, intermediate=48, inputs=inputs)


def make_eagle(folder: Path, vocab: int, hidden: int) -> None:
    torch.manual_seed(3)
    eagle.save(folder, eagle.EagleNet(eagle.EagleConfig(shape(hidden, hidden), vocab, hidden)).double())


def make_eagle3(folder: Path, vocab: int, hidden: int) -> None:
    """Narrower than its target, with a draft vocabulary of every token that no seventh is."""
    torch.manual_seed(4)
    kept = [t for t in range(vocab) if t % 7]
    config = eagle3.Eagle3Config(
        shape(24, 48), vocab, len(kept), hidden, (0, 1, 2), own_embedding=True, norm_before_residual=True
    )
    net = eagle3.Eagle3Net(config).double()
    net.d2t = torch.tensor(kept) - torch.arange(len(kept))
    net.t2d = torch.tensor([t % 7 > 0 for t in range(vocab)])
    eagle3.save(folder, net)


def make_medusa(folder: Path, vocab: int, hidden: int) -> None:
    torch.manual_seed(5)
    medusa.save(folder, medusa.MedusaNet(medusa.MedusaConfig(vocab, hidden, heads=4)).double())


def make_hydra(folder: Path, vocab: int, hidden: int) -> None:
    """Hydra++: the one with a cache."""
    torch.manual_seed(6)
    config = hydra.HydraConfig(vocab, hidden, heads=4, layers=2, prefix=True, layer=shape(hidden, hidden))
    hydra.save(folder, hydra.HydraNet(config).double())


MAKERS: dict[str, Callable[[Path, int, int], None]] = {
    "eagle": make_eagle,
    "eagle3": make_eagle3,
    "hydra": make_hydra,
    "medusa": make_medusa,
}
