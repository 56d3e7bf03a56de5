"""The loop: deterministic, resumable bit for bit, fair in what it reports, and careful with what it has."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from objective_world import see, target
from safetensors.torch import load_file, save_file
from torch import Tensor
from training_world import RECIPE, documents, unequal

from outrider import checkpoints, drafters, files
from outrider.backends.torch import HFTarget
from outrider.checkpoints.write import write
from outrider.params import InputError
from outrider.training import checkpoint, data, evaluate, features, loop, objectives
from outrider.training.data import Document
from outrider.training.evaluate import held_out_loss
from outrider.training.log import Log
from outrider.training.objectives import eagle
from outrider.training.objectives._layer import layer_like
from outrider.training.recipe import Recipe
from outrider.training.state import State
from recipes import trim


@pytest.fixture(scope="module")
def model() -> HFTarget:
    return target(torch.float32)


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["step"], line["held_out_loss"]) for line in lines if "held_out_loss" in line]


def run(model: HFTarget, out: Path, recipe: Recipe = RECIPE, **more: Any) -> loop.Result:
    return loop.train(model, documents(), out, recipe, quiet=True, **more)


@pytest.mark.parametrize("method", objectives.names())
def test_a_run_that_was_interrupted_goes_on_bit_for_bit(tmp_path: Path, method: str) -> None:
    options = {"taps": (0, 2, 3)} if method == "eagle3" else {}
    recipe = replace(RECIPE, method=method, steps=6, options=options)
    full = run(target(torch.float32), tmp_path / "whole", recipe)
    run(target(torch.float32), tmp_path / "parts", recipe, stop=3)
    parts = run(target(torch.float32), tmp_path / "parts", recipe)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")
    assert full.loss == parts.loss
    a, b = (checkpoint.read(tmp_path / x / "checkpoint.pt") for x in ("whole", "parts"))
    assert a is not None
    assert b is not None
    assert all(torch.equal(x, b["module"][name]) for name, x in a["module"].items())


def test_an_objective_prepares_itself_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a tenth of what is read, before the first step, and not when the run goes on."""
    rows: list[int] = []

    def prepare(self: Any, seen: Any) -> None:
        rows.extend(key for batch, features in seen for key in batch.keys if features.features[-1].shape[0])

    monkeypatch.setattr(eagle.EagleObjective, "prepare", prepare)
    recipe = replace(RECIPE, steps=20)
    run(target(torch.float32), tmp_path, recipe, stop=2)
    assert rows == [0, 1, 2, 3]
    run(target(torch.float32), tmp_path, recipe, stop=4)
    assert rows == [0, 1, 2, 3]


def test_the_best_drafter_is_kept_and_loads(model: HFTarget, tmp_path: Path) -> None:
    result = run(model, tmp_path)
    results = losses(tmp_path)
    assert [step for step, _ in results] == [4, 8]
    assert result.best == min(loss for _, loss in results)
    assert drafters.load(str(result.folder), model).taps == (-1,)
    assert result.tau >= 1


def test_training_lowers_the_loss(model: HFTarget, tmp_path: Path) -> None:
    run(model, tmp_path, replace(RECIPE, steps=60, evaluate=60, rows=4))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    learned = [line["loss"] for line in lines if "loss" in line]
    assert learned[-1] < 0.9 * learned[0]


@pytest.mark.parametrize("method", objectives.names())
def test_every_training_learns_as_much_in_bfloat16(tmp_path: Path, method: str) -> None:
    """The default where the processor multiplies it: autocast, and features of the target in bfloat16."""
    options: dict[str, Any] = {"taps": (0, 2, 3)} if method == "eagle3" else {}
    results = {}
    for half in (False, True):
        recipe = replace(RECIPE, method=method, options=options, bf16=half, prompts=1)
        run(target(torch.float32), tmp_path / str(half), recipe)
        results[half] = losses(tmp_path / str(half))[-1][1]
    assert results[True] == pytest.approx(results[False], rel=0.03)
    assert results[True] != results[False]


