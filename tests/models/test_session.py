"""The state of a batch: prompts in chunks, rows that fork, join, leave and go back, growth, and its limit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from small import PROMPTS, ROUNDS, WINDOW, build, sequential, tree_of

from outrider.backends.torch import hf, load_target
from outrider.backends.torch.tensors import tensor
from outrider.core.tree import chain
from outrider.core.types import DraftTree
from outrider.params import InputError

TREE = tree_of(ROUNDS[0]["tokens"], ROUNDS[0]["parents"])
LONG = [[(5 * i + 2) % 97 for i in range(29)], [1, 2, 3], [(3 * i) % 97 for i in range(16)], [7] * 8]
KINDS = ["llama", "mistral", "gpt2", "gemma3", "gemma2", "deepseek_v3", "bloom", "gpt_neo", "falcon-alibi"]


def opened(target: Any, prompts: list[list[int]], capacity: int = 64) -> Any:
    session = target.open(capacity)
    for _ in session.prefill(prompts):
        pass
    return session


def read(session: Any, tree: DraftTree, since: int = 0) -> torch.Tensor:
    """The logits of a tree's pass."""
    return tensor(session.forward(tree, since=since).logits)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-10) -> bool:
    return bool((a - b).abs().max() < tolerance)


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target(build("llama"))


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_chunks_of_a_prompt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt read 8 tokens at a time is a prompt read at once, is the stock model's; rows end in different chunks."""
    model = build(name)
    target = load_target(model)
    full, pieces = target.open(48), target.open(48)
    (at_once,) = full.prefill(LONG)
    monkeypatch.setattr(hf, "CHUNK", WINDOW)
    chunks = list(pieces.prefill(LONG))
    assert [c.last for c in chunks] == [
        (False, True, False, True), (False, False, True, False), (False,) * 4, (True, False, False, False),
    ]  # fmt: skip
    assert [c.tree.size.tolist() for c in chunks] == [[8, 3, 8, 8], [8, 0, 8, 0], [8, 0, 0, 0], [5, 0, 0, 0]]
    assert [c.next[0] for c in chunks] == [LONG[0][8], LONG[0][16], LONG[0][24], -1]
    assert at_once.last == (True,) * 4
    for b, prompt in enumerate(LONG):
        right = sequential(model, prompt)[0][-1]
        (ending,) = (c for c in chunks if c.last[b])
        assert close(tensor(at_once.output.logits)[b, 0], right, 1e-5)
        assert close(tensor(ending.output.logits)[b, 0], right, 1e-5)
    tree = chain([[4, 5]] * len(LONG))
    assert close(read(full, tree), read(pieces, tree), 1e-5)


@torch.no_grad()
def test_select_forks_and_reorders(target: Any) -> None:
    session = opened(target, PROMPTS)
    right = read(session, TREE)
    index = [2, 0, 0, 1]
    session.select(index)
    assert session.lengths == [len(PROMPTS[i]) for i in index]
    tree = tree_of([ROUNDS[0]["tokens"][i] for i in index], [ROUNDS[0]["parents"][i] for i in index])
    assert close(read(session, tree), right[index])
    session.keep([[0], [], [0], [0]])
    after = read(session, chain([[8]] * 4))  # the two copies have parted
    for row, text in enumerate([[*PROMPTS[2], 70, 8], [*PROMPTS[0], 8], [*PROMPTS[0], 9, 8], [*PROMPTS[1], 4, 8]]):
        assert close(after[row, 0], sequential(target.model, text)[0][-1])


@torch.no_grad()
def test_rows_leave_and_others_join(target: Any) -> None:
    """Joining sessions of different capacities, after rows have left, both ways round."""
    for small, large in ((16, 90), (90, 16)):
        session, other = opened(target, PROMPTS, small), opened(target, [[6] * 25, [44, 2]], large)
        session.select([0, 2])
        session.join(other)
        texts = [PROMPTS[0], PROMPTS[2], [6] * 25, [44, 2]]
        assert session.lengths == [len(t) for t in texts]
        logits = read(session, chain([[5, 6, 7]] * 4))
        for b, text in enumerate(texts):
            assert close(logits[b], sequential(target.model, [*text, 5, 6, 7])[0][-3:])
        session.keep([[0, 1, 2], [], [0], [0, 1]])
        assert session.lengths == [16, 7, 26, 4]


