"""A model hub that cannot be reached: one sentence within seconds, in every command."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from time import monotonic

import pytest
from cli_world import Run, refused

from outrider.hub import ensure, reachable
from outrider.params import InputError

NOBODY = "nobody/nothing-of-that-name"


@pytest.mark.parametrize(
    "line",
    [
        ("generate", NOBODY, "x"),
        ("generate", "demo", "x", "--drafter", f"eagle:{NOBODY}"),
        ("chat", NOBODY),
        ("serve", NOBODY),
        ("serve", "demo", "--drafter", f"model:{NOBODY}"),
        ("validate", NOBODY),
        ("audit", NOBODY),
        ("parity", NOBODY, "--drafter", "eagle:demo/eagle", "--python", sys.executable),
        ("recommend", NOBODY),
        ("bench", NOBODY, "--out", "new"),
        ("train", "eagle", NOBODY, "--data", __file__, "--out", "new"),
        ("data", "generate", NOBODY, "--data", "prompts.jsonl", "--out", "new"),
        ("tune-tree", NOBODY, "--drafter", "medusa:demo/medusa", "--prompts", "prompts.jsonl", "--out", "new"),
        ("import", NOBODY),
        ("import", "drafter", NOBODY),
        ("export", NOBODY, "demo", "--to", "vllm", "--out", "new"),
        ("export", "drafter", NOBODY, "--to", "vllm", "--out", "new"),
    ],
    ids=" ".join,
)
def test_an_unreachable_hub_is_one_sentence(
    run: Run, line: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens on the port: no retries, and what is in the cache would be used. Nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")
    Path("drafter").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    began = monotonic()
    said = refused(run(*line))
    assert f"{NOBODY} is neither a folder nor in the cache, and the hub is out of reach" in said
    assert monotonic() - began < 5
    assert not Path("new").exists()


def test_what_counts_as_within_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        assert reachable(f"http://127.0.0.1:{there.getsockname()[1]}")


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
@pytest.mark.parametrize("scheme", ["", "http://"])
def test_a_proxy_is_within_reach(monkeypatch: pytest.MonkeyPatch, name: str, scheme: str) -> None:
    """As the hub's client reads its address; but not for the hosts that go without."""
    for other in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(other, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as there:
        monkeypatch.setenv(name, f"{scheme}127.0.0.1:{there.getsockname()[1]}")
        assert reachable("http://no.such.host.invalid")
        monkeypatch.setenv("no_proxy", "no.such.host.invalid")
        assert not reachable("http://no.such.host.invalid")


@pytest.mark.parametrize("name", ["./modle", "/modle", "a/b/c", "modle/"])
def test_a_mistyped_folder_is_no_hub_id(name: str) -> None:
    with pytest.raises(InputError, match=f"^there is no folder {name}; check the path"):
        ensure(name)