@pytest.mark.parametrize("fast", [True, False])
def test_the_precision_follows_the_machine_and_a_run_keeps_its_own(
    model: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """On processors with products of bfloat16 and without, planted."""
    cpu, open_ = torch.device("cpu"), replace(RECIPE, bf16=None, steps=4)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert loop.precision(open_, cpu, torch.float32).bf16 == fast
    assert not loop.precision(open_, cpu, torch.float64).bf16
    assert loop.precision(replace(open_, bf16=not fast), cpu, torch.float32).bf16 != fast
    run(model, tmp_path / "other", replace(open_, bf16=not fast), stop=2)
    run(model, tmp_path / "other", open_)
    kept = json.loads((tmp_path / "other" / "recipe.json").read_text(encoding="utf-8"))
    assert kept["bf16"] != fast


def test_accumulation_is_the_same_step(model: HFTarget, tmp_path: Path) -> None:
    one = run(model, tmp_path / "one", replace(RECIPE, rows=4, steps=3, options={"noise": 0.0}))
    two = run(model, tmp_path / "two", replace(RECIPE, rows=2, accumulate=2, steps=3, options={"noise": 0.0}))
    assert one.loss == pytest.approx(two.loss, rel=1e-4)


def test_cached_features_give_nearly_the_same_losses(model: HFTarget, tmp_path: Path) -> None:
    plain = run(model, tmp_path / "plain")
    cached = replace(RECIPE, cache=str(tmp_path / "features"))
    first = run(model, tmp_path / "first", cached)
    again = run(model, tmp_path / "again", cached)
    assert plain.loss == pytest.approx(first.loss, rel=1e-5)
    assert first.loss == again.loss


def test_another_recipe_is_refused(model: HFTarget, tmp_path: Path) -> None:
    run(model, tmp_path, stop=2)
    with pytest.raises(InputError, match=r"another recipe \(lr differ"):
        run(model, tmp_path, replace(RECIPE, lr=0.5))
    assert (tmp_path / "checkpoint.pt").exists()


def test_a_run_can_be_made_longer_and_shorter(model: HFTarget, tmp_path: Path) -> None:
    """What the method filled in stays: here the paper's warm-up, a tenth of the first length."""
    short = replace(RECIPE, steps=20, warmup=-1, evaluate=0, target="demo", data=("a.jsonl",))
    assert run(model, tmp_path, short).steps == 20
    kept = json.loads((tmp_path / "recipe.json").read_text())
    assert (kept["warmup"], kept["target"], kept["data"]) == (2, "demo", ["a.jsonl"])
    longer = run(model, tmp_path, replace(short, steps=24, evaluate=3, save=7, target="elsewhere/demo"))
    kept = json.loads((tmp_path / "recipe.json").read_text())
    assert (longer.steps, kept["steps"], kept["warmup"]) == (24, 24, 2)
    result = checkpoint.read(tmp_path / "checkpoint.pt")
    assert result is not None
    assert result["step"] == 24
    assert run(model, tmp_path, replace(short, steps=24)).loss == longer.loss, "nothing is left to do"
    with pytest.raises(InputError, match=r"has done 24 of 24 steps, .* give --steps 24 or more"):
        run(model, tmp_path, short)
    with pytest.raises(InputError, match=r"another recipe \(rows differ"):
        run(model, tmp_path, replace(short, steps=30, rows=3))


def test_a_shorter_run_is_the_one_that_was_short_from_the_beginning(model: HFTarget, tmp_path: Path) -> None:
    """As long as the rate has not begun to fall: 8 of 10 steps."""
    short, long = (replace(RECIPE, steps=n, warmup=2, evaluate=5) for n in (10, 40))
    wanted = run(model, tmp_path / "short", short)
    run(model, tmp_path / "long", long, stop=8)
    assert run(model, tmp_path / "long", short).loss == wanted.loss
    run(model, tmp_path / "far", long, stop=9)
    with pytest.raises(InputError, match=r"has done 9 of 40 steps, .* give --steps 12 or more"):
        run(model, tmp_path / "far", short)


def test_default_steps_make_no_run_shorter(model: HFTarget, tmp_path: Path) -> None:
    long = replace(RECIPE, steps=500)
    run(model, tmp_path, long, stop=1)
    run(model, tmp_path, replace(long, steps=0), stop=2)
    assert json.loads((tmp_path / "recipe.json").read_text())["steps"] == 500


def test_a_run_is_not_all_warm_up(model: HFTarget, tmp_path: Path) -> None:
    long = replace(RECIPE, steps=40, warmup=20)
    run(model, tmp_path, long, stop=1)
    with pytest.raises(InputError, match=r"has done 1 of 40 steps, .* give --steps 25 or more"):
        run(model, tmp_path, replace(long, steps=24))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 4096}, "exceed the target's context"),
        ({"options": {"colour": 1}}, "has no option 'colour'"),
    ],
)
def test_a_refusal_leaves_nothing_behind(model: HFTarget, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(model, tmp_path / "run", replace(RECIPE, **change))
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=r"has 1 document, .*split at blank lines"):
        loop.train(model, documents(1), tmp_path / "run", RECIPE, quiet=True)
    assert not (tmp_path / "run").exists()