@torch.no_grad()
def test_rewind(target: Any) -> None:
    session = opened(target, PROMPTS)
    session.rewind([4, 3, 0])
    logits = read(session, chain([[5, 6]] * 3))
    for b, n in enumerate((4, 3, 0)):
        assert close(logits[b], sequential(target.model, [*PROMPTS[b][:n], 5, 6])[0][-2:])
    with pytest.raises((InputError, AssertionError), match="rewinding goes back"):
        session.rewind([5, 3, 0])


@torch.no_grad()
def test_growth_by_doubling_up_to_the_limit(target: Any) -> None:
    """The cache grows when a tree does not fit, keeps what it held, and refuses what lies beyond its limit."""
    session, text = opened(target, [[3, 4, 5]], 4), [3, 4, 5]
    capacities = []
    while len(text) < 90:
        piece = [(len(text) * 7 + i) % 97 for i in range(8)]
        logits = read(session, chain([piece]))
        capacities.append(session.cache.capacity)
        session.keep([list(range(8))])
        text += piece
    assert close(logits[0], sequential(target.model, text)[0][-8:])
    steps = sorted(set(capacities))
    assert all(b >= 2 * a for a, b in itertools.pairwise(steps)), "it grows by doubling"
    with pytest.raises(InputError, match="limit"):
        session.forward(chain([[1] * 400]))
    assert close(read(session, chain([[9]]))[0], sequential(target.model, [*text, 9])[0][-1:]), "still alive"


@torch.no_grad()
def test_nodes_read_before_are_not_read_again(target: Any) -> None:
    """`since`: the later nodes of a growing tree attend to the earlier ones in the cache."""
    session = opened(target, PROMPTS)
    right = read(session, TREE)
    other = opened(target, PROMPTS)
    first = tree_of([row[:3] for row in ROUNDS[0]["tokens"]], [row[:3] for row in ROUNDS[0]["parents"]])
    assert close(read(other, first), right[:, :3])
    assert close(read(other, TREE, 3)[0], right[0, 3:])


@torch.no_grad()
def test_grouped_attention_is_repeated_attention() -> None:
    """Folding query heads into rows gives what repeating keys and values gives."""
    from outrider.backends.torch.attention import attend

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((6, 5), (2, 11), (2, 11)))
    mask = torch.zeros(2, 1, 5, 11, dtype=torch.float64).masked_fill(torch.rand(2, 1, 5, 11) < 0.4, float("-inf"))
    mask[..., 0] = 0
    folded, _ = attend(None, q, k, v, mask, scaling=0.3)
    scores = q @ k.repeat_interleave(3, 1).transpose(2, 3) * 0.3 + mask
    assert close(folded, (scores.softmax(-1) @ v.repeat_interleave(3, 1)).transpose(1, 2), 1e-13)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_user_s_model_is_left_as_it_was(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, experts and what adapters bind are the user's again after a pass and after an exception."""
    for name in ("llama", "bloom", "gpt_neo", "mixtral", "falcon-rotary"):
        model = build(name)
        model.config._attn_implementation = implementation
        prompt = torch.tensor([[3, 4, 5]])
        settings = {
            "max_new_tokens": 6,
            "do_sample": False,
            "attention_mask": torch.ones_like(prompt),
            "pad_token_id": 0,
        }
        before, kept = model.generate(prompt, **settings), _settings(model)
        session = opened(load_target(model), PROMPTS)
        session.forward(TREE)
        assert _settings(model) == kept
        with monkeypatch.context() as patch:
            last = list(model.children())[-1]
            patch.setattr(last, "forward", _fail)
            with pytest.raises(ZeroDivisionError):
                session.forward(TREE)
        assert _settings(model) == kept
        assert torch.equal(model.generate(prompt, **settings), before), "generate still works"


def _settings(model: Any) -> tuple[Any, ...]:
    config = model.config
    bound = [(name, key) for name, m in model.named_modules() for key, value in vars(m).items() if callable(value)]
    return config._attn_implementation, config._experts_implementation, bound


def _fail(*args: Any, **kwargs: Any) -> None:
    raise ZeroDivisionError("on purpose")
