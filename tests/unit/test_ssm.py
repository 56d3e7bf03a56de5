"""The state-space functions against the recurrence written out token by token, and against the stock models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts_reference import rms, silu
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from outrider.nets import mamba as ssm
from outrider.nets import scan
from outrider.params import InputError

VOCAB = 31


def small(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    torch.manual_seed(1)
    shared = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3, "conv_kernel": 4, "expand": 2}
    if kind == "mamba":
        net: Any = MambaForCausalLM(MambaConfig(**{**shared, "state_size": 5, "time_step_rank": 3, **changes}))
    else:
        heads = {"num_heads": 8, "head_dim": 4, "state_size": 6, "n_groups": 2, "chunk_size": 8}
        net = Mamba2ForCausalLM(Mamba2Config(**{**shared, **heads, **changes}))
    for p in net.parameters():  # decays and gates that matter
        p.data += 0.2 * torch.randn_like(p)
    return net.to(dtype).eval()


def by_hand(net: Any, tokens: list[int]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Features of every token of one text, one token and one channel's recurrence at a time."""
    kind, config, out = net.config.model_type, net.config, []
    memory: dict[str, Tensor] = {}
    for token in tokens:
        x = net.backbone.embeddings.weight[token]
        for i, block in enumerate(net.backbone.layers):
            mixer = block.mixer
            read = mixer.in_proj(rms(x, block.norm.weight, config.layer_norm_epsilon))
            if kind == "mamba":
                line, gate = read[: mixer.intermediate_size], read[mixer.intermediate_size :]
            else:
                gate, line, dt = read.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads])
            past = memory.get(f"conv {i}", torch.zeros(len(line), 3, dtype=x.dtype))
            window = torch.cat([past, line[:, None]], 1)
            memory[f"conv {i}"] = window[:, 1:]
            line = silu((window * mixer.conv1d.weight[:, 0]).sum(1) + mixer.conv1d.bias)
            if kind == "mamba":
                n, rank = mixer.ssm_state_size, mixer.time_step_rank
                low, b, c = mixer.x_proj(line).split([rank, n, n])
                step = torch.log1p(torch.exp(mixer.dt_proj(low)))
                h = memory.get(f"ssm {i}", torch.zeros(len(line), n, dtype=x.dtype))
                h = torch.exp(-step[:, None] * torch.exp(mixer.A_log)) * h + (step * line)[:, None] * b
                y = (h @ c + mixer.D * line) * silu(gate)
            else:
                inner, n, groups = mixer.intermediate_size, mixer.ssm_state_size, mixer.n_groups
                channels, b, c = line.split([inner, groups * n, groups * n])
                step = torch.log1p(torch.exp(dt + mixer.dt_bias))
                before = memory.get(f"ssm {i}", torch.zeros(mixer.num_heads, mixer.head_dim, n, dtype=x.dtype))
                heads, ys = [], []
                for k in range(mixer.num_heads):
                    g = k // (mixer.num_heads // groups)
                    mine = channels[k * mixer.head_dim : (k + 1) * mixer.head_dim]
                    add = step[k] * torch.outer(mine, b[g * n : (g + 1) * n])
                    heads.append(torch.exp(-step[k] * torch.exp(mixer.A_log[k])) * before[k] + add)
                    ys.append(heads[k] @ c[g * n : (g + 1) * n] + mixer.D[k] * mine)
                y = torch.cat(ys) * silu(gate)
                parts = [rms(part, torch.ones(()), config.layer_norm_epsilon) for part in y.chunk(groups)]
                y, h = mixer.norm.weight * torch.cat(parts), torch.stack(heads)
            memory[f"ssm {i}"] = h
            x = x + mixer.out_proj(y)
        out.append(rms(x, net.backbone.norm_f.weight, config.layer_norm_epsilon))
    return out, memory


