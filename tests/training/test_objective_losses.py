"""Losses per position against sums written out, and their gradients against numerical ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.training.objectives import _losses

V, K = 9, 4


def logits(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(3, V, generator=g, dtype=torch.float64) * 2 for _ in range(2)]
    return made[0], made[1]


def softmax(z: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in z)
    return [math.exp(x) / total for x in z]


def best(z: list[float], k: int) -> list[int]:
    return sorted(range(len(z)), key=lambda i: -z[i])[:k]


def slow(name: str, student: list[float], teacher: list[float]) -> float:
    q, p = softmax(student), softmax(teacher)
    top, mine = best(teacher, K), best(student, K)
    if name == "top-k":
        return -sum(p[i] * math.log(q[i]) for i in top)
    if name == "top-p":
        total, held = 0.0, 0.0
        for i in best(teacher, V):
            if held >= 0.9:
                break
            total, held = total - p[i] * math.log(q[i]), held + p[i]
        return total
    if name == "normed-linear":
        a, b = sum(p[i] for i in top), sum(q[i] for i in top)
        return -sum(p[i] / a * math.log(q[i] / b) for i in top)
    if name == "normed-softmax":
        a, b = softmax([p[i] for i in top]), softmax([q[i] for i in top])
        return -sum(x * math.log(y) for x, y in zip(a, b, strict=True))
    if name == "both-ways":
        return -sum(p[i] * math.log(q[i]) for i in top) - sum(p[i] * math.log(q[i]) for i in mine)
    if name == "recall":
        bound = student[mine[-1]]
        return 1 - sum(1 / (1 + math.exp(bound - student[i])) for i in top) / K
    assert name == "bild"
    total = 0.0
    for chosen in (top, mine):
        pairs = [(chosen[i], chosen[j]) for i in range(K) for j in range(i + 1, K)]
        t, s = (
            softmax([(teacher[i] - teacher[j]) / 3 for i, j in pairs]),
            softmax([(student[i] - student[j]) / 3 for i, j in pairs]),
        )
        total += sum(a * math.log(a / b) for a, b in zip(t, s, strict=True))
    return total


@pytest.mark.parametrize("name", sorted(_losses.LOSSES))
def test_rankings(name: str) -> None:
    student, teacher = logits(1)
    student.requires_grad_()
    result = _losses.LOSSES[name](student, teacher, K)
    expected = [slow(name, s, t) for s, t in zip(student.tolist(), teacher.tolist(), strict=True)]
    torch.testing.assert_close(result.detach(), torch.tensor(expected, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda s: _losses.LOSSES[name](s, teacher, K), (student,))
    assert bool(torch.isfinite(_losses.LOSSES[name](student, teacher, 1)).all())


def test_hopeless_students_still_learn() -> None:
    """A distribution that gives the teacher's choices next to nothing has a finite loss and a gradient."""
    student = torch.full((1, V), 0.0)
    student[0, 0] = 300.0
    teacher = torch.arange(V).float()[None]
    for name, loss in _losses.LOSSES.items():
        z = student.clone().requires_grad_()
        out = loss(z, teacher, K).sum()
        out.backward()
        assert math.isfinite(float(out.detach())), name
        assert bool(z.grad.isfinite().all()), name
        if name in ("top-k", "top-p", "both-ways"):
            assert float(z.grad[0, V - 1]) < 0, name


@pytest.mark.parametrize("name", ["soft_cross_entropy", "forward_kl"])
def test_a_divergence_equals_its_sum(name: str) -> None:
    student, teacher = logits(2)
    student.requires_grad_()
    loss, expected = getattr(_losses, name), []
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        q, p = softmax(s), softmax(t)
        expected.append(sum(a * math.log((a if name == "forward_kl" else 1) / b) for a, b in zip(p, q, strict=True)))
    torch.testing.assert_close(loss(student, teacher).detach(), torch.tensor(expected, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda s: loss(s, teacher), (student,))


def test_equal_distributions_have_no_divergence() -> None:
    _, teacher = logits(3)
    assert float(_losses.forward_kl(teacher, teacher).abs().max()) < 1e-12


def test_a_loss_is_not_rounded_under_autocast() -> None:
    student, teacher = (x.float() for x in logits(2))
    with torch.autocast("cpu", torch.bfloat16):
        result = _losses.soft_cross_entropy(student, teacher)
    assert torch.equal(result, _losses.soft_cross_entropy(student, teacher))


def test_the_likeliest_token() -> None:
    assert _losses.likeliest(torch.tensor([[0.5, 2.0, 1.0], [-1.0, -3.0, -2.0]])).tolist() == [1, 0]


def test_smooth_l1() -> None:
    """d^2 / 2 within 1 of the truth, |d| - 1/2 beyond."""
    result = _losses.smooth_l1(torch.tensor([[0.5, 0.0], [2.0, -1.0]]), torch.zeros(2, 2))
    assert result.tolist() == pytest.approx([0.125 / 2, (1.5 + 0.5) / 2])
    assert float(_losses.smooth_l1(torch.tensor([[1.0]]), torch.zeros(1, 1), 4.0)) == pytest.approx(1 / 8)
    assert float(_losses.smooth_l1(torch.tensor([[5.0]]), torch.zeros(1, 1), 4.0)) == pytest.approx(3.0)
