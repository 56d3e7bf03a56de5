"""`outrider chat`: turns, its commands, models without a chat template, Ctrl-C, and a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_world import PROMPT, Run, refused

import outrider
from outrider import cli
from outrider.commands import chat

TEMPLATE = "{% for m in messages %}{{ m['content'] + ' . ' }}{% endfor %}"
SHORT = ("--max-new-tokens", "6", "--temperature", "0")


@pytest.fixture
def talk(folder: str) -> chat.Talk:
    """A conversation of at most six tokens an answer, in the tiny model's template."""
    llm = outrider.load(folder)
    llm.tokenizer.chat_template = TEMPLATE
    return chat.Talk(llm, outrider.Sampling(), {"max_new_tokens": 6, "rule": "coupled", "stop": []})


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


def test_every_turn_reads_the_whole_conversation(talk: chat.Talk, capsys: pytest.CaptureFixture[str]) -> None:
    talk.system = "the hill"
    talk.reset()
    talk.ask(PROMPT)
    assert talk.last is not None
    answer = talk.last.output
    assert capsys.readouterr().out == answer.text + "\n"
    talk.ask("then again")
    said = ["the hill", PROMPT, answer.text, "then again"]
    assert talk.last.prompt == talk.llm.encode(" . ".join(said) + " . ")
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert talk.command("/reset") == "a new conversation"
    assert [m["content"] for m in talk.messages] == ["the hill"]


def test_commands_change_how_answers_are_drawn(talk: chat.Talk, capsys: pytest.CaptureFixture[str]) -> None:
    assert talk.command("/seed 7") == "seed 7"
    assert talk.command("/temperature 1.5") == "temperature 1.5"
    talk.ask(PROMPT)
    assert "; seed 7\n" in capsys.readouterr().err
    first = talk.last
    for spelled in ("lookup suffix", "lookup + suffix"):
        assert talk.command(f"/drafter {spelled}") == "drafting with lookup + suffix"
        assert len(talk.llm.drafter.parts) == 2
    talk.command("/reset")
    talk.ask(PROMPT)
    assert first is not None
    assert talk.last is not None
    assert talk.last.output.tokens == first.output.tokens, "the drafter changes nothing about the text"
    assert "per pass (lookup + suffix)" in capsys.readouterr().err
    assert talk.command("/compare").startswith("the same text; lookup + suffix was ")
    talk.command("/temperature 0")
    talk.command("/drafter none")
    said = talk.command("/compare")
    assert said.startswith("the same text; lookup + suffix was "), "it compares what was asked for then"
    assert all(name.split()[0] in talk.command("/help") for name in chat.HELP)
    assert talk.command("/seed") == "a fresh seed for every answer"
    assert chat.completions("/re", 0) == "/reset"
    assert chat.completions("/re", 1) is None


def test_errors_are_shown_and_the_conversation_goes_on(talk: chat.Talk, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["/compare", "/what", "/seed x", "/drafter nonsense", "cat " * 200, "/temperature -1", PROMPT]
    assert chat.converse(talk, iter([*lines, " /quit", "x"])) > 3
    err = capsys.readouterr().err.splitlines()
    wrong = [line for line in err if line.startswith("outrider: ")]
    for line, words in zip(
        wrong,
        ("no answer to compare", "no command /what", "takes an integer", "nonsense", "/reset starts", "temperature"),
        strict=True,
    ):  # fmt: skip
        assert words in line
    assert [m["content"] for m in talk.messages[::2]] == [PROMPT], "refused turns are forgotten, and /quit quits"


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    talk: chat.Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    echo, rounds = typer.echo, []

    def interrupted(message: Any = None, **how: Any) -> None:
        echo(message, **how)
        rounds.append(message)
        if len(rounds) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(typer, "echo", interrupted)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    chat.converse(talk, iter([PROMPT, "then"]))
    assert "; interrupted\n" in capsys.readouterr().err
    assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
    assert 0 < len(talk.messages[1]["content"].split()) < 6


def test_without_a_template_the_model_goes_on_from_the_text(
    run: Run, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal every line is a turn."""
    typed(monkeypatch, PROMPT, "", "the dog")
    code, out, err = run("chat", folder, *SHORT, "--json")
    assert code == 0
    assert "has no chat template: text mode" in err
    first, second = map(json.loads, out.splitlines())
    alone = json.loads(run("generate", folder, PROMPT, *SHORT, "--json")[1])["outputs"][0]
    assert first["tokens"] == alone["tokens"]
    assert second["usage"]["prompt_tokens"] > len(PROMPT.split()) + len(alone["text"].split())
    assert "which --system needs" in refused(run("chat", folder, "--system", "the"))


@pytest.mark.process
@pytest.mark.trained
def test_on_a_terminal(tmp_path: Path) -> None:
    """Typed lines, pasted ones, a history that is kept, Ctrl-C and Ctrl-D at the prompt."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
        os.execv(sys.executable, [sys.executable, "-m", "outrider", "chat", "demo", "--drafter", "lookup", *SHORT])
    shown = ""

    def until(words: str, typed: bytes = b"") -> str:
        """Read on to these words, and return what came before them. A key is typed before each wait: a Ctrl-C just
        before readline waits can be lost."""
        nonlocal shown
        patience = 120
        while words not in shown:
            if typed:
                os.write(terminal, typed)
            while words not in shown and select.select([terminal], [], [], 5)[0]:
                shown += os.read(terminal, 4096).decode(errors="replace")
            patience -= 5
            assert patience > 0, shown
        before, _, shown = shown.partition(words)
        return before

    until("/quit leaves")
    assert "\x1b[?2004h" in until("> "), "the terminal is asked to mark what is pasted"
    os.write(terminal, PROMPT.encode() + b"\n")
    until("per pass (lookup)")
    until("> ")
    os.write(terminal, b"\x1b[200~/* " + PROMPT.encode() + b"\n\nand then */\x1b[201~\r")
    assert "> " not in until("and then */"), "pasted lines are one message"
    until("per pass (lookup)")
    until("> ")
    until("(/quit or Ctrl-D leaves)", b"\x03")
    until("> ")
    os.write(terminal, b"\x04")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    assert code == 0
    assert PROMPT in (tmp_path / "outrider" / "chat_history").read_text(encoding="utf-8")


def test_ctrl_c_that_a_library_has_swallowed_is_still_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import signal

    def command() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("worker died") from None

    app = typer.Typer(**cli.PLAIN)
    app.command()(command)
    monkeypatch.setattr(cli, "load", lambda name: typer.main.get_command(app))
    assert cli.main(["info"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "outrider: interrupted\n"
    clock = iter([0.0, 60.0])  # a minute after an answer was interrupted
    monkeypatch.setattr(cli, "monotonic", lambda: next(clock))
    assert cli.main(["info"]) == 1
    assert "worker died" in capsys.readouterr().err
