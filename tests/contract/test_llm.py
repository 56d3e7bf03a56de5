"""The public face on a tiny model with a real byte-level tokenizer: text, streams, seeds, stop strings, bad input."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import outrider
from outrider.budgets.bandit import BanditBudget
from outrider.budgets.budgeter import FixedBudget
from outrider.params import InputError

TEXT = [
    "the cat sat on the mat and the dog sat on the log",
    "naïve café, 東京 and 😀 are words too",
    "one two three",
] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder as users have it."""
    made = tmp_path_factory.mktemp("llm")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>", "<user>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}"
    fast.save_pretrained(made)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=304, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(made)
    return str(made)


@pytest.fixture(scope="module")
def llm(folder: str) -> outrider.LLM:
    return outrider.load(folder, dtype="float32")


def test_many_prompts_many_samples(llm: outrider.LLM) -> None:
    out = llm.generate(["the cat", "one two three four"], n=3, seed=5, temperature=1.0, max_new_tokens=12)
    assert [o.prompt for o in out] == [0, 0, 0, 1, 1, 1]
    assert [o.seed for o in out] == [5, 6, 7, 5, 6, 7]
    for o in out:
        alone = llm.generate(
            ["the cat", "one two three four"][o.prompt], seed=o.seed, temperature=1.0, max_new_tokens=12
        )
        assert alone[0].tokens == o.tokens
        assert o.usage.new_tokens == len(o.tokens) <= 12
        assert o.finish_reason in ("length", "eos")
        assert o.text == llm.decode(o.tokens)


def test_a_prompts_text_does_not_depend_on_the_batch(llm: outrider.LLM) -> None:
    prompts = ["the cat", "naïve café", "on the log and the", "dog"]
    kind = {"temperature": 0.9, "max_new_tokens": 20}
    a = llm.generate(prompts, seed=[1, 2, 3, 4], batch_size=2, **kind)
    b = llm.generate(prompts[::-1], seed=[4, 3, 2, 1], batch_size=8, **kind)
    assert [o.tokens for o in a] == [o.tokens for o in b[::-1]]


def test_streams_join_to_the_text_and_split_no_character(llm: outrider.LLM) -> None:
    kind: dict[str, Any] = {"temperature": 1.5, "max_new_tokens": 30}
    texts = llm.generate("東京 and 😀", n=12, seed=0, batch_size=12, **kind)
    for seed, full in enumerate(texts):
        pieces = list(llm.stream("東京 and 😀", seed=seed, **kind))
        assert "".join(pieces) == full.text
        assert all(pieces)


def test_stop_strings_end_the_text_across_token_borders(llm: outrider.LLM) -> None:
    free = llm.generate("the cat", seed=3, temperature=1.0, max_new_tokens=40, ignore_eos=True)[0]
    for width in (1, 2, 5):
        stop = free.text[10 : 10 + width]
        if "\ufffd" in stop:
            continue
        cut = llm.generate("the cat", seed=3, temperature=1.0, max_new_tokens=40, ignore_eos=True, stop=stop)[0]
        assert cut.text == free.text[: free.text.index(stop)]
        assert cut.finish_reason == "stop"
        assert cut.tokens == free.tokens[: len(cut.tokens)]
        assert stop in llm.decode(cut.tokens)
        assert stop not in llm.decode(cut.tokens[:-1])
        streamed = llm.stream(
            "the cat", seed=3, temperature=1.0, max_new_tokens=40, ignore_eos=True, stop=[stop, "zzz"]
        )
        assert "".join(streamed) == cut.text


def test_eos_is_kept_in_the_tokens_and_left_out_of_the_text(llm: outrider.LLM) -> None:
    results = [
        o
        for o in llm.generate("the", n=40, seed=0, temperature=2.0, max_new_tokens=60, batch_size=40)
        if o.finish_reason == "eos"
    ]
    assert results
    for o in results:
        assert o.tokens[-1] == 0
        assert 0 not in o.tokens[:-1]
        assert "<end>" not in o.text


