"""`outrider data generate --endpoint` against our own server: the target's own tokens, each question answered once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gateway import gateway
from serve_world import Serve, Served

from outrider import files
from outrider.cli import main
from outrider.llm import LLM
from outrider.serve.start import service_of
from outrider.training import answering, data
from outrider.training.endpoints import Wish, line
from outrider.training.questions import keys, questions

pytestmark = pytest.mark.trained
ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ROOT / "recipes" / "demo" / "questions.jsonl"
SMALL = ["--max-new-tokens", "16", "--json"]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rests."""
    monkeypatch.setattr(answering, "REST", 0.01)


def call(url: str, out: Path, *more: str, count: int = 6) -> list[str]:
    common = ["data", "generate", "--data", str(QUESTIONS), "--out", str(out), "--limit", str(count)]
    return [*common, "--endpoint", url, *more]


def lines(out: Path) -> dict[str, Any]:
    """The answers by their ids, of which none is there twice."""
    results = [json.loads(row) for row in out.read_text(encoding="utf-8").splitlines()]
    made = {row["id"]: row for row in results}
    assert len(made) == len(results)
    return made


def wanted(count: int) -> list[str]:
    return keys([what for _, what in questions([QUESTIONS])][:count])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_answers_are_the_local_targets(
    served: Served, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text, end and tokens are those of the target in this process, and training reads these very tokens."""
    asked = tmp_path / "asked.jsonl"
    rows = QUESTIONS.read_text(encoding="utf-8").splitlines()[:4]
    opening = "Once upon a time there was a dog"
    asked.write_text("\n".join([*rows, json.dumps({"text": f"{opening} who was never sent"})]), encoding="utf-8")
    there, here = tmp_path / "there.jsonl", tmp_path / "here.jsonl"
    common = ["data", "generate", "--data", str(asked), "--seed", "7", *SMALL]
    assert main([*common, "--out", str(there), "--endpoint", f"{served.url}/v1/", "--opening", "8"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "written": 5, "questions": 5, "out": str(there), "without_token_ids": 0, "refused": [],
    }  # fmt: skip
    assert main([*common, "--out", str(here), "demo", "--drafter", "none", "--limit", "4"]) == 0
    mine = {row["id"]: row for row in map(json.loads, here.read_text(encoding="utf-8").splitlines())}
    theirs = lines(there)
    order = keys([what for _, what in questions([asked])])
    for i, key in enumerate(order[:4]):
        assert (theirs[key]["messages"], theirs[key]["ends"]) == (mine[i]["messages"], mine[i]["ends"])
        asked_for = theirs[key]["messages"][:-1]
        made = llm.generate(asked_for, max_new_tokens=16, temperature=1.0, seed=7 + i)[0]
        assert theirs[key]["token_ids"] == made.tokens
        assert len(theirs[key]["prompt_token_ids"]) == made.usage.prompt_tokens
    text = theirs[order[4]]
    assert text["prompt"] == opening
    assert text["completion"] == llm.generate(opening, max_new_tokens=16, temperature=1.0, seed=11)[0].text
    for row, document in zip(theirs.values(), data.read([there], llm.tokenizer), strict=True):
        assert document.tokens == (*row["prompt_token_ids"], *row["token_ids"])
        assert document.learn == (False,) * len(row["prompt_token_ids"]) + (True,) * len(row["token_ids"])


@pytest.mark.process
def test_killed_and_started_again(served: Served, tmp_path: Path) -> None:
    """kill -9 in the middle, half a line at the end: every question is answered once, as if nothing had been."""
    asked, out, full = (tmp_path / name for name in ("asked.jsonl", "answers.jsonl", "whole.jsonl"))
    asked.write_text("".join(json.dumps({"prompt": f"Story {i} of the dog:"}) + "\n" for i in range(24)))
    source = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); from outrider.cli import main; "
    command = ["data", "generate", "--data", str(asked), "--endpoint", served.url, "--max-new-tokens", "24"]
    command += ["--concurrency", "2", "--json", "--out"]

    def begin() -> subprocess.Popen[bytes]:
        code = source + "sys.exit(main(sys.argv[1:]))"
        return subprocess.Popen([sys.executable, "-c", code, *command, str(out)])

    process, end = begin(), time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        if out.exists() and out.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL, "it was killed while it worked"
    assert 4 <= len(lines(out)) < 24
    with out.open("a", encoding="utf-8") as file:
        file.write('{"id": "cut of')
    assert begin().wait(200) == 0
    assert sorted(lines(out)) == sorted(keys([what for _, what in questions([asked])]))
    assert main([*command, str(full)]) == 0
    assert lines(full) == lines(out)


def test_a_request_to_a_failing_server_is_retried(served: Served, tmp_path: Path) -> None:
    """Busy, cut off, garbled and given up: the answers are those of a server that never fails."""
    out, full = tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    assert main(call(served.url, full, *SMALL)) == 0
    with gateway(served.url, "busy", "cut", "garbage", "abort", "cut") as between:
        assert main(call(between.url, out, *SMALL, "--concurrency", "1")) == 0
        done = [what for _, what in between.asked]
        assert done == ["busy", "cut", "garbage", "abort", "cut"] + ["pass"] * 6
        assert between.asked[1][0] - between.asked[0][0] >= 1.0, "Retry-After is honoured"
    assert lines(out) == lines(full)


def test_a_question_that_is_always_spoilt_is_left_out(served: Served, tmp_path: Path) -> None:
    asked = list(questions([QUESTIONS]))[:2]
    with gateway(served.url, *["garbage"] * answering.SPOILT) as between:
        wish = Wish("demo", 8)
        result = answering.write([between.url], asked[:1], tmp_path / "a.jsonl", wish, 1)
        assert result.refused == [f"{asked[0][0]}: {between.url}: answers with something that is not JSON"]
        assert answering.write([between.url], asked, tmp_path / "a.jsonl", wish, 1).answers == 2


def test_a_dead_server_leaves_the_work_to_the_others(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "GIVEN_UP", 0.0)
    asked, dead, said = list(questions([QUESTIONS]))[:8], f"http://127.0.0.1:{free_port()}", list[str]()
    result = answering.write([dead, served.url], asked, tmp_path / "a.jsonl", Wish("demo", 8), 2, say=said.append)
    assert (result.answers, result.refused) == (8, [])
    assert set(said) <= {f"{dead} cannot be reached; it gets no more requests"}
    with pytest.raises(answering.EndpointError, match=f"no server is left, {dead} cannot be reached"):
        answering.write([dead], asked, tmp_path / "b.jsonl", Wish("demo", 8), 2, say=said.append)
    assert said[-1] == f"{dead} cannot be reached; it gets no more requests"


def test_text_without_token_ids_is_reported(
    served: Served, tmp_path: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    with gateway(served.url, "bare", "bare") as between:
        assert main(call(between.url, out, "--max-new-tokens", "16", count=3)) == 0
    assert "3 answers written" in (said := capsys.readouterr().out)
    assert "2 of them as text, to be tokenised, since a server gave no token ids" in said
    assert sum("token_ids" in row for row in lines(out).values()) == 1
    assert len(list(data.read([out], llm.tokenizer))) == 3


def test_a_refused_question_does_not_stop_the_others(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "' + "dog " * 5000 + '"}\n{"prompt": "Once upon"}\n', encoding="utf-8")
    common = ["data", "generate", "--data", str(asked), "--endpoint", served.url, "--max-new-tokens", "8"]
    assert main([*common, "--opening", "6000", "--out", str(tmp_path / "a.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "1 answer written" in said
    assert f"1 questions were not answered, the first: {asked}, line 1: {served.url} answers 400: the text has" in said


def test_refusals_alone_end_the_run(served: Served, tmp_path: Path) -> None:
    asked = [(f"line {i}", "dog " * 5000) for i in range(40)]
    with pytest.raises(answering.EndpointError, match="16 questions were refused, the last: line"):
        answering.write([served.url], asked, tmp_path / "a.jsonl", Wish("demo", 8, opening=6000), 1)


def test_refused_questions_do_not_end_a_run_that_is_repeated(served: Served, tmp_path: Path) -> None:
    """They have no line in the file, and come before the questions that are new."""
    long = [(f"long {i}", f"{i} " + "dog " * 5000) for i in range(17)]
    short, out = [(f"short {i}", f"Story {i} of the dog:") for i in range(6)], tmp_path / "a.jsonl"
    wish = Wish("demo", 8, opening=6000)
    assert answering.write([served.url], short[:5], out, wish, 1).answers == 5
    again = answering.write([served.url], [*long, *short], out, wish, 1)
    assert (again.answers, len(again.refused)) == (1, 17)
    once_more = answering.write([served.url], [*long, *short], out, wish, 1)
    assert (once_more.answers, len(once_more.refused)) == (0, 17)


def test_a_key_is_sent_where_one_is_wanted(
    start: Serve, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    locked = start(service_of(llm, {"eagle": llm.drafter}, "demo", rows=2, queue=8), "secret")
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    assert main(call(locked.url, tmp_path / "a.jsonl", *SMALL)) == 2
    assert "does not say which models it serves (401" in capsys.readouterr().err
    monkeypatch.setenv("OUTRIDER_API_KEY", "secret")
    assert main(call(locked.url, tmp_path / "a.jsonl", *SMALL, count=2)) == 0


def test_bad_input_is_one_sentence(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, dead = tmp_path / "a.jsonl", f"http://127.0.0.1:{free_port()}"
    numbered = tmp_path / "numbered.jsonl"
    numbered.write_text('{"id": 3}\n', encoding="utf-8")
    for args, words in (
        (call(dead, out), f"{dead} cannot be reached; start the server, or correct the address"),
        (call("localhost", out), "localhost is not an address"),
        (call(served.url, out, "--endpoint", dead), "cannot be reached"),
        ([*call(served.url, out), "llama"], f"{served.url} serves demo, not llama"),
        (call(served.url, out, "--drafter", "lookup"), "--endpoint leaves these to the servers"),
        (call(served.url, out, "--weights", "int8"), "--endpoint leaves these to the servers"),
        (call(served.url, out, "--concurrency", "0"), "concurrency must be at least 1"),
        (call(served.url, numbered), "was not written by this command"),
    ):
        assert main(args) == 2
        said = capsys.readouterr().err
        assert words in said
        assert len(said.strip().splitlines()) == 1
    assert not out.exists()


def test_ctrl_c_keeps_answers(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, append, calls = tmp_path / "a.jsonl", files.append, [0]

    def interrupted(path: Path, row: str) -> None:
        append(path, row)
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(files, "append", interrupted)
        assert main(call(served.url, out, *SMALL, "--concurrency", "1")) == 130
    assert len(lines(out)) in (1, 2)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"outrider: interrupted; {out} has ")
    assert said.endswith("the same command resumes from there")
    assert main(call(served.url, out, *SMALL)) == 0
    assert sorted(lines(out)) == sorted(wanted(6))


def test_equal_questions_have_ids_of_their_own() -> None:
    prompts = ["a", "b", "a", [{"role": "user", "content": "a"}]]
    result = keys(prompts)
    assert len(set(result)) == 4
    assert result[:2] == keys(["a", "b"]), "an id does not depend on what follows"
    assert keys(["b", "a"]) == result[1::-1], "nor on the order"


def test_prompt_ids_stand_where_each_engine_puts_them() -> None:
    """vLLM: beside the choices of a chat; SGLang, and vLLM for completions: in the choice."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "model": "org/it", "temperature": 0.5}
    choice = {"message": {"content": "Ho"}, "finish_reason": "stop", "token_ids": [5, 2]}
    for answer in (
        {"choices": [choice], "prompt_token_ids": [1, 4]},
        {"choices": [{**choice, "prompt_token_ids": [1, 4]}]},
    ):
        made = line("k", chat, answer)
        assert (made["prompt_token_ids"], made["token_ids"], made["ends"]) == ([1, 4], [5, 2], True)
        assert made["by"] == {"model": "it", "temperature": 0.5}
    assert "token_ids" not in line("k", chat, {"choices": [choice]}), "half of them are none"
