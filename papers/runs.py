"""The papers' own studies: the same methods on every model, each under the papers' rule.

A paper's `runs.py` names its METHODS as templates over a model's drafters; `study` makes a grid of them. Drafters that
are not there are left out, with the command that makes them. What is counted (tokens, rounds, acceptance) does not
depend on the clock. A run on a quiet machine (`--quiet`) has one text at a time, and a file of its own with its times.
It leaves out "X, coupled": at T = 0 a grid measures one lossless rule alone, `coupled`, and X would have no time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from outrider.bench.store import read_samples

from . import rows, studies
from .measure import Study
from .measure import run as measure

EVAL = str(rows.ROOT.parent / "shared" / "data" / "eval")  # the papers' prompts
TRAIN = "python -m recipes.answers smollm2 --unpack && python -m recipes.smollm2.train {} --tokens 2000000"


@dataclass(frozen=True)
class Model:
    """A target and its drafters by the names of templates.

    Args:
        drafters: SPECs, and a draft tree. Those with a folder are left out where it is missing.
        study: the grid's model, tasks, prompts and tokens.
        made: what makes a drafter that is not in the repository.
    """

    drafters: Mapping[str, str]
    study: Study
    made: Mapping[str, str]


SMOLLM2 = Model(
    {
        "eagle": "eagle:papers/eagle/drafter", "hass": "eagle:smollm2/hass", "medusa": "medusa:smollm2/medusa",
        "medusa's tree": "papers/medusa/tree.json",
        "ngrams": "ngram:../shared/data/train/classic_books_en.txt", "hydra": "hydra:runs/smollm2/hydra/best",
        "llm": "model:runs/smollm2/draft-lm/best", "other": "mamba:demo/mamba",
        "llama": "model:runs/smollm2/draft-lm/best", "small llama": "model:runs/smollm2/draft-lm-small/best",
        "smaller llm": "model:runs/smollm2/draft-lm-small/best",
        "mamba": "mamba:runs/smollm2/mamba/best", "small mamba": "mamba:runs/smollm2/mamba-small/best",
        "equal hass": "eagle:runs/smollm2/ablations/hass_as_published/best",
        "equal eagle": "eagle:runs/smollm2/ablations/eagle_as_published/best",
        "beta hass": "eagle:runs/smollm2/ablations/hass_beta-0.5/best",
    },
    Study(
        "smollm2", weights="full", temperatures=(0.0, 1.0), tokens=128, limit=30, batch_sizes=(5,), data=EVAL, peers=(),
        explain=False,
        tasks=("mt-bench", "humaneval", "gsm8k", "alpaca", "cnn-dm@600", "natural-questions"),
    ),
    {
        **{name: TRAIN.format(method) for name, method in (
            ("hydra", "hydra"), ("llm", "draft-lm"), ("llama", "draft-lm"), ("mamba", "mamba"),
            ("small llama", "draft-lm-small"), ("smaller llm", "draft-lm-small"), ("small mamba", "mamba-small"))},
        **{name: f'python -m papers.ablations.smollm2 "{training}"' for name, training in (
            ("equal hass", "hass as published"), ("equal eagle", "eagle as published"),
            ("beta hass", "hass beta=0.5"))},
    },
)  # fmt: skip
DEMO = Model(
    {
        "eagle": "eagle:demo",
        "hass": "eagle:demo/hass",
        "equal eagle": "eagle:demo",
        "equal hass": "eagle:demo/hass",
        "medusa": "medusa:demo",
        "medusa's tree": "greedy63",
        "ngrams": "ngram",
        "hydra": "hydra:demo",
        "llm": "model",
        "llama": "model:demo/llama",
        "smaller llm": "model:demo/llama",
        "mamba": "mamba:demo/mamba",
    },
    Study("demo", temperatures=(0.0, 1.0), tokens=64, limit=13, batch_sizes=(3,), peers=(), explain=False),
    {},
)
MODELS = {"SmolLM2": SMOLLM2, "demo": DEMO}


COUPLED = ", coupled"  # ends the names of methods under our rule


def there(spec: str) -> bool:
    """Whether a drafter's folder is there; names of the package always are."""
    _, _, folder = spec.partition(":")
    return not folder.startswith(("runs/", "papers/")) or (rows.ROOT / folder / "config.json").is_file()


def study(paper: str, model: str, without: tuple[str, ...] = (), quiet: bool = False) -> tuple[Study, list[str]]:
    """A paper's grid on a model, without methods whose names begin so, and the drafters that it lacks."""
    module, given = import_module(f"papers.{paper}.runs"), MODELS[model]
    lacks: dict[str, None] = {}
    drafters = []
    for label, template in module.METHODS.items():
        if label.startswith(without) or (quiet and label.endswith(COUPLED)):
            continue
        name = template.partition("{")[2].partition("}")[0]
        spec = given.drafters.get(name, "")
        if name and (not spec or not there(spec)):
            lacks[name] = None
            continue
        drafters.append(f"{label}={template.format(**given.drafters)}")
    grid = replace(given.study, drafters=tuple(drafters), **getattr(module, "CHANGES", {}).get(model, {}))
    return grid, list(lacks)


def run(paper: str, model: str, quiet: bool, without: tuple[str, ...] = (), **changes: Any) -> None:
    """Run a paper's study of a model, and store its report without times; or on a quiet machine one text at a time, and
    store that with times beside it."""
    grid, lacks = study(paper, model, without, quiet)
    for name in lacks:
        how = MODELS[model].made.get(name)
        print(f"{model} has no {name}; {how or 'none is known'}", file=sys.stderr)
    name = f"{paper}_{model.lower()}{rows.SPEEDS if quiet else ''}"
    grid = replace(grid, batch_sizes=(1,)) if quiet else grid
    grid = replace(grid, out=studies.RUNS / name, **{key: value for key, value in changes.items() if value is not None})
    document = measure(grid)
    taus = studies.by_prompt(read_samples(Path(grid.out)), document)
    studies.write(name, studies.kept(document, name, taus, timed=quiet))
