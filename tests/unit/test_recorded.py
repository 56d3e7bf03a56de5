"""Recorded steps: kinds, patience, proofs, and what happens where a recording is not the step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.backends.torch.recorded import PROOFS, Recorded
from outrider.drafters._features import OneStep
from outrider.nets.kv_cache import KVCache
from outrider.nets.layer import Layer, LayerShape


class Twice(nn.Module):
    """2 W x."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (2 * self.linear(x),)


@torch.no_grad()
def test_a_kind_is_recorded_after_some_patience_and_serves_every_size() -> None:
    body = Twice()
    step = Recorded(body, patience=2)
    for i, b in enumerate((1, 4, 2, 1, 3, 5, 6, 7)):
        x = torch.randn(b, 1, 3)
        torch.testing.assert_close(step("all", x), body(x))
        assert ("all" in step.made) == (i >= 2)
    assert len(step.proofs["all"]) == PROOFS
    assert "other" not in step.made


@torch.no_grad()
def test_a_recording_that_differs_is_dropped_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    body = Twice()
    step, x = Recorded(body, patience=0), torch.randn(1, 1, 3)
    step("all", x)
    step.made["all"] = lambda x: (torch.zeros(2, 1, 3),)
    assert torch.equal(step("all", x[:1].repeat(2, 1, 1))[0], body(x.repeat(2, 1, 1))[0])
    assert step.made["all"] is None
    assert "differs" in caplog.text
    assert torch.equal(step("all", x)[0], body(x)[0])


@torch.no_grad()
def test_a_recording_that_fails_and_a_body_that_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            if torch.jit.is_tracing():
                raise RuntimeError("not with this one")
            return (x,)

    def fails(x: Tensor) -> Any:
        raise RuntimeError("a constant")

    body = Twice()
    step, x = Recorded(body, patience=0), torch.randn(1, 1, 3)
    step("all", x)
    step.made["all"] = fails
    assert torch.equal(step("all", x)[0], body(x)[0])
    assert "failed" in caplog.text
    odd = Recorded(Odd(), patience=0)
    assert odd("all", x)[0] is x
    assert "cannot be recorded" in caplog.text


class Alone(nn.Module):
    """A network of one layer, as EAGLE's is called."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.layer = Layer(shape)

    def forward(self, vectors: Tensor, embeds: Tensor, *rest: Any) -> Tensor:
        x = vectors + embeds
        made: Tensor = self.layer(x, x, *rest)
        return made


@torch.inference_mode()
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_layers_step_writes_and_sees_what_the_ordinary_one_does(kv_heads: int) -> None:
    shape = LayerShape(hidden=32, heads=4, kv_heads=kv_heads, head_dim=8, intermediate=48, inputs=32)
    net = Alone(shape).eval()
    net.layer.fuse()
    step = Recorded(OneStep(net), patience=0)
    caches = [KVCache(shape, 1, 4, torch.ones(1)) for _ in range(2)]
    rope = net.layer.rope
    for m in (1, 3, 1, 2, 1, 5):
        vectors, embeds = torch.randn(2, 1, m, 32)
        found = []
        for cache, recorded in zip(caches, (False, True), strict=True):
            turn = rope.table(64, torch.float32, vectors.device)[cache.longest : cache.longest + m][None]
            mask = None
            if m > 1:
                mask = cache.mask(torch.ones(1, m, m, dtype=torch.bool).tril(), torch.float32, 4 // kv_heads)
            if recorded:
                masks = () if mask is None else (mask,)
                found.append(step((m == 1, mask is None), vectors, embeds, *cache.views(m), turn, *masks)[0])
            else:
                found.append(net(vectors, embeds, None, mask, cache.place(m), turn))
            cache.advance([m])
        torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(caches[0].keys[:, :13], caches[1].keys[:, :13])
    torch.testing.assert_close(caches[0].values[:, :13], caches[1].values[:, :13])
    assert all(made is not None for made in step.made.values())
