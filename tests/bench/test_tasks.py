"""Tasks by name: the catalogue, each place that rows come from, the user's own files, cutting, exact match."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from outrider import InputError
from outrider.bench import sources, tasks
from outrider.bench.types import Task
from papers.quality import exact

GROUPS, CATALOGUE = tasks.catalogue()
IN_FOLDER = [*tasks.expand(["spec-bench", "eagle"]), "humaneval-raw", "xsum"]
CANNED = tasks.expand(["demo", "sample"])
LONG = tasks.expand(["longbench"])


def write(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join((r.decode() if isinstance(r, bytes) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8"
    )
    return path


def long_row(number: int, words: int) -> dict[str, object]:
    """A row as LongBench publishes it."""
    row = {
        "input": f"Who is number {number}?",
        "context": "word " * words,
        "answers": ["Ann", "Ann Lee"],
        "length": words,
    }
    return {**row, "dataset": "narrativeqa", "language": "en", "all_classes": None, "_id": f"id{number}"}


# -- the catalogue ---------------------------------------------------------------------------------------------------


def test_catalogue_is_well_formed() -> None:
    assert list(GROUPS) == ["spec-bench", "eagle", "longbench", "demo", "sample", "coder"]
    assert [len(g.tasks) for g in GROUPS.values()] == [6, 6, 6, 9, 7, 7]
    for group in GROUPS.values():
        assert set(group.tasks) <= set(CATALOGUE)
    for entry in CATALOGUE.values():
        assert entry.kind
        assert entry.about
        assert entry.sources
        assert entry.count in (80, None)
        for source in entry.sources:
            assert bool(source.package) != bool(source.file or source.repo), entry.name
            assert not source.file or source.file.endswith(".jsonl")
    assert list(tasks.names())[:6] == list(GROUPS)
    assert tasks.names()["gsm8k"] == "maths: word problems of primary school"
    assert set(tasks.names()) == set(GROUPS) | set(CATALOGUE)


def test_the_coder_tasks_are_complete_and_their_files_are_python() -> None:
    edits = tasks.load("code-edits").prompts
    assert [
        sum(p.id.startswith(f"code-edits/{k}/") for p in edits) for k in ("document", "type", "rename", "repair")
    ] == [15] * 4
    assert [len(tasks.load(name).prompts) for name in ("explain", "file-chat", "agent")] == [15, 8, 8]
    assert {len(p.turns) for p in tasks.load("file-chat").prompts} == {8}
    for prompt in edits:
        code = prompt.turns[0].split("```python\n")[1].rpartition("\n```")[0]
        ast.parse(code)
        assert 18 <= len(code.splitlines()) <= 151, prompt.id


def test_expand() -> None:
    assert tasks.expand(["eagle", "gsm8k", "xsum"])[-2:] == ["natural-questions", "xsum"]
    assert tasks.expand(["longbench@1024"]) == [f"{n}@1024" for n in LONG]
    assert tasks.expand(["mine.jsonl@64", "mine.jsonl"]) == ["mine.jsonl@64", "mine.jsonl"]


@pytest.mark.parametrize("call", [lambda n: tasks.expand([n]), tasks.load])
def test_unknown_task_names_near_matches(call) -> None:
    with pytest.raises(InputError, match=r"there is no task gsm8: did you mean .*gsm8k"):
        call("gsm8")
    with pytest.raises(InputError, match=r"there is no task zzz: there are spec-bench, eagle, .* and more"):
        call("zzz")
    with pytest.raises(InputError, match="there is no task gsm8k@4k"):
        call("gsm8k@4k")


# -- the published sets, from a folder -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    if not (shared / "data" / "eval").is_dir():
        pytest.skip("no folder shared/data/eval beside the repository: tests of the published sets need it")
    return shared / "data" / "eval"


@pytest.mark.parametrize("name", IN_FOLDER)
def test_published_sets(name: str, folder: Path) -> None:
    task = tasks.load(name, folder)
    assert (task.name, len(task.prompts), task.cut) == (name, 80, None)
    assert len({p.id for p in task.prompts}) == 80
    turns = {len(p.turns) for p in task.prompts}
    assert turns == ({2} if task.kind == "chat" else {1})
    assert task.raw == (name == "humaneval-raw")
    assert not any("<|endoftext|>" in t for p in task.prompts for t in (*p.turns, p.reference))
    assert ("substitute" in task.note) == (name in ("alpaca", "xsum"))
    if task.kind == "maths":
        assert all(exact("maths", p.reference, p.reference) for p in task.prompts)


def test_spec_bench_is_six_times_eighty_distinct_prompts(folder: Path) -> None:
    results = [tasks.load(n, folder) for n in tasks.expand(["spec-bench"])]
    assert len({p.id for t in results for p in t.prompts}) == 480
    assert len({t.kind for t in results}) == 6
    assert results[1].prompts[0].turns[0].startswith("Translate German to English: ")
    assert results[5].prompts[0].reference.startswith("a source of lumber\naiding")  # several answers: one a line


def test_second_files_are_taken_where_the_first_is_missing(folder: Path, tmp_path: Path) -> None:
    for file in ("mt_bench.jsonl", "gsm8k_test_400.jsonl", "cnn_dm_200.jsonl"):
        (tmp_path / file).symlink_to(folder / file)
    chat, maths, news = (tasks.load(n, tmp_path) for n in ("mt-bench", "gsm8k", "cnn-dm"))
    assert [p.turns for p in chat.prompts] == [p.turns for p in tasks.load("mt-bench", folder).prompts]
    assert [p.id for p in maths.prompts] == [f"gsm8k/test/{i}" for i in range(80)]
    assert "not the 80 that the papers drew" in maths.note
    assert news.note.startswith("a substitute")


def test_a_limit_spreads_over_the_categories(folder: Path) -> None:
    task = tasks.load("mt-bench", folder, limit=8)
    assert len({p.category for p in task.prompts}) == 8
    assert len(tasks.load("mt-bench", folder, limit=1000).prompts) == 80
    with pytest.raises(InputError, match="at least one prompt, not 0"):
        tasks.load("mt-bench", folder, limit=0)


def test_a_set_as_its_authors_publish_it(tmp_path: Path) -> None:
    row = {"question_id": 321, "category": "qa", "turns": ["Who?"]}
    write(tmp_path / "spec_bench.jsonl", row, {**row, "question_id": 241, "category": "summarization"})
    assert [p.id for p in tasks.load("spec-bench/question-answering", tmp_path).prompts] == ["321"]


# -- what ships ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CANNED)
def test_what_ships_needs_no_folder(name: str) -> None:
    task = tasks.load(name)
    assert len(task.prompts) == (8 if name.startswith("sample/") else 14 if name == "demo/oasst" else 20)
    assert task.note
    assert task.raw == (name in ("demo/stdlib", "demo/algorithms", "demo/tldr", "demo/stories", "demo/books"))
    assert all(p.id and all(p.turns) for p in task.prompts)


def test_the_sample_task_has_its_documented_prompts() -> None:
    results = {n: tasks.load(n) for n in tasks.expand(["sample"])}
    assert {len(p.turns) for p in results["sample/chat"].prompts} == {2}
    assert len({t.kind for t in results.values()}) == 7
    for name in ("sample/maths", "sample/question-answering"):
        assert all(exact(results[name].kind, p.reference, p.reference) for p in results[name].prompts)
    for prompt in results["sample/summarisation"].prompts:
        assert 100 < len(prompt.turns[0].split()) < 150
    for prompt in results["sample/retrieval"].prompts:
        assert "Passage 3: " in prompt.turns[0]
        assert prompt.reference.split()[-1] in prompt.turns[0]


def test_demo_conversations_keep_every_turn_of_the_user() -> None:
    line = (Path(tasks.__file__).parents[1] / "demo" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    row = next(r for r in map(json.loads, line) if r["id"] == "sgd-0")
    prompt = next(p for p in tasks.load("demo/sgd").prompts if p.id == "sgd-0")
    assert prompt.turns == tuple(m["content"] for m in row["messages"] if m["role"] == "user")
    assert prompt.reference == row["reference"].rstrip()
    assert len(prompt.turns) > 3


# -- LongBench -------------------------------------------------------------------------------------------------------


def test_a_cut_is_recorded(tmp_path: Path) -> None:
    write(tmp_path / "narrativeqa.jsonl", *(long_row(i, 9000 if i % 2 else 100) for i in range(8)))
    task = tasks.load("narrativeqa@4096", tmp_path, limit=2)
    assert (task.name, task.cut, task.raw) == ("narrativeqa@4096", 4096, False)
    assert [p.id for p in task.prompts] == ["id0", "id4"]
    assert "more than 4096 tokens are cut to their first and last halves" in task.note
    assert task.prompts[0].reference == "Ann\nAnn Lee"
    text = task.prompts[0].turns[0]
    assert text.endswith("\n\nQuestion: Who is number 0?\n\nAnswer:")
    assert text.count("word") > 100 - 1


@pytest.mark.parametrize("name", LONG)
def test_every_long_set_has_its_question_and_its_text(name: str, tmp_path: Path) -> None:
    (source,) = CATALOGUE[name].sources
    write(tmp_path / source.file, long_row(0, 5))
    text = tasks.load(name, tmp_path).prompts[0].turns[0]
    assert "Who is number 0?" in text
    assert "word word" in text
    assert "{" not in text


def test_archive_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LongBench's zip file, as published, in the place where the hub's client would put it."""
    import huggingface_hub

    write(tmp_path / "rows.jsonl", long_row(0, 5), long_row(1, 5))
    with ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(tmp_path / "rows.jsonl", "data/2wikimqa.jsonl")
    asked: list[tuple[str, str]] = []

    def download(repo: str, file: str, repo_type: str) -> str:
        asked.append((repo, file))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert len(tasks.load("2wikimultihopqa").prompts) == 2
    assert asked == [("zai-org/LongBench", "data.zip")]


