"""One LLM, many threads; and no setting of the process that outlasts a round."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

import outrider
from outrider import LLM, Output
from outrider.backends.torch import load_target, load_tokenizer
from outrider.backends.torch.turns import without_cudnn
from outrider.budgets.adaptive import AdaptiveBudget
from outrider.core.protocols import Target
from outrider.engine import Engine, Request, generate
from outrider.params import Sampling
from outrider.testing import TableTarget

SOURCE = Path(outrider.__file__).parent
THREADS = 4
CASES = [  # a stock pass takes ten times as long as a native one
    *(("native", drafter) for drafter in ("lookup", "suffix", "demo/hass", "lookup + demo/eagle3")),
    *(("stock", drafter) for drafter in ("lookup + demo/eagle3", "demo/medusa", "model:demo")),
]


@cache
def target_of(way: str) -> Target:
    return load_target("demo") if way == "stock" else outrider.load("demo", "none").target


def together(job: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """What each thread's job returned, all of them begun at once."""
    ready = Barrier(threads)

    def begun(i: int) -> Any:
        ready.wait()
        return job(i)

    with ThreadPoolExecutor(threads) as pool:
        return [one.result() for one in [pool.submit(begun, i) for i in range(threads)]]


@pytest.mark.parametrize(("way", "drafter"), CASES)
def test_threads_that_share_an_llm_write_what_one_thread_writes(way: str, drafter: str) -> None:
    target, tokenizer = target_of(way), load_tokenizer("demo")
    llm = LLM(target, tokenizer, outrider.drafters.load(drafter, target, tokenizer))
    options: list[dict[str, Any]] = [
        {"prompts": "Once upon a time", "temperature": 1.0, "seed": 3},
        {"prompts": ["Lily and Tom", "The dog, the dog, the"], "seed": 1, "rule": "coupled"},
        {"prompts": "Once upon a time", "temperature": 0.8, "top_p": 0.9, "seed": 5, "stop": "."},
    ]

    def texts(turn: int) -> list[tuple[int, list[Any]]]:
        order = [(turn + i) % len(options) for i in range(len(options))]
        return sorted((i, [(o.text, o.tokens) for o in llm.generate(max_new_tokens=10, **options[i])]) for i in order)

    right = texts(0)
    assert all(result == right for result in together(texts))


def test_threads_that_share_a_budget_leave_no_round_unlearnt() -> None:
    """And the noise that they share: both are dictionaries that every round changes."""
    target = TableTarget(17, seed=2)
    engine = Engine.of(target, outrider.drafters.load("lookup"), budget := AdaptiveBudget())
    sampling = Sampling(temperature=1.0)

    def written(thread: int) -> list[int]:
        requests = [Request([1, 2], thread * 9 + i, 60, sampling) for i in range(9)]
        rows = {piece.row.index: piece.row for piece in generate(engine, requests, 2)}
        return [len(row.output) for row in rows.values()]

    assert together(written, 8) == [[60] * 9] * 8
    assert budget.cost.rounds == budget.rounds - 1, "each round was learned once, but for the first, which warms up"


def test_many_threads_share_one_budget_of_an_llm() -> None:
    llm = outrider.load("demo", "lookup", compile=False)
    assert len({id(engine.budget) for engine in together(lambda i: llm.engine(), 8)}) == 1
    assert len(llm.memories) == 1


def test_two_llms_over_one_model_do_not_meet_in_it() -> None:
    """A pass changes the model's config while it runs, whichever of its targets it belongs to."""
    first = outrider.load("demo", "lookup", compile=False)
    both = first, outrider.load(first.target.model, "suffix", compile=False)
    before = first.target.model.config._attn_implementation

    def text(thread: int) -> list[int]:
        return both[thread % 2].generate("Once upon a time", max_new_tokens=12, seed=1, temperature=1.0)[0].tokens

    right = [text(0), text(1)]
    assert together(text) == right * (THREADS // 2)
    assert first.target.model.config._attn_implementation == before


def test_streams_are_read_by_turns_in_one_thread_or_each_in_another() -> None:
    llm = outrider.load("demo", "lookup", compile=False)
    asked = [("Once upon a time", 1), ("Lily and Tom", 2)]

    def stream(prompt: str, seed: int) -> outrider.llm.Stream:
        return llm.stream(prompt, max_new_tokens=16, temperature=1.0, seed=seed)

    right = ["".join(stream(*one)) for one in asked]
    pair = [stream(*one) for one in asked]
    parts: list[list[str]] = [[], []]
    while any(pieces := [next(one, "") for one in pair]):
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    assert ["".join(part) for part in parts] == right
    pair = [stream(*one) for one in asked]
    begun = [next(one) for one in pair]
    assert [a + b for a, b in zip(begun, together(lambda i: "".join(pair[i]), 2), strict=True)] == right


@pytest.fixture
def graded() -> Iterator[torch.Tensor]:
    """A tensor of the caller's that takes gradients, which are on before and must be on after."""
    with torch.enable_grad():
        yield torch.ones(3, requires_grad=True)
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["as opened", "last first"])
@pytest.mark.parametrize("way", ["close", "read"])
def test_streams_leave_the_callers_gradients_on(order: tuple[int, int], way: str, graded: torch.Tensor) -> None:
    llm = outrider.load("demo", "lookup", compile=False)
    pair = [llm.stream("Once upon a time", max_new_tokens=6) for _ in range(2)]
    for one in pair:
        next(one)
        assert torch.is_grad_enabled()
        assert (graded * 2).requires_grad, "while a stream is open"
    for i in order:
        pair[i].close() if way == "close" else "".join(pair[i])
        assert torch.is_grad_enabled()
        assert (graded * 2).requires_grad


