"""A run's files: what was appended is read back, whatever was cut off; what does not belong together is refused."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from outrider import InputError
from outrider.bench.stamps import BLOCK, stamps
from outrider.bench.store import Store, read_header, read_samples
from outrider.bench.types import VERSION, Sample, Turn
from outrider.core.types import Usage

SETTINGS: dict[str, Any] = {
    "model": "demo", "dtype": "float32", "device": "cpu", "tokens": 64, "seed": 3, "threads": 2, "compile": True,
}  # fmt: skip


def opened(folder: Path, **changed: Any) -> Store:
    store = Store.open(folder, {"target": "demo", "started": "today", "arguments": {**SETTINGS, **changed}})
    store.begin()
    return store


def sample(number: int = 0) -> Sample:
    """Two rows, two turns, every field of its own."""
    usages = [
        Usage(7, 3, 2, 5, 1, 2, [1], [2], 0.1 + 1e-17, 1 / 3, 0.01, 2e-7),
        Usage(8, 2, 1, 0, 0, 0, [], [], 0.1, 0.2, 0.0, 0.1),
    ]
    turns = [
        Turn([[5, 9, 1], [4, 4]], 0.75 + number, 0.1, usages, {"cache": 12345, "drafter": 0}),
        Turn([[7], []], 1e-3, 5e-4),
    ]
    names = ["plain id", "Grüße\u2028 und\x85 \x0b mehr: 雨"]
    return Sample(
        "maths@12",
        0.7,
        2,
        "eagle:demo, 16x4",
        number,
        1,
        2,
        0xFFFFFFFF - number,
        names,
        [11, 30],
        turns,
        ["stopped\nearly \U0001f600"],
    )


def lines(folder: Path) -> bytes:
    return (folder / "samples.jsonl").read_bytes()


def test_a_drafter_or_model_that_was_trained_anew_is_another_one(tmp_path: Path) -> None:
    """In the folder that it was in; further SPECs may be added, and older runs say nothing of files."""
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}", encoding="utf-8")
    (drafter / "README.md").write_text("a card", encoding="utf-8")
    large = drafter / "model.safetensors"
    large.write_bytes(bytes(5_000_000))
    specs = f"eagle:{drafter}", f"suffix + {drafter}?scale=1", "lookup", "none", "smollm2/eagle3"
    arguments = {"target": "demo", "started": "today", "arguments": SETTINGS}

    def run(mark: str, *specs: str) -> dict[str, str]:
        files = stamps(specs)
        Store.open(tmp_path / "run", {**arguments, "mark": mark, "files": files}).begin()
        return files

    first = run("a", specs[0])
    assert run("a", *specs).keys() == {*specs[:2], specs[4]}
    (drafter / "README.md").write_text("another card", encoding="utf-8")
    assert run("a", specs[0]) == first
    with pytest.raises(InputError, match="other weights of demo; give another --out"):
        run("b", specs[0])
    large.write_bytes(bytes(2_500_000) + b"1" * BLOCK * 2 + bytes(2_500_000 - 2 * BLOCK))
    for spec in specs[:2]:
        with pytest.raises(InputError, match=re.escape(f"other files of {spec}; give another --out")):
            run("a", spec)
    opened(tmp_path / "older")
    Store.open(tmp_path / "older", {**arguments, "mark": "a", "files": first})


def test_a_new_folder(tmp_path: Path) -> None:
    store = opened(tmp_path / "a" / "b")
    assert store.session == 1
    assert store.samples == []
    header = json.loads((tmp_path / "a" / "b" / "run.json").read_text(encoding="utf-8"))
    assert header == store.header == read_header(store.folder)
    assert header["format"] == VERSION
    assert header["arguments"] == SETTINGS
    assert header["started"] == "today"


def test_samples_come_back_as_they_went(tmp_path: Path) -> None:
    store, made = opened(tmp_path), [sample(i) for i in range(3)]
    for one in made:
        store.add(one)
    assert store.samples == made
    assert opened(tmp_path).samples == made
    again = list(read_samples(tmp_path))
    assert [asdict(s) for s in again] == [asdict(s) for s in made]
    assert isinstance(again[0].turns[0].usages[0], Usage)
    assert again[0].turns[0].usages[0].overhead_seconds == made[0].turns[0].usages[0].overhead_seconds
    assert len(lines(tmp_path).splitlines()) == 3, "an answer is a line"
    assert lines(tmp_path).endswith(b"\n")


def test_a_last_line_cut_off_anywhere_is_dropped(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for i in range(2):
        store.add(sample(i))
    full = lines(tmp_path)
    start = full.index(b"\n") + 1
    for end in range(start, len(full)):
        (tmp_path / "samples.jsonl").write_bytes(full[:end])
        (tmp_path / "run.json").unlink()
        store = opened(tmp_path)
        assert store.samples == [sample(0)], f"cut at byte {end}"
        store.add(sample(7))
        assert list(read_samples(tmp_path)) == [sample(0), sample(7)], f"cut at byte {end}"
    (tmp_path / "samples.jsonl").write_bytes(full)
    assert list(read_samples(tmp_path)) == [sample(0), sample(1)]


def test_a_first_line_cut_off_leaves_an_empty_run(tmp_path: Path) -> None:
    opened(tmp_path).add(sample())
    (tmp_path / "samples.jsonl").write_bytes(lines(tmp_path)[:-1])
    assert opened(tmp_path).samples == []
    assert lines(tmp_path) == b""


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"3", b'{"task": "t"}', b'{"turns": []}', b'{"turns": [{"usages": [1]}]}', b"\xff\xfe", b"\0"],
)
def test_a_damaged_line_in_the_middle_is_refused(tmp_path: Path, damage: bytes) -> None:
    store = opened(tmp_path)
    for i in range(3):
        store.add(sample(i))
    first, _, last = lines(tmp_path).splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_bytes(first + damage + b"\n" + last)
    with pytest.raises(InputError, match=r"samples.jsonl, line 2, is not a sample; give another --out$"):
        opened(tmp_path)


@pytest.mark.parametrize(("part", "name"), [("machine", "processor"), ("versions", "outrider")])
def test_another_machine_or_version_is_refused(tmp_path: Path, part: str, name: str) -> None:
    """Its times cannot be compared, nor, to the last bit, its texts."""
    header = {"target": "demo", "started": "today", "arguments": SETTINGS, part: {name: "one", "cores": 2}}
    Store.open(tmp_path, header).begin()
    assert Store.open(tmp_path, {**header, part: {name: "one", "cores": 4}}).session == 2
    with pytest.raises(InputError, match=f"holds a run with {name} one, not two; give another --out$"):
        Store.open(tmp_path, {**header, part: {name: "two", "cores": 2}})


def test_fields_of_another_kind_are_refused(tmp_path: Path) -> None:
    opened(tmp_path).add(sample())
    line = json.loads(lines(tmp_path))
    (tmp_path / "samples.jsonl").write_text(json.dumps({**line, "mood": "good"}) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 1, is not a sample"):
        list(read_samples(tmp_path))


@pytest.mark.parametrize(
    ("name", "other"),
    [("model", "a/b"), ("dtype", "bfloat16"), ("device", "cuda"), ("tokens", 65), ("seed", 4), ("threads", 1)],
)
def test_what_changes_the_meaning_of_a_sample_is_refused(tmp_path: Path, name: str, other: Any) -> None:
    opened(tmp_path).add(sample())
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(InputError) as error:
        opened(tmp_path, **{name: other})
    said = str(error.value)
    assert f"holds a run with {name} {SETTINGS.get(name)}, not {other}; give another --out, or " in said
    assert "\n" not in said
    assert (tmp_path / "run.json").read_bytes() == before, "a refusal changes nothing"
    assert opened(tmp_path).session == 2


def test_methods_and_tasks_may_be_added(tmp_path: Path) -> None:
    more = {"tasks": ["a"], "drafter": ["lookup"], "temperature": [0.0], "batch_size": [1], "repeats": 1, "limit": 5}
    opened(tmp_path, **more)
    more |= {"tasks": ["a", "b"], "drafter": ["suffix"], "temperature": [1.0], "batch_size": [4], "limit": 9}
    store = opened(tmp_path, **more)
    assert store.session == 2
    assert read_header(tmp_path)["arguments"] == {**SETTINGS, **more}, "it says what was asked for last"


def test_a_name_stands_for_one_method(tmp_path: Path) -> None:
    """A label that is given to another drafter must not take over the samples of the one before."""

    def named(**methods: list[str]) -> Store:
        store = Store.open(tmp_path, {"target": "demo", "started": "", "arguments": SETTINGS, "methods": methods})
        store.begin()
        return store

    named(mine=["lookup", "plain"])
    named(other=["suffix", "plain"])
    for wrong in (["suffix", "plain"], ["lookup", "int8"]):
        with pytest.raises(InputError, match="holds a different method called 'mine'; give this one another label"):
            named(mine=wrong)
    assert named(mine=["lookup", "plain"]).session == 3
    assert sorted(read_header(tmp_path)["methods"]) == ["mine", "other"]


def test_sessions_are_counted_and_the_start_is_the_first(tmp_path: Path) -> None:
    for number in range(1, 6):
        header = {"target": "demo", "started": f"day {number}", "arguments": SETTINGS}
        store = Store.open(tmp_path, header)
        store.begin()
        assert store.session == number
        assert read_header(tmp_path) == store.header
        assert store.header["started"] == "day 1"
        assert store.header["format"] == VERSION
    assert header == {"target": "demo", "started": "day 5", "arguments": SETTINGS}, "the caller's stays as it is"


def test_another_format_is_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    header = read_header(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({**header, "format": VERSION + 1}), encoding="utf-8")
    sentence = f"holds a run of format {VERSION + 1} and this version writes {VERSION}; give another --out"
    with pytest.raises(InputError, match=sentence):
        opened(tmp_path)
    with pytest.raises(InputError, match=sentence):
        read_header(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"target": "demo"}'])
def test_a_damaged_header_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"run.json is damaged; give another --out"):
        opened(tmp_path)


def test_nothing_is_written_before_it_begins(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "run", {"target": "demo", "started": "", "arguments": SETTINGS})
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match=r"run cannot be written \(File exists\); free space, or name another place"):
        store.begin()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="run is a file; --out names a folder"):
        opened(tmp_path / "run")


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    assert list(read_samples(tmp_path)) == []


def test_the_header_is_written_atomically(tmp_path: Path) -> None:
    """What cannot be written leaves the old file, and the next session finds it."""
    opened(tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(TypeError, match="not JSON serializable"):
        Store.open(tmp_path, {"target": "demo", "arguments": SETTINGS, "notes": object()}).begin()
    assert (tmp_path / "run.json").read_bytes() == before
    assert opened(tmp_path).session == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.json"], "nothing half-written is left"