def test_chat_messages_and_ids_are_prompts_too(llm: outrider.LLM) -> None:
    messages = [{"role": "user", "content": "one two"}]
    ids = llm.encode(messages)
    assert llm.tokenizer.decode(ids) == "<user>one two<end>"
    kind: dict[str, Any] = {"seed": 1, "max_new_tokens": 5}
    assert llm.generate(messages, **kind)[0].tokens == llm.generate(ids, **kind)[0].tokens
    assert len(llm.generate([messages, "the", ids], **kind)) == 3


def test_greedy_equals_stock_generate(llm: outrider.LLM) -> None:
    ids = llm.encode("the dog sat on")
    out = llm.target.model.generate(torch.tensor([ids]), max_new_tokens=50, do_sample=False, pad_token_id=1)  # type: ignore[attr-defined]
    assert llm.generate("the dog sat on", max_new_tokens=50)[0].tokens == out[0, len(ids) :].tolist()


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_the_other_rules_write_texts_of_the_right_length(llm: outrider.LLM, rule: str) -> None:
    out = llm.generate(["the", "one two"], rule=rule, temperature=1.0, seed=1, max_new_tokens=25, ignore_eos=True)
    assert [len(o.tokens) for o in out] == [25, 25]
    greedy = llm.generate(["the", "one two"], rule=rule, max_new_tokens=25)
    plain = llm.generate(["the", "one two"], max_new_tokens=25)
    assert [o.tokens for o in greedy] == [o.tokens for o in plain]


