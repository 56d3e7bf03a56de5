"""Names are looked at before anything is loaded: whatever is not there is refused in one sentence, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from cli_world import Run, refused

from outrider import plugins
from outrider.cli import COMMANDS
from outrider.commands import loading
from outrider.plugins import NEEDS, Kind

DATA, OUT = ("--data", "prompts.jsonl"), ("--out", "new")
# Each command with a model that is there and all that it needs; {} stands for the model.
COMPLETE = {
    "generate": "generate {} hello",
    "chat": "chat {}",
    "serve": "serve {}",
    "validate": "validate {}",
    "audit": "audit {}",
    "parity": f"parity {{}} --drafter demo/eagle --python {sys.executable}",
    "recommend": "recommend {}",
    "bench": "bench {} --out new",
    "info": "info {}",
    "train": "train eagle {} --data prompts.jsonl --out new",
    "data": "data generate {} --data prompts.jsonl --out new",
    "tune-tree": "tune-tree {} --drafter demo/medusa --prompts prompts.jsonl --out new",
    "import": "import demo/eagle {}",
    "export": "export demo/eagle {} --to vllm --out new",
}
MODELS = "./nothere", "nothere.gguf", "torn.gguf", "nobody/nothing", "nothing", "empty", "demo/nothing", "and / or"
DRAFTERS = (
    "nothing", "./nothere", "eagle:nothing", "eagle:./nothere", "eagle:nobody/nothing", "eagle", "hydra:demo/nothing",
    "eagle3:smollm2/nothing", "medusa:smollm2/nothing", "model:nothere.gguf", "model:torn.gguf", "model:nobody/nothing",
    "mamba:./nothere", "suffix:nothere.txt", "ngram:nothere.txt", "lookup?nothing=1", "lookup + nothing",
    "lookup + none", "lookup+suffix",
)  # fmt: skip
DRAFTING = "generate", "chat", "serve", "audit", "recommend", "bench", "data", "parity"
OTHERS = (
    "train nothing", "train nothing demo --data prompts.jsonl --out new", "train eagle demo --data nothere --out new",
    *(f"train eagle demo --data prompts.jsonl --out new {wrong}" for wrong in (
        "--option nothing=1", "--init nothing", "--init ./nothere", "--features nothere",
        "--dtype nothing", "--device nothing",
    )),
    *(f"bench demo --out new {wrong}" for wrong in (
        "--task nothing", "--peer nothing", "--data nothere", "--dtype nothing", "--device nothing",
        "--drafter lookup@nothing", "--drafter lookup@99,99", "--drafter lookup@native", "--drafter lookup@block?x=1",
    )),
    "bench compare nothere nothere", "bench tasks nothing", "bench demo --rule block", "theory --table",
    "export demo/nothing demo --to vllm --out new", "export demo/eagle demo --to nothing --out new",
    "export nothing demo --to vllm --out new", "import nothing", "import demo/nothing",
    "import smollm2", "export demo --to vllm --out new",
    "parity demo --drafter demo/eagle --python nothere",
    f"parity demo --drafter demo/eagle --python {sys.executable} --to x",
    "tune-tree demo --drafter nothing --prompts prompts.jsonl --out new",
    "tune-tree demo --drafter demo/medusa --prompts nothere --out new",
    "data generate demo --data nothere --out new", "nothing", "data nothing",
    "audit demo --prompts nothere", "recommend demo --prompts nothere", "generate demo --prompts nothere",
    *(f"{line} {wrong}" for line in ("generate demo hello", "chat demo", "validate demo", "serve demo") for wrong in (
        "--weights nothing", "--weights native", "--exact nothing", "--dtype nothing", "--device nothing",
    )),
    *(f"generate demo hello {wrong}" for wrong in (
        "--budget 3,b", "--temperature -1", "--batch-size 0", "--budget 1:2,1",
    )),
    "chat --system x --text", "audit --prompts nothere", "tune-tree", "generate Once upon",
    "generate", "generate demo", "generate org/name", "generate file.gguf", "generate ./nothere", "generate empty",
    "generate --model demo", "generate demo --model demo", "generate demo hello --model demo",
    "chat demo --model demo",
    "generate demo hello -p hello", "generate demo -p hello --prompts prompts.jsonl", "generate demo hello -t 0",
    *(f"{line} --rule nothing" for line in ("generate demo hello", "chat demo", "audit demo")),
    *(f"generate {name} hello" for name in ("models--org--name", "a..b", "org/x.git", "org/-x", "modèle", "a" * 97)),
    "generate ~nobody/model hello", "audit demo --minutes inf",
)  # fmt: skip
LINES = [
    *(COMPLETE[name].replace("{}", "MODEL").split() for name in COMPLETE),
    *([*COMPLETE[name].replace("{}", "demo").split(), "--drafter", spec] for name in DRAFTING for spec in DRAFTERS),
    *(line.split() for line in OTHERS),
]
CHECK = """
import contextlib, io, json, sys
from outrider import cli
for line in json.load(sys.stdin):
    said, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        code = cli.main(line)
    print(json.dumps([line, code, out.getvalue(), said.getvalue(), 'torch' in sys.modules]), flush=True)
    if 'torch' in sys.modules:
        break
