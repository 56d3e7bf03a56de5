"""The command line's contract: exit codes, one JSON document, one sentence, and no torch where none is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from cli_world import Run

from outrider import cli
from outrider.params import InputError

COMMANDS = Path(cli.__file__).parent / "commands"


@pytest.mark.process
def test_help_needs_no_torch() -> None:
    check = (
        "import sys; from outrider import cli; codes = [cli.main(a) for a in (['--help'], ['bench', '--help'], "
        "['bench', 'tasks'], ['generate', '--help'])]; "
        "sys.exit(any(codes) or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_names_every_command(run: Run) -> None:
    for shown in (run("--help"), run("-h"), run()):
        assert shown.code == 0
        assert not shown.err
        listed = [line.split()[1] for line in shown.out.splitlines() if line.startswith("│ ")]
        assert set(listed) >= {"generate", "bench", "info", "--install-completion"}
        assert all(f"─ {group} ─" in shown.out for group in cli.GROUPS)


def test_a_group_alone_shows_its_commands(run: Run) -> None:
    shown = run("data")
    assert shown.code == 2
    assert "generate" in shown.out
    assert shown.err == "outrider: name a command (see outrider data --help)\n"


def test_info_shows_where_a_model_lies(run: Run, tmp_path: Path) -> None:
    result = json.loads(run("info", "demo", "--json").out)
    assert (Path(result["where"]) / "config.json").is_file()
    assert (result["model"], result["drafter"]) == ("demo", "eagle:demo/hass")
    shown = run("info", "demo").out
    assert f"where     {result['where']}\n" in shown
    assert [result[key] for key in ("passes", "family", "layers", "context")] == ["native", "llama", 24, 2048]
    size = "size      10.2 million parameters, 20.5 MB (100% BF16)\n"
    for line in ("family    llama, 24 layers of width 192\n", size, "passes    native, bit-exact\n"):
        assert line in shown
    shown = run("info", str(tmp_path / "lost"))
    assert (shown.code, shown.out) == (2, "")
    assert "there is no folder" in shown.err
    (tmp_path / "notes.txt").write_text("no model")
    wrong = {str(tmp_path): "no config.json", str(tmp_path / "notes.txt"): "is not a model", "": "a model is demo"}
    for name, why in wrong.items():
        shown = run("info", name)
        assert (shown.code, why in shown.err) == (2, True), shown.err


@pytest.mark.parametrize("name", [n for n in cli.COMMANDS if (COMMANDS / f"{cli.file_of(n)}.py").is_file()])
def test_every_command_loads_and_takes_json(run: Run, name: str) -> None:
    shown = run(name, *(["generate"] if name == "data" else []), "--help")
    assert shown.code == 0
    assert "--json" in shown.out or name == "serve"


def test_failures_exit_1_and_debug_shows_why(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: BaseException) -> None:
        def command() -> None:
            raise error

        app = typer.Typer(**cli.PLAIN)
        app.command()(command)
        monkeypatch.setattr(cli, "load", lambda name: typer.main.get_command(app))

    fail(RuntimeError("the disk is full\nand more"))
    shown = run("info")
    assert (shown.code, shown.out) == (1, "")
    assert shown.err == "outrider: RuntimeError: the disk is full (--debug shows the traceback)\n"
    assert "Traceback" in run("info", "--debug").err
    assert "Traceback" not in run("info", "--", "--debug").err, "after -- it is an argument"
    monkeypatch.setenv("OUTRIDER_DEBUG", "1")
    assert "Traceback" in run("info").err
    monkeypatch.setenv("OUTRIDER_DEBUG", "0")
    fail(ValueError())
    assert run("info").code == 1
    fail(InputError("say this"))
    assert (run("info").code, run("info").err) == (2, "outrider: say this\n")
    fail(KeyboardInterrupt())
    assert (run("info").code, run("info").err) == (130, "outrider: interrupted\n")
    fail(typer.Exit(1))
    assert run("info").code == 1


def test_info(run: Run) -> None:
    result = json.loads(run("info", "--json").out)
    assert {"lookup", "none", "model"} <= set(result["drafters"])
    assert {"python", "torch", "transformers"} <= set(result["versions"])
    assert {"target", "draft"} <= set(result["models"])
    assert result["devices"][0] == "cpu"
    shown = run("info").out
    assert "drafters" in shown
    assert "et al\n" not in shown


@pytest.mark.process
def test_the_package_runs_as_a_module_and_completes_in_a_shell() -> None:
    """What a shell completes at TAB: commands, and the options of one, without torch."""
    module = [sys.executable, "-m", "outrider"]
    done = subprocess.run([*module, "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == version("outrider")
    for words, wanted in (("outrider ge", "generate"), ("outrider chat --sy", "--system")):
        settings = {"_OUTRIDER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = subprocess.run(module, capture_output=True, text=True, env={**os.environ, **settings})
        assert done.stdout.split() == [wanted], done.stderr


def test_version(run: Run) -> None:
    assert run("--version").out.strip() == json.loads(run("info", "--json").out)["versions"]["outrider"]
