"""Threads with small stacks: what a product works in does not lie there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.backends.native.library import library

SCRIPT = """
import os, resource, sys, torch
sys.path.insert(0, "tests/support")
from small import build
from outrider.backends.native.library import library
from outrider.backends.native.target import load

folder, sizes = sys.argv[1], {"hidden_size": 64, "intermediate_size": 14336, "head_dim": 32, "num_hidden_layers": 1}
build("llama", torch.bfloat16, **sizes).save_pretrained(folder)
for weights in ("full", "int8"):
    target = load(folder, "bfloat16", weights)
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.RLIM_INFINITY))  # of the first thread
    for threads, own in ((1, True), (2, True), (2, False)):
        torch.set_num_threads(threads)
        library("bfloat16", "bfloat16").own_pool = own
        with torch.no_grad():
            for _ in target.open(200).prefill([[i % 97 for i in range(130)]]):
                pass
    resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.RLIM_INFINITY))
print("done")
"""


@pytest.mark.process
@pytest.mark.skipif(library("bfloat16", "bfloat16") is None, reason="there is no compiled pass on this machine")
def test_64_rows_of_width_14336_fit_beside_a_stack_of_one_megabyte(tmp_path: Path) -> None:
    """The first thread's, and those of our own pool and of torch's, where `OMP_STACKSIZE=1M` gives them so much."""
    environment = {**os.environ, "OMP_STACKSIZE": "1M", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]