# -- the hub ---------------------------------------------------------------------------------------------------------

FUNCTION = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass\n", "entry_point": "f"}
CHAT = {"prompt": ["One?", "Two?"], "category": "math", "reference": [], "prompt_id": 7}
PUBLISHED = {  # rows with the fields that the hub's sets have, and the prompt's id, turns and reference
    "mt-bench": (CHAT, "7", ("One?", "Two?"), ""),
    "humaneval": (FUNCTION, "HumanEval/0", ("Complete the code I provided.\n\ndef f():",), "    pass"),
    "humaneval-raw": (FUNCTION, "HumanEval/0", ("def f():\n",), "    pass"),
    "gsm8k": ({"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}, "0", ("1 + 1?",), "1 + 1 = 2\n#### 2"),
    "alpaca": ({"instruction": "Name a tree.", "input": "", "output": "Oak"}, "0", ("Name a tree.",), "Oak"),
    "cnn-dm": ({"article": "A {b}.", "highlights": "H", "id": "x9"}, "x9", ("Summarize: A {b}.",), "H"),
    "natural-questions": ({"question": "who is it", "answer": ["Ann", "Bob"]}, "0", ("who is it?",), "Ann\nBob"),
    "xsum": ({"document": "D.", "summary": "S", "id": 5}, "5", ("D.\n\nSummarize this article in one sentence.",), "S"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_of_the_hub_become_prompts(name: str) -> None:
    row, number, turns, reference = PUBLISHED[name]
    source = next(s for s in CATALOGUE[name].sources if s.repo)
    prompt = source.prompt("row 0", row, 0)
    assert (prompt.id, prompt.turns, prompt.reference) == (number, turns, reference)


def test_every_hub_source_is_tested() -> None:
    assert set(PUBLISHED) == {n for n, e in CATALOGUE.items() if any(s.repo and not s.archive for s in e.sources)}


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_hub_rows_are_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself, on a repository that lies on this disk."""
    library = pytest.importorskip("datasets", reason="the library `datasets`, no dependency, is not installed")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "test.jsonl", *({"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(9)))
    source = sources.Source(repo=str(tmp_path), turns="question", reference="answer")
    prompts = source.prompts(sources.from_hub(source, 3))
    assert [(p.turns[0], p.reference) for p in prompts] == [(f"{i} + 1?", f"#### {i + 1}") for i in range(3)]


@pytest.mark.parametrize(
    ("name", "files", "why"),
    [
        ("gsm8k", "eagle_gsm8k.jsonl or gsm8k_test_400.jsonl", "`datasets`, which reads it from the hub, is not"),
        ("qasper", "qasper.jsonl", "the hub does not give zai-org/LongBench: "),
        ("spec-bench/maths", "spec_bench.jsonl", "it is not on the hub"),
    ],
)  # fmt: skip
def test_without_the_set_one_sentence(name: str, files: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed; the hub is offline in tests
    with pytest.raises(InputError) as caught:
        tasks.load(name)
    text = str(caught.value)
    assert text.startswith(f"the task {name} needs --data FOLDER with {files} (")
    assert why in text
    assert text.endswith("; the task sample needs nothing")
    assert "\n" not in text


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no folder .*gone; --data names the one"):
        tasks.load("gsm8k", tmp_path / "gone")


# -- the user's own --------------------------------------------------------------------------------------------------


def own(path: Path, *rows: object) -> Task:
    return tasks.load(str(write(path, *rows)))


def test_own_prompts_in_each_form(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    task = own(file, "Once", {"prompt": "def f(", "id": "second", "reference": "):"})
    assert task.raw
    assert [(p.id, p.turns, p.reference) for p in task.prompts] == [("0", ("Once",), ""), ("second", ("def f(",), "):")]
    task = own(file, {"id": "a", "turns": ["One", "Two"], "category": "x"}, {"id": "b", "turns": ["Three"]})
    assert not task.raw
    assert [(p.id, p.turns, p.category) for p in task.prompts] == [("a", ("One", "Two"), "x"), ("b", ("Three",), "")]
    roles = ("system", "user", "assistant", "user")
    task = own(file, {"messages": [{"role": r, "content": f"{r} {i}"} for i, r in enumerate(roles)]})
    assert not task.raw
    assert task.prompts[0].turns == ("system 0\n\nuser 1", "user 3")
    assert tasks.load(f"{file}@64").cut == 64


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "mine.jsonl has no prompts"),
        (["fine", b"{broken"], r"line 2: not JSON \(.*\); write one JSON value a line"),
        (["text", {"messages": [{"role": "user", "content": "x"}]}], "line 2: one file has chats .* not both"),
        ([{"question": "x"}], "line 1: give a text"),
        ([{"messages": [{"role": "user"}]}], 'line 1: "messages" must be a list'),
        ([{"messages": [{"role": "tool", "content": "x"}]}], "line 1: messages are of the roles .*, not tool"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "line 1: no message is the user's"),
        ([{"turns": []}], "line 1: give a text for each turn"),
        ([{"turns": ["x", ""]}], "line 1: give a text for each turn"),
        ([{"id": 1, "turns": ["x"]}, {"id": 1, "turns": ["y"]}], "two prompts with the id 1"),
    ],
)
def test_own_files_that_cannot_be_used(rows: list[object], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        own(tmp_path / "mine.jsonl", *rows)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no prompts file .*gone\.jsonl"):
        tasks.load(str(tmp_path / "gone.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'"caf\xe9"\n')
    with pytest.raises(InputError, match=r"latin\.jsonl, line 1: not UTF-8 text \(byte 4 of the line\)"):
        tasks.load(str(tmp_path / "latin.jsonl"))
    write(tmp_path / "eagle_gsm8k.jsonl", {"question": "x"})
    with pytest.raises(InputError, match=r"line 1: there is no field 'turns' \(its fields are question\)"):
        tasks.load("gsm8k", tmp_path)
    write(tmp_path / "qasper.jsonl", {"input": "x"})
    with pytest.raises(InputError, match=r"line 1: there is no field 'context' \(its fields are input\)"):
        tasks.load("qasper", tmp_path)
    write(tmp_path / "spec_bench.jsonl", ["x"])
    with pytest.raises(InputError, match="line 1: not a JSON object"):
        tasks.load("spec-bench/maths", tmp_path)
    write(tmp_path / "spec_bench.jsonl", {"turns": ["x"], "category": "qa"})
    with pytest.raises(InputError, match=r"spec_bench\.jsonl has no prompts of the task spec-bench/maths"):
        tasks.load("spec-bench/maths", tmp_path)


# -- pure functions --------------------------------------------------------------------------------------------------


def test_cut() -> None:
    ids = list(range(10))
    assert tasks.cut(ids, 10) == ids
    assert tasks.cut(ids, 5) == [0, 1, 2, 8, 9]
    assert tasks.cut(ids, 4) == [0, 1, 8, 9]
    assert tasks.cut(ids, 2) == [0, 9]
    with pytest.raises(InputError, match="cut to at least 2 tokens"):
        tasks.load("sample/code@1")