def test_another_target_is_refused(model: HFTarget, tmp_path: Path) -> None:
    cached = replace(RECIPE, cache=str(tmp_path / "features"))
    run(model, tmp_path / "run", cached)
    torch.manual_seed(77)
    other = target(torch.float32)
    with torch.no_grad():
        other.model.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(InputError, match="was begun for another target"):
        run(other, tmp_path / "run", cached)
    with pytest.raises(InputError, match="of another target or precision"):
        run(other, tmp_path / "second", cached)


def test_a_nan_loss_ends_the_training(model: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = objectives.build
    calls: list[int] = []

    def build(*args: Any) -> Any:
        made = real(*args)
        forward = made.forward

        def broken(*given: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total, weight, parts = forward(*given)
            calls.append(1)
            return (total * float("nan") if len(calls) == 4 else total), weight, parts

        made.forward = broken
        return made

    monkeypatch.setattr(objectives, "build", build)
    with pytest.raises(loop.TrainingError, match=r"step 2 is nan \(rows \[.*the checkpoint before it is kept"):
        run(model, tmp_path)
    results = checkpoint.read(tmp_path / "checkpoint.pt")
    assert results is not None
    assert results["step"] == 2
    assert all(bool(x.isfinite().all()) for x in results["module"].values())


def test_a_full_disk_loses_nothing(model: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(model, tmp_path, stop=2)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def full(state: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(InputError, match="No space left on device"):
        run(model, tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert not list(tmp_path.glob("*.part"))


def test_a_full_disk_at_an_evaluation_keeps_the_drafter_before(
    model: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    run(model, tmp_path, stop=4)
    before = {p.relative_to(tmp_path): p.stat().st_size for p in (tmp_path / "best").iterdir()}

    def full(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"")
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(InputError, match=r"cannot be written \(.*No space left on device"):
        run(model, tmp_path)
    assert {p.relative_to(tmp_path): p.stat().st_size for p in (tmp_path / "best").iterdir()} == before
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".") or p.suffix == ".part"]


def test_epochs_keep_features_in_the_runs_folder_until_it_ends(
    model: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target reads every document once, and a full disk costs time alone: losses are the same bits."""
    recipe, read = replace(RECIPE, steps=20, evaluate=20), list[int]()
    step = loop.State.step

    def watch(self: Any, *given: Any) -> Any:
        made = step(self, *given)
        read.append(round(self.useful - made[1] * self.operations))
        return made

    monkeypatch.setattr(loop.State, "step", watch)
    kept = run(model, tmp_path / "kept", recipe, stop=19)
    assert (tmp_path / "kept" / "features").is_dir()
    assert read[0] > 0
    assert not any(read[12:])
    kept = run(model, tmp_path / "kept", recipe)
    assert not (tmp_path / "kept" / "features").exists()
    monkeypatch.setattr(features.shutil, "disk_usage", lambda path: SimpleNamespace(total=10, used=5, free=5))
    full = run(model, tmp_path / "full", recipe)
    assert all(read[-20:])
    assert kept.loss == pytest.approx(full.loss, rel=1e-5)


@pytest.mark.parametrize("name", ["best/thesis.txt", "last/a", "log.jsonl", "features/mine.safetensors"])
def test_what_no_training_has_written_is_kept(model: HFTarget, tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=r"was not written by a training; give another --out"):
        run(model, tmp_path)
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()] == [Path(name)]


def test_features_of_others_are_read_and_kept(model: HFTarget, tmp_path: Path) -> None:
    """Beside a run that is done, too."""
    run(model, tmp_path, replace(RECIPE, steps=2, evaluate=2))
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "mine").write_text("mine")
    with pytest.raises(InputError, match="features was not written by a training"):
        run(model, tmp_path, replace(RECIPE, steps=2, evaluate=2))
    assert (tmp_path / "features" / "mine").exists()


def test_a_cache_that_was_asked_for_stays(model: HFTarget, tmp_path: Path) -> None:
    run(model, tmp_path, replace(RECIPE, cache=str(tmp_path / "features")))
    assert len(list((tmp_path / "features").iterdir())) > 1


@pytest.mark.skipif(files.fcntl is None, reason="this system has no such locks")
def test_a_folder_has_one_training(model: HFTarget, tmp_path: Path) -> None:
    """The second writes nothing into it, no features either."""
    with files.alone(tmp_path / "lock"), pytest.raises(InputError, match=f"another run is writing {tmp_path};"):
        run(model, tmp_path, replace(RECIPE, steps=40))
    assert not list(tmp_path.iterdir())
    run(model, tmp_path)
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("name", ["q?x", "a + b"])
def test_a_folder_that_no_spec_can_name_is_refused_at_once(model: HFTarget, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="could not be named"):
        run(model, tmp_path / name)


def test_a_run_that_is_done_is_not_judged_by_other_data(model: HFTarget, tmp_path: Path) -> None:
    done = run(model, tmp_path)
    assert loop.train(model, documents(30), tmp_path, RECIPE, quiet=True) == done


def test_what_was_learned_is_never_held_out(model: HFTarget, tmp_path: Path) -> None:
    """Of 10 documents half are held out; the least hashes of 20 would be others."""
    few, many = documents(10), documents(20)
    held = []
    for documents_, stop in ((few, 2), (many, 4)):
        loop.train(model, documents_, tmp_path, RECIPE, stop=stop, quiet=True)
        kept = checkpoint.read(tmp_path / "checkpoint.pt")
        assert kept is not None
        held.append(sorted(kept["held_out"]))
    names = [sorted(map(data.name_of, data.split(given)[1])) for given in (few, many)]
    assert held == [names[0]] * 2
    assert names[0] != names[1]


def test_progress_shows_the_share_of_the_machines_rate(model: HFTarget, tmp_path: Path) -> None:
    run(model, tmp_path, replace(RECIPE, steps=10))
    line = json.loads((tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()[-2])
    assert line["step"] == 10
    assert 0 < line["rate_share"] < 1
    assert line["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 4096}, "exceed the target's context"),
        ({"rows": 0}, "must be at least 1"),
        ({"evaluate": -2}, "must be at least 1"),
        ({"lr": math.nan}, "finite numbers of at least 0"),
        ({"decay": -1.0}, "finite numbers of at least 0"),
        ({"method": "oracle"}, "no method 'oracle'"),
        ({"options": {"colour": 1}}, "eagle has no option 'colour'"),
    ],
)
def test_bad_recipes_are_refused(model: HFTarget, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(model, tmp_path, replace(RECIPE, **change))


def test_a_training_begins_with_a_drafters_weights(model: HFTarget, tmp_path: Path) -> None:
    """On other documents, by another objective for the same network, with the draft vocabulary that it has."""
    options = {"draft_vocab": 40}
    first = run(model, tmp_path / "first", replace(RECIPE, steps=40, rows=4, evaluate=40, options=options))
    others = [replace(d, tokens=d.tokens[::-1], key=f"other {d.key}") for d in documents()]
    recipe = replace(RECIPE, method="hass", steps=1, lr=1e-9, evaluate=1, options={}, init=str(first.folder))
    second = loop.train(model, others, tmp_path / "second", recipe, quiet=True)
    made: list[Any] = [drafters.load(str(result.folder), model).uncalibrated for result in (first, second)]
    nets = [drafter.net for drafter in made]
    assert torch.equal(nets[0].d2t, nets[1].d2t)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*(net.parameters() for net in nets), strict=True))
    assert made[1].config.trained == "hass"


def test_a_training_begins_with_a_drafter_for_the_models_gguf_file(model: HFTarget, tmp_path: Path) -> None:
    """Such a file holds numbers as float32: 1e-6 is 9.999999974752427e-07 there."""
    first = run(model, tmp_path / "first", replace(RECIPE, steps=1))
    config = json.loads((first.folder / "config.json").read_text(encoding="utf-8"))
    rounded = float(np.float32(config["layer"]["eps"]))
    assert rounded != config["layer"]["eps"]
    config["layer"]["eps"] = rounded
    (first.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    objective: Any = objectives.build("eagle", model, documents(), {})
    objective.begin(str(first.folder))
    config["layer"]["eps"] = 1e-3
    (first.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(InputError, match="another layer"):
        objective.begin(str(first.folder))


def test_a_layer_has_the_rotary_base_of_an_older_config(model: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {**model.config_dict, "rope_parameters": None, "rope_theta": 1e6}
    monkeypatch.setattr(model, "config_dict", old)
    assert layer_like(model).rope == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize("method", ["eagle", "medusa", "hydra", "block"])
def test_a_draft_vocabulary_comes_along(model: HFTarget, tmp_path: Path, method: str) -> None:
    """Also where the method's default is the whole one."""
    options = {"taps": (0, 2, 3)} if method == "block" else {}
    recipe = replace(RECIPE, method=method, steps=1, evaluate=1, options=options)
    first = run(model, tmp_path / "first", replace(recipe, options={**options, "draft_vocab": 40}))
    second = run(model, tmp_path / "second", replace(recipe, init=str(first.folder)))
    assert checkpoints.read(second.folder).config["draft_vocab"] == 40


def test_more_data_keeps_the_best_drafter_while_the_same_texts_are_held_out(
    model: HFTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In whatever order the data comes; with other texts held out its loss is that of another test."""
    first = run(model, tmp_path, replace(RECIPE, steps=60, evaluate=60, rows=4))
    more = [*reversed(documents()), replace(documents()[0], tokens=documents()[0].tokens[::-1], key="more")]
    worse = replace(RECIPE, steps=61, evaluate=61, rows=4)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    torch.save({**state, "best": 0.0}, tmp_path / "checkpoint.pt")  # so that nothing is better
    second = loop.train(model, more, tmp_path, worse)
    assert (second.best, second.tau) == (0.0, first.tau)
    assert "continues with the new data\n" in capsys.readouterr().err
    others = [replace(d, tokens=d.tokens[::-1], key=f"other {d.key}") for d in documents()]
    third = loop.train(model, others, tmp_path, replace(worse, steps=62, evaluate=62))
    assert third.best > 0.0
    assert "the best drafter so far is discarded" in capsys.readouterr().err


def test_evaluations_read_prompts_of_the_rows_length_at_most() -> None:
    """Their ends: a chat's question stands there."""
    chat = Document(tuple(range(100)), (False,) * 90 + (True,) * 10, "chat")
    text = Document(tuple(range(300)), (True,) * 300, "text")
    short = Document(tuple(range(9)), (False,) * 3 + (True,) * 6, "short")
    made = evaluate.prompts_of([chat, short, text], 2, 40)
    assert made == [list(range(50, 90)), list(range(60, 100))]


def test_the_time_left_counts_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of a second each, and evaluations of a minute after 20, 40 and 50 of them."""
    log = Log(tmp_path, 0, 50, 20, 1e9, True, False)
    with log:
        for step in range(1, 51):
            log.step(step, 1.0, 0.1, 100, 1.0, 1.0, {})
            if step % 20 == 0:
                log.evaluation(step, 1.0, {}, {"tau": 1.0, "alpha": []}, 60.0)
    left = re.findall(r"([0-9:]+) left", capsys.readouterr().err)
    assert left == ["0:00:40", "0:00:30", "0:02:20", "0:02:10", "0:01:00"]


def test_features_do_not_outlive_the_run_that_kept_them(model: HFTarget, tmp_path: Path) -> None:
    """Nor where it was continued with a folder for them."""
    run(model, tmp_path / "run", replace(RECIPE, steps=40), stop=2)
    assert any((tmp_path / "run" / loop.CACHE).iterdir())
    run(model, tmp_path / "run", replace(RECIPE, steps=40, cache=str(tmp_path / "kept")))
    assert not (tmp_path / "run" / loop.CACHE).exists()
    assert any((tmp_path / "kept").iterdir())


def test_a_size_that_is_left_to_the_data_by_name_stays(model: HFTarget, tmp_path: Path) -> None:
    recipe = replace(RECIPE, options={"draft_vocab": -1})
    run(model, tmp_path, recipe, stop=2)
    run(model, tmp_path, recipe)
    assert losses(tmp_path)[-1][0] == RECIPE.steps


def test_a_line_of_the_log_that_was_cut_off_is_dropped(model: HFTarget, tmp_path: Path) -> None:
    """As a full disk leaves it."""
    run(model, tmp_path, stop=4)
    with (tmp_path / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
    run(model, tmp_path)
    assert [step for step, _ in losses(tmp_path)] == [4, 8]


def test_a_run_that_goes_on_goes_on_with_its_own_weights(model: HFTarget, tmp_path: Path) -> None:
    """And not again with those that it began with."""
    first = run(model, tmp_path / "first", replace(RECIPE, steps=4))
    recipe = replace(RECIPE, steps=4, seed=1, init=str(first.folder))
    full = run(model, tmp_path / "whole", recipe)
    run(model, tmp_path / "parts", recipe, stop=2)
    parts = run(model, tmp_path / "parts", recipe)
    assert full.loss == parts.loss
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


def test_a_training_begins_with_a_folder_that_others_wrote(model: HFTarget, tmp_path: Path) -> None:
    first = run(model, tmp_path / "first", replace(RECIPE, steps=2))
    theirs, facts = tmp_path / "theirs", checkpoints.Facts.of(model)
    write(checkpoints.read(first.folder), "safeailab", facts, theirs)
    begun: Any = objectives.build("eagle", model, documents(), {})
    begun.begin(str(theirs))
    mine: Any = drafters.load(str(first.folder), model).uncalibrated
    assert torch.equal(begun.net.fc.weight, mine.net.fc.weight)


def test_a_training_begins_with_a_narrower_drafter(model: HFTarget, tmp_path: Path) -> None:
    """One whose MLP lost neurons (`recipes/trim.py`) goes on as it is, also after an interruption."""
    options = {"taps": (0, 2, 3)}
    first = run(model, tmp_path / "first", replace(RECIPE, method="eagle3", steps=1, options=options))
    tensors = load_file(first.folder / "model.safetensors")
    trim.narrow(tensors, 8)
    save_file(tensors, first.folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((first.folder / "config.json").read_text(encoding="utf-8"))
    assert config["layer"]["intermediate"] > 8
    config["layer"]["intermediate"] = 8
    (first.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    recipe = replace(RECIPE, method="eagle3", steps=4, options=options, init=str(first.folder))
    full = run(model, tmp_path / "whole", recipe)
    run(model, tmp_path / "parts", recipe, stop=2)
    assert run(model, tmp_path / "parts", recipe).loss == full.loss
    learned = load_file(full.folder / "model.safetensors")
    assert learned["midlayer.mlp.down_proj.weight"].shape == tensors["midlayer.mlp.down_proj.weight"].shape
    assert not torch.equal(learned["midlayer.mlp.down_proj.weight"], tensors["midlayer.mlp.down_proj.weight"])


@pytest.mark.parametrize("method", ["block", "eagle", "eagle3", "hass", "hydra", "medusa"])
def test_which_trainings_can_begin_with_weights(model: HFTarget, method: str) -> None:
    options = {"taps": (0, 2, 3)} if method == "eagle3" else {}
    assert isinstance(objectives.build(method, model, documents(), options), objectives.Begun)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"init": "nowhere"}, "nowhere"),
        ({"method": "eagle3", "options": {"taps": (0, 2, 3)}}, "holds a drafter 'eagle', and this training makes"),
        ({"options": {"draft_vocab": 20}}, r"another draft_vocab \(0, not 20\) than this training"),
        ({"init": "nowhere", "options": {}}, "nowhere"),
        ({"method": "mamba"}, "mamba cannot start from a drafter's weights"),
    ],
)
def test_weights_to_begin_with_that_do_not_fit_are_refused(
    model: HFTarget, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    first = run(model, tmp_path / "first", replace(RECIPE, steps=1))
    with pytest.raises(InputError, match=words):
        run(target(torch.float32), tmp_path / "second", replace(RECIPE, **{"init": str(first.folder), **change}))
    assert not (tmp_path / "second").exists()


def test_text_of_another_tokenizer_is_refused(model: HFTarget, tmp_path: Path) -> None:
    strange = [*documents(), Document((1, 2, 3, 999), (True,) * 4, "z")]
    with pytest.raises(InputError, match="token 999"):
        loop.train(model, strange, tmp_path, RECIPE, quiet=True)


def test_a_damaged_checkpoint_is_named(model: HFTarget, tmp_path: Path) -> None:
    run(model, tmp_path, stop=2)
    (tmp_path / "checkpoint.pt").write_bytes(b"damaged")
    with pytest.raises(InputError, match="damaged"):
        run(model, tmp_path)


def test_a_checkpoint_of_another_network_is_named(model: HFTarget, tmp_path: Path) -> None:
    """As a version left it whose network had other parts."""
    run(model, tmp_path, stop=2)
    state = checkpoint.read(tmp_path / "checkpoint.pt")
    assert state is not None
    state["module"].popitem()
    checkpoint.write(tmp_path / "checkpoint.pt", state)
    with pytest.raises(InputError, match="another --out"):
        run(model, tmp_path)


def test_the_best_so_far_outlives_an_interruption_and_no_other_data(model: HFTarget, tmp_path: Path) -> None:
    """A drafter that is worse than the best of another start does not take its place."""
    run(model, tmp_path, stop=4)
    kept = checkpoint.read(tmp_path / "checkpoint.pt")
    assert kept is not None
    checkpoint.write(tmp_path / "checkpoint.pt", {**kept, "best": -1.0})
    result = run(model, tmp_path, stop=8)
    assert (result.steps, result.best) == (8, -1.0)
    other = [replace(d, key=f"other {d.key}") for d in documents()]
    longer = loop.train(model, other, tmp_path, replace(RECIPE, steps=12), quiet=True)
    assert longer.best > 0, "other texts are held out"


def test_what_a_recipe_says_of_the_optimiser_is_done(model: HFTarget, tmp_path: Path) -> None:
    """The first step: a gradient that is clipped to nothing moves nothing, and the decay shrinks every weight."""
    one = replace(RECIPE, steps=1, evaluate=1, save=1, warmup=1)
    made = {}
    for name, recipe in {
        "usual": one, "clipped": replace(one, clip=1e-30), "decayed": replace(one, decay=0.5),
        "both": replace(one, clip=1e-30, decay=0.5),
    }.items():  # fmt: skip
        run(model, tmp_path / name, recipe)
        state = checkpoint.read(tmp_path / name / "checkpoint.pt")
        assert state is not None
        made[name] = {key: x for key, x in state["module"].items() if x.is_floating_point()}
    moved = [key for key in made["usual"] if not torch.allclose(made["usual"][key], made["clipped"][key], atol=1e-4)]
    assert moved
    for key in moved:
        start = made["clipped"][key]
        assert torch.allclose(made["both"][key], start * (1 - one.lr * 0.5), atol=1e-6)
        assert torch.allclose(made["decayed"][key], made["usual"][key] - start * one.lr * 0.5, atol=1e-6)


def test_every_group_has_its_own_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Medusa-2's heads learn four times as fast as the target beside them, in the warm-up too."""
    rates: list[list[float]] = []
    step = State.step

    def watch(self: State, number: int, *given: Any) -> tuple[float, int, dict[str, float]]:
        made = step(self, number, *given)
        rates.append(
            [group["lr"] / (self.recipe.lr * self.recipe.rate(number)) for group in self.optimiser.param_groups]
        )
        return made

    monkeypatch.setattr(State, "step", watch)
    run(target(torch.float32), tmp_path, replace(RECIPE, method="medusa2", steps=3, evaluate=3))
    assert rates == [pytest.approx([4.0, 1.0])] * 3


def test_the_held_out_loss_does_not_depend_on_rows(model: HFTarget) -> None:
    """It is a mean over positions: rows of few learned tokens weigh little, however they are batched."""
    objective = objectives.build("eagle", model, unequal(), {})
    batch = data.pack(unequal(), 32, share=False)

    def features_of(part: data.Batch) -> features.TargetFeatures:
        return see(model, part, objective.taps)

    one, four = (held_out_loss(objective, batch, features_of, rows)[0] for rows in (1, 4))
    assert one == pytest.approx(four, rel=1e-5)


def test_a_run_goes_on_with_more_data_and_keeps_its_draft_vocabulary(
    model: HFTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size, its tokens and the target's head for them; no text that was learned is held out later."""
    monkeypatch.setattr(data, "SMALLEST", 3)
    monkeypatch.setattr(data, "COVERED", 0.4)
    few = [Document(tuple(t % 12 for t in d.tokens), d.learn, d.key) for d in documents(10)]
    recipe = replace(RECIPE, method="eagle3", options={"taps": (0, 2, 3)}, steps=4)
    loop.train(model, few, tmp_path, recipe, stop=2, quiet=True)
    before = checkpoint.read(tmp_path / "checkpoint.pt")
    made: list[Any] = []
    build = objectives.build
    monkeypatch.setattr(objectives, "build", lambda *given: made.append(build(*given)) or made[-1])
    loop.train(model, few + documents(60)[10:], tmp_path, recipe, quiet=True)
    assert before is not None
    assert made[0].net.config.draft_vocab == 8 == len(before["module"]["net.d2t"])
    assert torch.equal(made[0].net.d2t, before["module"]["net.d2t"])
    x = torch.randn(2, 32)
    assert torch.allclose(made[0].head(x), model.head(x)[:, made[0].net.ids()], atol=1e-5)
    learned = {d.key for d in data.split(few)[0]}
    assert not learned & {d.key for d in data.split(few + documents(60)[10:])[1]}


def test_a_name_alone_begins_with_the_methods_own_drafter(model: HFTarget, tmp_path: Path) -> None:
    """HASS trains EAGLE's network, and `demo` is HASS's drafter to it, not EAGLE's."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.objectives, "drafted", lambda folder, *given: seen.append(folder) or 0)
        with pytest.raises(InputError):  # the demo's drafters are another model's
            loop.train(
                model, documents(), tmp_path, replace(RECIPE, method="hass", options={}, init="demo"), quiet=True
            )
    assert seen == ["demo/hass"]