def test_interrupted_streams_leave_a_clean_state(llm: outrider.LLM) -> None:
    before = llm.target.model.config._attn_implementation  # type: ignore[attr-defined]
    full = llm.generate("the cat", seed=3, temperature=1.0, max_new_tokens=30)[0].text
    for n in range(3):
        stream = llm.stream("the cat", seed=3, temperature=1.0, max_new_tokens=30)
        for _ in range(n):
            next(stream)
        stream.close()
    assert llm.target.model.config._attn_implementation == before  # type: ignore[attr-defined]
    assert torch.is_grad_enabled()
    assert llm.generate("the cat", seed=3, temperature=1.0, max_new_tokens=30)[0].text == full


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        (["the", ""], {}, "prompt is empty"),
        ("the " * 400, {}, "context is 128"),
        ([5, 9999], {}, "outside the model's vocabulary"),
        ("the", {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ("the", {"max_new_tokens": -3}, "max_new_tokens must be at least 1"),
        ("the", {"temperature": -1.0}, "temperature must be"),
        ("the", {"temperature": math.nan}, "temperature must be"),
        ("the", {"temperature": math.inf}, "temperature must be"),
        ("the", {"top_p": 0.0}, "top_p must be"),
        ("the", {"top_p": 1.5}, "top_p must be"),
        ("the", {"top_k": -1}, "top_k must be"),
        ("the", {"min_p": 2.0}, "min_p must be"),
        ("the", {"repetition_penalty": 0.0}, "repetition_penalty must be"),
        ("the", {"rule": "magic"}, "there is no rule 'magic'"),
        ("the", {"seed": [1, 2]}, "one per prompt"),
        ("the", {"n": 0}, "n must be at least 1"),
        ("the", {"batch_size": 0}, "batch_size must be at least 1"),
        ("the", {"stop": ["x", ""]}, "a stop string is empty"),
        ("the", {"max_tokens": 4}, "no option max_tokens; did you mean max_new_tokens"),
        ("the", {"beams": 4}, "no option beams; there are max_new_tokens"),
        ("the", {"sampling": outrider.Sampling(), "top_p": 0.5}, "sampling or top_p, not both"),
        ("the", {"budget": "much"}, "a budget is auto"),
        ([{"role": "user"}], {}, "a chat message is"),
        ("a\ud800", {}, "character 2 of the prompt is half of a surrogate pair"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_bad_input_is_one_sentence(llm: outrider.LLM, prompt: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        llm.generate(prompt, **options)
    assert "\n" not in str(caught.value)


WRONG_TYPES = [
    ("the", {"stop": 5}, "stop is a string"),
    ("the", {"sampling": {"temperature": 0.7}}, "sampling is an outrider.Sampling, not {'temperature': 0.7}"),
    ("the", {"seed": "a"}, "seed must be a whole number, not 'a'"),
    ("the", {"seed": 1.5}, "seed must be a whole number"),
    ("the", {"n": "two"}, "n must be a whole number"),
    ("the", {"batch_size": None}, "batch_size must be a whole number"),
    ("the", {"max_new_tokens": 4.0}, "max_new_tokens must be a whole number"),
    ("the", {"temperature": "hot"}, "temperature must be a number, not 'hot'"),
    ("the", {"temperature": True}, "temperature must be a number, not True"),
    ("the", {"top_k": 1.5}, "top_k must be"),
    ("the", {"logit_bias": [1]}, "logit_bias maps"),
    ("the", {"rule": None}, "there is no rule None"),
    ("the", {"budget": 16}, "a budget is text"),
    ({"role": "user", "content": "the"}, {}, "put it in a list"),
    (b"the", {}, "not bytes"),
    ([b"the"], {}, "not bytes"),
    (5, {}, "a prompt is text, token ids or a list of chat messages, not int"),
    (None, {}, "a prompt is text, token ids or a list of chat messages, not NoneType"),
    ([1, "a"], {}, "integers alone"),
    ([[0.5]], {}, "integers alone"),
    (torch.ones(1, 2), {}, "integers alone"),
]


@pytest.mark.skipif(bool(os.environ.get("CHECK_SHAPES")), reason="here the tests' type checker would speak first")
@pytest.mark.parametrize(("prompt", "options", "sentence"), WRONG_TYPES)
def test_arguments_of_the_wrong_type_are_one_sentence(
    llm: outrider.LLM, prompt: Any, options: dict[str, Any], sentence: str
) -> None:
    for call in (llm.generate, llm.stream):
        if call == llm.stream and {"n", "batch_size"} & set(options):
            continue
        with pytest.raises(InputError) as result:
            call(prompt, **options)
        assert sentence in str(result.value)
        assert "\n" not in str(result.value)


@pytest.mark.skipif(bool(os.environ.get("CHECK_SHAPES")), reason="here the tests' type checker would speak first")
def test_tensors_and_arrays_are_prompts(llm: outrider.LLM) -> None:
    ids = llm.encode("one two three")
    wanted = llm.generate(ids, max_new_tokens=5)[0].tokens
    rows = torch.tensor([ids, ids])
    for given in (rows[0], rows, rows.numpy(), [rows[0]], [*rows.numpy()], tuple(ids)):
        made = llm.generate(given, max_new_tokens=5, seed=rows.numpy()[0, 0])
        assert [o.tokens for o in made] in ([wanted], [wanted, wanted]), given


def test_a_sampling_is_its_fields(llm: outrider.LLM) -> None:
    params = outrider.Sampling(temperature=0.8, top_p=0.9)
    made = llm.generate("the cat", seed=2, max_new_tokens=12, sampling=params)
    assert made[0].tokens == llm.generate("the cat", seed=2, max_new_tokens=12, temperature=0.8, top_p=0.9)[0].tokens
    assert "".join(llm.stream("the cat", seed=2, max_new_tokens=12, sampling=params)) == made[0].text


@pytest.mark.parametrize(
    ("rule", "temperature", "exact"),
    [
        ("coupled", 1.0, "bits"), ("rejection", 0.0, "bits"), ("rejection", 1.0, "distribution"),
        ("block", 1.0, "distribution"), ("typical", 1.0, "lossy"), ("typical", 0.0, "lossy"),
    ],
)  # fmt: skip
def test_an_output_says_how_exact_it_is(llm: outrider.LLM, rule: Any, temperature: float, exact: str) -> None:
    exact = llm.target.exact if exact == "bits" else exact
    how: dict[str, Any] = {"rule": rule, "temperature": temperature, "max_new_tokens": 3, "seed": 0}
    stream = llm.stream("the", **how)
    assert len("".join(stream)) > 0
    assert [o.exact for o in (*llm.generate(["the", "one"], **how), stream.output)] == [exact] * 3


def test_a_spec_with_a_shape_and_no_tree_is_static() -> None:
    def growth(spec: str) -> Any:
        return outrider.load("demo", spec).drafter.uncalibrated.growth  # type: ignore[attr-defined]

    assert (growth("eagle:demo?shape=2,1").tree, growth("eagle:demo?shape=2,1").shape) == ("static", (2, 1))
    assert growth("eagle:demo").tree == growth("eagle:demo?shape=2,1&tree=dynamic").tree == "dynamic"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lookup?ngram=3&ngram=5", "gives ngram twice; leave one out"),
        ("eagle:demo?tree=my+file.json", "my\\+file.json"),
        ("eagle:demo?tree=a%20b.json", "a%20b.json"),
    ],
)
def test_options_are_read_as_they_are_written(spec: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        outrider.load("demo", spec)


def test_a_mix_tells_methods_and_networks_apart() -> None:
    """EAGLE and EAGLE-3 share their compiled code; a network behind another tokenizer is no count."""
    plain = outrider.load("demo", "none").generate("The bus", max_new_tokens=24)[0].text
    for specs, counted in (
        (["eagle:demo", "eagle3:demo"], [False, False]),
        (["suffix", "model?vocab=text"], [True, False]),
        (["model?vocab=text", "mamba?vocab=text"], [False, False]),
    ):
        llm = outrider.load("demo", specs)
        assert [rate is not None for rate in llm.drafter.learnt[0].rates] == counted  # type: ignore[attr-defined]
        assert llm.generate("The bus", max_new_tokens=24)[0].text == plain
    with pytest.raises(InputError, match="two drafters of the same method"):
        outrider.load("demo", ["eagle:demo", "eagle:demo/hass"])


@pytest.mark.skipif(bool(os.environ.get("CHECK_SHAPES")), reason="here the tests' type checker would speak first")
@pytest.mark.parametrize("drafter", [[], [5], [Path("lookup")], ["lookup", None], ()])
def test_a_drafter_is_a_spec_or_some(folder: str, drafter: Any) -> None:
    with pytest.raises(InputError, match="a drafter is a SPEC such as 'lookup\\?ngram=3', or a list of some, not"):
        outrider.load(folder, drafter)


@pytest.mark.parametrize("device", ["cuda:99", "xpu", "nothing", 5])
def test_a_device_that_is_not_there_is_one_sentence(folder: str, device: Any) -> None:
    with pytest.raises(InputError, match=f"there is no device '{device}' here; choose one of auto, cpu"):
        outrider.load(folder, device=device)


def test_a_torch_dtype_and_device_name_themselves(folder: str) -> None:
    assert outrider.load(folder, dtype=torch.float32, device=torch.device("cpu")).target.precision == "float32"  # type: ignore[arg-type]


def test_chunks_mark_drafted_text_and_the_output_is_always_available(llm: outrider.LLM) -> None:
    kind: dict[str, Any] = {"seed": 4, "temperature": 1.0, "max_new_tokens": 30, "budget": "8x4"}
    full = llm.generate("one two three one two", **kind)[0]
    stream = llm.stream("one two three one two", **kind)
    first = next(stream.chunks())
    assert first.drafted == "", "the first token comes from the prompt's pass"
    assert stream.output.finish_reason == "interrupted"
    assert first.text + "".join(chunk.text for chunk in stream.chunks()) == full.text
    assert (stream.output.tokens, stream.output.finish_reason) == (full.tokens, full.finish_reason)
    assert stream.output.usage.rounds == full.usage.rounds


def test_budgets_as_people_write_them(folder: str, llm: outrider.LLM) -> None:
    fixed = outrider.load(folder, dtype="float32", budget="3,2")
    assert fixed.engine().budget == FixedBudget(10, 2, shape=(3, 2))
    assert fixed.engine(budget="16x6").budget == FixedBudget(16, 6)
    assert llm.engine(budget="auto").budget is llm.engine().budget, "what was learnt stays"
    assert llm.engine("rejection").budget is not llm.engine().budget
    with pytest.raises(InputError, match="a budget is auto"):
        outrider.load(folder, budget="much")
    pair = outrider.load(folder, ["lookup", "suffix"], dtype="float32", budget="1:2,1 2:2,1 none")
    assert pair.generate("the cat", max_new_tokens=9)[0].tokens == fixed.generate("the cat", max_new_tokens=9)[0].tokens


def test_repr_is_one_line(llm: outrider.LLM, folder: str) -> None:
    assert repr(llm) == f"LLM({folder}, drafter suffix, float32, cpu)"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("magic", "there is no drafter 'magic'"),
        ("suffix+ngram", "a mix has spaces around its"),
        ("lookup?size=3", "has no option 'size'"),
        ("lookup?ngram=many", "ngram must be a whole number"),
        ("lookup?ngram=0", "ngram must be at least 1"),
        ("model?tree=round", "tree must be dynamic, best, static, chain, greedy63 or a file"),
        (["none", "lookup"], "none cannot be mixed"),
        (["lookup", "lookup?ngram=2"], "two drafters of the same method"),
        ("suffix:missing.txt", "missing.txt cannot be read"),
    ],
    ids=str,
)
def test_bad_drafters_are_one_sentence(folder: str, spec: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        outrider.load(folder, drafter=spec, dtype="float32")


def test_choosing_needs_drafters_and_a_bandit_over_them(folder: str) -> None:
    for given in ("lookup", [], ["lookup"]):
        with pytest.raises(outrider.InputError, match="two drafters or more"):
            outrider.load(folder, given, choose=True)
    with pytest.raises(outrider.InputError, match="need one another"):
        outrider.load(folder, ["lookup", "ngram"], choose=True).generate("a", max_new_tokens=4)
    with pytest.raises(outrider.InputError, match="need one another"):
        outrider.load(folder, ["lookup", "ngram"]).generate("a", budget=BanditBudget(((1, (1, 1)), (0, (2, 1)))))


def test_a_draft_model_with_another_tokenizer_is_refused(folder: str, tmp_path: Path) -> None:
    other = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<end>", "the", "cat", "sat", "one"])}, unk_token="the")
    )
    PreTrainedTokenizerFast(tokenizer_object=other, eos_token="<end>").save_pretrained(tmp_path)
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="vocab=shared or vocab=text"):
        outrider.load(folder, drafter=f"model:{tmp_path}", dtype="float32")


@pytest.mark.parametrize("rows", [300, 320])
def test_a_draft_model_with_other_padding_rows_works(folder: str, tmp_path: Path, rows: int) -> None:
    """The same tokenizer, but an embedding padded to another number of rows."""
    draft = LlamaForCausalLM.from_pretrained(folder)
    draft.resize_token_embeddings(rows, mean_resizing=False)
    draft.save_pretrained(tmp_path)
    for file in Path(folder).glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    llm = outrider.load(folder, drafter=f"model:{tmp_path}", dtype="float32")
    plain = outrider.load(folder, drafter="none", dtype="float32")
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 2},
        {"temperature": 1.0, "seed": 2, "rule": "rejection"},
    ]
    for kind in kinds:
        kind = {"max_new_tokens": 30, "ignore_eos": True, "budget": FixedBudget(16, 4), **kind}
        out = llm.generate(["the cat", "one"], **kind)
        if "rule" not in kind:
            assert out[0].usage.tau > 2
            assert [o.tokens for o in out] == [o.tokens for o in plain.generate(["the cat", "one"], **kind)]
