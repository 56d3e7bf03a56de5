"""Random requests made from the OpenAPI document: whatever comes is answered, and never by a fault of the server's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serve_world import Serve

from outrider.llm import LLM
from outrider.serve.service import Limits
from outrider.serve.start import service_of

pytestmark = [pytest.mark.trained, pytest.mark.process, pytest.mark.slow]


def test_schemathesis_finds_no_fault(llm: LLM, loaded: Any, start: Serve, tmp_path: Path) -> None:
    """A request may run for one second only, so that texts of thousands of tokens cost little."""
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install 'outrider[load]'")
    served = start(service_of(llm, loaded, "demo", rows=8, limits=Limits(seconds=1.0)))
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", "--max-examples", "60"]
    checks = ["--checks", "not_a_server_error,content_type_conformance,response_schema_conformance"]
    settings = ["--phases", "examples,coverage,fuzzing", "--seed", "1", "--request-timeout", "60", "--no-color"]
    limits = ["--max-time", "150", "--warnings", "off", "--generation-database", "none"]
    # Its folder of reports is left where it runs: never in a repository.
    done = subprocess.run(
        [*command, *checks, *settings, *limits], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    tried = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert tried is not None
    assert int(tried[1]) == int(tried[2]) > 100
    assert served.idle()
    assert served.get("/health")
    assert served.service.scheduler.metrics.failed_rounds._value.get() == 0
    assert not served.service.scheduler.fleet.failed