"""


class Nobody(BaseHTTPRequestHandler):
    """A hub that has no repository."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Nobody) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.process
@pytest.mark.parametrize("offline", [False, True], ids=["a hub without it", "offline"])
def test_a_wrong_name_is_refused_without_torch(hub: str, offline: bool, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('"hello"\n', encoding="utf-8")
    (tmp_path / "torn.gguf").write_bytes(b"no GGUF")
    (tmp_path / "empty").mkdir()
    models = [[model if word == "MODEL" else word for word in line] for line in LINES for model in MODELS]
    lines = [list(line) for line in dict.fromkeys(map(tuple, models))]
    gone = "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "ALL_PROXY"
    environment = {key: value for key, value in os.environ.items() if key not in gone}
    environment |= {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path / "hub"),
        **({"HF_HUB_OFFLINE": "1"} if offline else {}),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHECK], input=json.dumps(lines), capture_output=True, text=True, check=False,
        cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in done.stdout.splitlines():
        line, code, out, said, torch = json.loads(text)
        about = f"{' '.join(line)}: {said or out}"
        assert (code, out) == (2, ""), about
        assert said.startswith("outrider: "), about
        assert said.count("\n") == 1, about
        assert not torch, f"torch was imported by {about}"
    assert done.stdout.count("\n") == len(lines)
    assert not (tmp_path / "new").exists()


def test_native_weights_of_no_gguf_file_are_refused_in_the_words_of_both_interfaces(run: Run) -> None:
    """Neither Python's spelling nor the command line's: the same sentence answers `outrider.load`."""
    said = refused(run("generate", "demo", "hello", "--weights", "native"))
    assert said == "outrider: native weights are those of a .gguf file, and demo is none; choose int8 or full\n"


def test_every_command_is_walked() -> None:
    assert set(COMPLETE) == set(COMMANDS)


def test_every_drafter_that_has_weights_is_known_to_the_check() -> None:
    """Those whose file has a NETWORK must be named with their weights."""
    networks = {name for name in plugins.ours("drafters") if hasattr(plugins.module("drafters", name), "NETWORK")}
    assert set(loading.NETWORKS) == networks
    for name in (*loading.CORPUS, *loading.MODELS):
        plugins.check("drafters", name)


@pytest.mark.parametrize("kind", ["drafters", "objectives"])
def test_options_that_there_are_pass_the_check(kind: Kind) -> None:
    from inspect import signature

    for name in plugins.ours(kind):
        function = getattr(plugins.module(kind, name), NEEDS[kind][-1])
        known = [p.name for p in signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        plugins.check_options(kind, name, set(known) - {"target", "tokenizer", "path", "documents"})
