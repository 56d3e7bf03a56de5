"""Arguments shared by several commands: one name, one meaning and one line of help each.

Importing this file must not import torch.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer


def _group(name: str) -> Any:
    """Makes options of one panel of `outrider COMMAND --help`."""
    return partial(typer.Option, rich_help_panel=name)


given, drafting, sampling = _group("Input"), _group("Drafting"), _group("Sampling")
training, machine, output = _group("Training"), _group("Model and machine"), _group("Output")
measuring = _group("Measuring")

NAMES = "A hub id, a folder, a .gguf file, smollm2 or demo"
Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help=f"{NAMES}. Default: smollm2 where its package is installed, else demo."),
]

NamedModel = Annotated[str | None, given("--model", "-m", metavar="MODEL", help="The same as the argument MODEL.")]

Drafter = Annotated[
    list[str] | None,
    drafting("--drafter", metavar="SPEC",
        help="none, lookup, suffix, model:DIR, eagle:DIR, ...; several are a mix. Default: the model's own, or suffix.",
    ),
]  # fmt: skip
Rule = Annotated[str, drafting("--rule", help="coupled, rejection, block, or typical (lossy).")]
Lossy = Annotated[bool, drafting("--lossy", help="Allow a rule that changes the distribution of the text.")]
Budget = Annotated[
    str,
    drafting("--budget", metavar="BUDGET",
        help="How much to draft: auto, NODESxDEPTH as in 16x6, a shape as in 3,2,1, or several for a bandit, "
        "as in '3,2,1 2,1 none' or, with drafters, '1:3,2,1 2:1,1'.",
    ),
]  # fmt: skip

Temperature = Annotated[float, sampling("--temperature", "--temp", help="0 is greedy.")]
TopP = Annotated[float, sampling("--top-p", help="Keep the most likely tokens up to this probability mass; 1: all.")]
TopK = Annotated[int, sampling("--top-k", help="Keep the N most likely tokens; 0: all.")]
MinP = Annotated[float, sampling("--min-p", help="Drop tokens below this fraction of the highest probability.")]
RepetitionPenalty = Annotated[
    float, sampling("--repetition-penalty", help="Divides logits of tokens in prompt and text; 1: none.")
]
PresencePenalty = Annotated[float, sampling("--presence-penalty", help="Subtracted from logits of tokens in the text.")]
FrequencyPenalty = Annotated[float, sampling("--frequency-penalty", help="Subtracted per occurrence in the text.")]
Seed = Annotated[int | None, sampling("--seed", help="Default: a fresh seed for every prompt.")]
MaxNewTokens = Annotated[int, sampling("--max-new-tokens", "--max-tokens", help="Maximum tokens per prompt.")]
Stop = Annotated[
    list[str] | None,
    sampling("--stop", help=r"End the text before this string, which may have \n, \t and \\ (repeatable)."),
]

Prompts = Annotated[
    str | None,
    given("--prompts", metavar="FILE", help="JSON lines of prompts, messages, turns or texts; -: stdin."),
]
Limit = Annotated[int | None, given("--limit", metavar="N", help="Use at most N prompts.")]
BatchSize = Annotated[int, machine("--batch-size", help="Batch size.")]

Dtype = Annotated[
    str,
    machine(
        "--dtype",
        help="auto (the checkpoint's; float32 on CPUs without 16-bit arithmetic), float64, float32, bfloat16, float16.",
    ),
]
Device = Annotated[str, machine("--device", help="auto, cpu, cuda, cuda:N or mps.")]
Exact = Annotated[
    str,
    machine("--exact",
        help="bits: refuse models whose logits with drafts are not bit for bit those without (native passes' are); "
        "auto, rounding: accept both.",
    ),
]  # fmt: skip
Weights = Annotated[
    str,
    machine("--weights",
        help="full; native: the quantised blocks of a .gguf file, or int8: weights quantised to 8 bits, both with int8 "
        "activations on CPUs: faster, with slightly different texts. auto: native for a .gguf file, else full.",
    ),
]  # fmt: skip
NoCompile = Annotated[bool, machine("--no-compile", help="Run the model's own forward instead of native passes.")]
Threads = Annotated[int | None, machine("--threads", "-t", help="CPU threads. Default: one per core.")]
TrustRemoteCode = Annotated[bool, machine("--trust-remote-code", help="Run Python code of the model's repository.")]

Json = Annotated[bool, output("--json", help="One JSON document on stdout, nothing else there.")]
