"""The command's options, up to the moment at which it would wait for requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the server's packages are not installed: pip install 'outrider[serve]'")
from outrider.cli import main
from outrider.commands import serve as command
from outrider.serve import server, start
from outrider.serve.service import Limits

pytestmark = pytest.mark.trained


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, llm: Any, loaded: Any) -> Iterator[Any]:
    """Runs `outrider serve demo ...`; returns what it would have loaded and how it would have served it."""
    seen: dict[str, Any] = {}

    def loads(place: Any, drafter: Any, **options: Any) -> Any:
        seen.update(options)
        return llm

    def runs(service: Any, sock: Any, host: str, key: str, patience: float) -> None:
        seen.update(service=service, host=host, key=key, patience=patience)

    monkeypatch.setattr(start, "load", loads)
    monkeypatch.setattr(server, "run", runs)
    monkeypatch.setattr(llm, "remember", lambda: None)
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    log = logging.getLogger("outrider.serve")
    level = log.level

    def call(*more: str) -> dict[str, Any]:
        assert main(["serve", "demo", "--port", "0", *more]) == 0
        return {**seen, "level": log.level}

    yield call
    log.setLevel(level)


def test_what_is_loaded(serve: Any) -> None:
    result = serve("--exact", "bits", "--dtype", "bfloat16", "--budget", "8x4", "--no-compile")
    wanted = {"exact": "bits", "dtype": "bfloat16", "budget": "8x4", "compile": False, "weights": "auto"}
    assert {name: result[name] for name in wanted} == wanted
    assert main(["serve", "demo", "--exact", "maybe"]) == 2
    assert main(["serve", "demo", "--timeout", "nan"]) == 2
    assert main(["serve", "demo", "--shutdown-timeout", "inf"]) == 2
    assert main(["serve", "demo", "--header-timeout", "nan"]) == 2
    assert main(["serve", "demo", "--max-body", "0"]) == 2
    assert main(["serve", "demo", "--threads", "0"]) == 2


def test_its_threads(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(command, "use_threads", counts.append)
    serve()
    serve("--threads", "1")
    assert counts == [1]


def test_how_it_is_served(serve: Any) -> None:
    sizes = ["--rows", "3", "--queue", "5", "--timeout", "7", "--prefill-share", "0.25", "--shutdown-timeout", "9"]
    result = serve(*sizes, "--name", "mine", "--prefix-cache", "2")
    service, scheduler = result["service"], result["service"].scheduler
    assert (service.name, service.limits.seconds, result["patience"]) == ("mine", 7.0, 9.0)
    assert (scheduler.rows, scheduler.queue, scheduler.prefill_share) == (3, 5, 0.25)
    assert scheduler.engine.prefixes.limit == 2 << 20
    assert serve()["service"].name == "demo"
    assert serve()["service"].limits == Limits(body=1 << 20)
    bounds = ["--max-body", "0.5", "--max-connections", "7", "--header-timeout", "3", "--send-timeout", "4"]
    wanted = Limits(body=1 << 19, connections=7, header=3.0, send=4.0)
    assert serve(*bounds)["service"].limits == wanted
    assert 'model_name="mine"' in scheduler.metrics.page().decode()


def test_names_of_other_servers_options(serve: Any) -> None:
    service = serve("--served-model-name", "mine", "--max-num-seqs", "5")["service"]
    assert (service.name, service.scheduler.rows) == ("mine", 5)


def test_the_servers_exit_code_is_the_commands(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "run", lambda *_: 143)
    assert main(["serve", "demo", "--port", "0"]) == 143


def test_the_key(serve: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is warned of where it is missing and the network is not this machine."""
    warning = "open to the network without a key"
    assert serve()["key"] == ""
    assert warning not in capsys.readouterr().err
    assert serve("--host", "0.0.0.0")["host"] == "0.0.0.0"
    assert warning in capsys.readouterr().err
    assert serve("--host", "0.0.0.0", "--api-key", "s3cret")["key"] == "s3cret"
    assert warning not in capsys.readouterr().err
    monkeypatch.setenv("OUTRIDER_API_KEY", "kept")
    assert serve("--host", "0.0.0.0")["key"] == "kept"
    assert warning not in capsys.readouterr().err


def test_quiet(serve: Any) -> None:
    assert serve()["level"] == logging.INFO
    assert serve("--quiet")["level"] == logging.WARNING