@torch.no_grad()
@pytest.mark.parametrize("kind", ssm.KINDS)
def test_many_tokens_equal_the_recurrence(kind: str) -> None:
    net, tokens = small(kind), torch.randint(0, VOCAB, (1, 150)).tolist()[0]
    truth, memory = by_hand(net, tokens)
    result, state = ssm.run(net, torch.tensor([tokens]), ssm.empty(net, 1))
    assert torch.allclose(result[0], torch.stack(truth), atol=1e-11)
    for i in range(3):
        assert torch.allclose(state.conv[i, 0], memory[f"conv {i}"], atol=1e-12)
        assert torch.allclose(state.ssm[i, 0], memory[f"ssm {i}"], atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(1,) * 40, (7, 1, 1, 20, 11), (39, 1), (16, 16, 8)])
@pytest.mark.parametrize("kind", ssm.KINDS)
def test_any_pieces_are_one_text(kind: str, pieces: tuple[int, ...]) -> None:
    net, tokens = small(kind), torch.randint(0, VOCAB, (2, 40))
    full, end = ssm.run(net, tokens, ssm.empty(net, 2))
    state, results = ssm.empty(net, 2), []
    for part in tokens.split(pieces, 1):
        x, state = ssm.run(net, part, state)
        results.append(x)
    assert torch.allclose(torch.cat(results, 1), full, atol=1e-11)
    assert torch.allclose(state.ssm, end.ssm, atol=1e-11)
    assert torch.allclose(state.conv, end.conv, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("kind", ssm.KINDS)
def test_ragged_rows_are_rows_alone(kind: str) -> None:
    """Counts of 0, of less than the convolution reads, and of all; then more tokens."""
    net, counts = small(kind), [0, 1, 2, 9, 20]
    first, then = torch.randint(0, VOCAB, (5, 20)), torch.randint(0, VOCAB, (5, 3))
    begun = ssm.read(net, [[3, 4, 5, 6, 7]] * 5)
    _, state = ssm.run(net, first, begun, torch.tensor(counts))
    result, _ = ssm.run(net, then, state)
    for i, n in enumerate(counts):
        text = [3, 4, 5, 6, 7, *first[i, :n].tolist(), *then[i].tolist()]
        alone, _ = ssm.run(net, torch.tensor([text]), ssm.empty(net, 1))
        assert torch.allclose(result[i], alone[0, -3:], atol=1e-11)


@pytest.mark.parametrize("kind", ssm.KINDS)
def test_documents_in_one_row_are_documents_alone(kind: str) -> None:
    """Beginnings anywhere: side by side, at a chunk's edge, several in a chunk, none in a chunk; and gradients."""
    net, starts = small(kind), [0, 1, 2, 5, 16, 17, 64, 70, 140, 148]
    tokens = torch.randint(0, VOCAB, (2, 150))
    fresh = torch.zeros(2, 150, dtype=torch.bool)
    fresh[0, starts] = True
    result, state = ssm.run(net, tokens, ssm.read(net, [[3, 4, 5]] * 2), None, fresh)
    alone, end = [], None
    for a, b in zip(starts, [*starts[1:], 150], strict=True):
        x, end = ssm.run(net, tokens[:1, a:b], ssm.empty(net, 1))
        alone.append(x[0])
    full, _ = ssm.run(net, tokens[1:], ssm.read(net, [[3, 4, 5]]))
    assert end is not None
    assert torch.allclose(result[0], torch.cat(alone), atol=1e-11)
    assert torch.allclose(result[1], full[0], atol=1e-11)
    assert torch.allclose(state.ssm[:, 0], end.ssm[:, 0], atol=1e-11)
    assert torch.allclose(state.conv[:, 0], end.conv[:, 0], atol=1e-12)
    grads = []
    for out in (result[0], torch.cat(alone)):
        net.zero_grad()
        out.pow(2).sum().backward(retain_graph=True)
        grads.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b, rtol=1e-7, atol=1e-9) for a, b in zip(*grads, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", ssm.KINDS)
def test_prompts_of_many_lengths(kind: str) -> None:
    net, texts = small(kind), [[1], [2, 3, 4], list(range(30)) * 2]
    states = ssm.read(net, texts, piece=7)
    for i, text in enumerate(texts):
        _, alone = ssm.run(net, torch.tensor([text]), ssm.empty(net, 1))
        assert torch.allclose(states.ssm[:, i], alone.ssm[:, 0], atol=1e-11)
        assert torch.allclose(states.conv[:, i], alone.conv[:, 0], atol=1e-12)
    assert states.bytes == ssm.read(net, [[1], [2], [3]]).bytes, "the state does not grow with the text"


@pytest.mark.parametrize("changes", [{}, {"use_bias": True}, {"use_conv_bias": False}, {"residual_in_fp32": False}])
@pytest.mark.parametrize("kind", ssm.KINDS)
def test_the_stock_model(kind: str, changes: dict[str, Any]) -> None:
    """The stock forward of a whole text (its scans compute in float32)."""
    net = small(kind, torch.float32, **changes)
    tokens = torch.randint(0, VOCAB, (2, 33))
    with torch.no_grad():
        stock = net(tokens).logits
        mine = net.lm_head(ssm.run(net, tokens, ssm.empty(net, 2))[0])
    assert torch.allclose(mine, stock, atol=2e-5)


@pytest.mark.parametrize("kind", ssm.KINDS)
def test_gradients(kind: str) -> None:
    """Of the scan, and of the recurrence by hand."""
    net, tokens = small(kind), torch.randint(0, VOCAB, (1, 37))
    results = []
    for features in (ssm.run(net, tokens, ssm.empty(net, 1))[0], torch.stack(by_hand(net, tokens[0].tolist())[0])):
        net.zero_grad()
        features.pow(3).sum().backward()
        results.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    assert len(results[0]) > 20
    for name, grad in results[0].items():
        assert torch.allclose(grad, results[1][name], rtol=1e-7, atol=1e-9), name


def test_half_precision_stays_near() -> None:
    net, tokens = small("mamba2", torch.bfloat16), torch.randint(0, VOCAB, (2, 20))
    with torch.no_grad():
        rough, state = ssm.run(net, tokens, ssm.empty(net, 2))
        fine, _ = ssm.run(net.float(), tokens, ssm.empty(net, 2))
    assert rough.dtype == torch.bfloat16
    assert state.ssm.dtype == torch.float32
    assert float((rough.float() - fine).abs().mean()) < 0.05 * float(fine.abs().mean())


def test_an_unsupported_mamba_is_refused() -> None:
    net = small("mamba", hidden_act="gelu")
    with pytest.raises(InputError, match="gelu"):
        ssm.check(net)
    net.config.model_type = "rwkv"
    with pytest.raises(InputError, match="not rwkv"):
        ssm.check(net)


@pytest.mark.parametrize("documents", [False, True])
def test_both_forms_of_the_scan_are_one(documents: bool) -> None:
    """The walk of the CPU and the wide form: outputs, states and all gradients."""
    dice = torch.Generator().manual_seed(3)
    sizes = [(2, 37, 4), (2, 37, 4), (4, 3), (2, 37, 3), (2, 37, 3), (2, 4, 3)]
    fresh = (torch.rand(2, 37, generator=dice) < 0.1) if documents else None
    results = []
    for form in (scan.scan, scan.wide):
        dice.manual_seed(4)
        given = [torch.randn(size, generator=dice, dtype=torch.float64) for size in sizes]
        given[1], given[2] = given[1].abs(), -given[2].abs()
        given = [t.requires_grad_() for t in given]
        y, h = form(*given, fresh, 8)
        (y.sin().sum() + h.cos().sum()).backward()
        results.append([y, h, *(t.grad for t in given)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