def test_a_stream_read_in_another_thread_changes_nobodys_gradients(graded: torch.Tensor) -> None:
    llm = outrider.load("demo", "lookup", compile=False)
    stream, seen = llm.stream("Once upon a time", max_new_tokens=6), list[bool]()
    next(stream)

    def read() -> None:
        with torch.enable_grad():
            "".join(stream)
            seen.append(torch.is_grad_enabled())

    thread = Thread(target=read)
    thread.start()
    thread.join()
    assert seen == [True]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("drafter", ["lookup", "demo/hass"])
def test_no_graph_is_recorded_and_the_mode_is_the_callers_own(mode: Any, drafter: str) -> None:
    llm = outrider.load("demo", drafter, compile=False)
    seen: list[bool] = []
    handle = llm.target.model.lm_head.register_forward_hook(lambda *given: seen.append(given[2].requires_grad))
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        for _ in llm.stream("Once upon a time", max_new_tokens=6):
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
        llm.generate("Once upon a time", max_new_tokens=6)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    handle.remove()
    assert seen
    assert not any(seen)


HARMLESS = ("open", "tempfile.", "contextlib.closing")  # files and the like: nobody else's


def spanned(source: str) -> list[str]:
    """The `with`s around a generator's `yield`; a context manager's own is where it hands over, not a pause."""
    results = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
            ast.unparse(d).endswith("contextmanager") for d in function.decorator_list
        ):
            inside = list(own(function))
            results += [
                ast.unparse(item.context_expr)
                for node in inside
                if isinstance(node, ast.With | ast.AsyncWith)
                and any(isinstance(each, ast.Yield | ast.YieldFrom) for each in own(node))
                for item in node.items
            ]
    return results


def own(node: ast.AST) -> Iterator[ast.AST]:
    """What lies below a node and runs with it: no function within it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from own(child)


def test_no_generator_pauses_inside_a_with() -> None:
    for file in sorted(SOURCE.rglob("*.py")):
        for one in spanned(file.read_text(encoding="utf-8")):
            assert any(name in one for name in HARMLESS), f"{file.name}: 'with {one}' is held while its caller runs"
    assert spanned("def f():\n with torch.no_grad():\n  for x in y:\n   yield x") == ["torch.no_grad()"]
    assert spanned("@contextmanager\ndef f():\n with lock:\n  yield") == []


def flags() -> dict[str, Any]:
    """Settings of torch that belong to the process or the thread, not to us."""
    cuda, names = torch.backends.cuda, ("flash", "mem_efficient", "math", "cudnn")
    return {
        **{name: getattr(cuda, f"{name}_sdp_enabled")() for name in names},
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "precision": torch.get_float32_matmul_precision(),
        "random": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("compile", [None, False])
def test_loading_and_writing_leave_torchs_settings_alone(compile: bool | None) -> None:
    before = flags()
    llm = outrider.load("demo", "demo/hass", compile=compile)
    assert flags() == before
    for _ in llm.stream("Once upon a time", max_new_tokens=6, temperature=1.0, seed=1):
        assert flags() == before
    output: Output = llm.generate("Once upon a time", max_new_tokens=6)[0]
    assert output.tokens
    assert flags() == before


def test_cudnns_attention_is_off_in_steps_on_cuda_alone() -> None:
    """In overlapping ones of several threads too: the last to leave restores the state before the first one."""
    on, cuda = torch.backends.cuda.cudnn_sdp_enabled, "cuda"
    with without_cudnn("cpu"):
        assert on()
    first, second = without_cudnn(cuda), without_cudnn(cuda)
    first.__enter__()
    assert not on()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not on(), "the second one is under way"
    second.__exit__(None, None, None)
    assert on()


GLOBAL = re.compile(
    r"torch\.(set_\w+|use_deterministic_algorithms|manual_seed|inference_mode\(True|autograd\.set_\w+)"
    r"|torch\.backends\.\S+\.(enable_\w+|allow_\w+ =|benchmark =|deterministic =|enabled =)"
)
ALLOWED = {
    "backends/torch/turns.py": "cuDNN's flag, for the length of a step",
    "training/loop.py": "a training run is the process's own",
    "training/objectives/medusa2.py": "set_grad_enabled as a context",
    "machine.py": "threads, for a command or a measurement whose process is its own",
    "bench/peers/transformers.py": "a measurement is the process's own",
}


def test_settings_of_the_process_are_changed_in_known_places_alone() -> None:
    """On CUDA too, where no test here looks."""
    files = {str(f.relative_to(SOURCE)) for f in SOURCE.rglob("*.py") if GLOBAL.search(f.read_text(encoding="utf-8"))}
    assert files == {*ALLOWED}
