"""Tokenizers and chat templates without transformers: the same ids and texts as with it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write
from jinja2 import TemplateError
from small import build
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from outrider import names
from outrider.backends.native.chat_template import render
from outrider.backends.native.checkpoint import open_checkpoint
from outrider.backends.native.text_tokenizer import eos_of, load_tokenizer, templates_of
from outrider.backends.native.tokenizer import from_gguf
from outrider.backends.torch import gguf
from outrider.core.text import TokenBytes, detokenizer, text_of
from outrider.params import InputError

DEMO = Path(str(files("outrider") / "demo" / "target"))
TEXTS = ["The capital of France is", " é 漢字 e\u0301 \n\n\t x  y 123 4567", "", "<|user|>Hi<|end|> a", "🚀 don't I'LL"]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <é> {{ x }}  \n"},
    {"role": "assistant", "content": "Hi", "reasoning": "I think", "tool_calls": None},
    {"role": "user", "content": "More."},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "plain": "{% for m in messages %}\n  <{{ m.role }}> {{ m['content'] }}\n{% endfor %}\n{{ bos_token }}|",
    "tools": "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages | tojson }}",
    "loops": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ 'tool_calls' in m }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{{ dict(a=1) }}{{ extra }}{{ documents is none }}",
    "trims": "{% for m in messages %}{{ m.content | trim }};{% endfor %}{% if add_generation_prompt %}A{% endif %}",
}


@pytest.fixture(params=["demo", "smollm2", "tiny"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Folders and .gguf files."""
    if request.param == "demo":
        return DEMO
    if request.param == "tiny":
        return write(tmp_path / "m.gguf", build("llama", vocab_size=128), "F32")
    if (file := names.installed()) is None:
        pytest.skip("SmolLM2 is not installed")
    return file


def test_a_files_text_ends_with_its_turn(tmp_path: Path) -> None:
    """Where a file names one end (token 1), several, or its template writes one; token 0 is <|endoftext|>."""
    model = build("llama", vocab_size=128)
    bare = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    wanted: list[tuple[dict[str, Any], set[int]]] = [
        ({"template": bare}, {0, 1}),
        ({"template": bare, "eot": 3, "eom": 4}, {0, 1, 3, 4}),
        ({"template": bare, "eot": 1}, {0, 1}),
        ({"template": bare.replace("}}", "}} <user>\n")}, {0, 1, 2}),
        ({"template": bare.replace("}}", "}} th")}, {0, 1}),
        ({"template": "{{ raise_exception('no') }}"}, {0, 1}),
    ]
    for i, (options, ends) in enumerate(wanted):
        file = write(tmp_path / f"{i}.gguf", model, "F32", **options)
        assert eos_of(file, open_checkpoint(file).config, load_tokenizer(file)) == ends


def test_only_gpt_oss_goes_on_behind_its_end_of_turn(tmp_path: Path) -> None:
    """There it ends a channel."""
    ends = {}
    for name, arch in (("llama", "llama"), ("gpt_oss", "gpt-oss")):
        file = write(tmp_path / f"{name}.gguf", build(name), "F32", arch=arch, eot=7)
        ends[name] = open_checkpoint(file).config["eos_token_id"]
    assert ends == {"llama": [1, 7], "gpt_oss": 1}


def test_a_training_leaves_no_limit_in_a_tokenizer(tmp_path: Path) -> None:
    """Lengths that were saved with it, special tokens that only a map names, and templates beside the usual one."""
    shutil.copytree(DEMO, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    made = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    made.enable_truncation(4)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "m" / "tokenizer.json"))
    text = "The old bridge over the river was closed in the spring."
    wanted = load_tokenizer(DEMO)
    assert load_tokenizer(tmp_path / "m").encode(text) == wanted.encode(text)
    config = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = {name: config.pop(name) for name in ("bos_token", "eos_token") if name in config}
    config.pop("added_tokens_decoder", None)
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "m" / "special_tokens_map.json").write_text(json.dumps(names), encoding="utf-8")
    assert load_tokenizer(tmp_path / "m").eos_token_id == wanted.eos_token_id
    (tmp_path / "m" / "chat_template.jinja").write_text("usual")
    (tmp_path / "m" / "additional_chat_templates").mkdir()
    (tmp_path / "m" / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    several = load_tokenizer(tmp_path / "m")
    assert several.apply_chat_template(CHAT[:1], tokenize=False) == "usual"
    assert several.apply_chat_template(CHAT[:1], tools=TOOLS, tokenize=False) == "tools"


def test_a_file_may_have_several_templates() -> None:
    values = {"tokenizer.chat_template": "a", "tokenizer.chat_templates": ["tool_use", "rag"],
              "tokenizer.chat_template.tool_use": "b"}  # fmt: skip
    assert templates_of(values) == {"default": "a", "tool_use": "b"}
    assert templates_of({"tokenizer.chat_template": "a"}) == "a"
    assert templates_of({}) is None


def test_a_message_that_a_template_trims_is_continued_trimmed() -> None:
    """As transformers does; one that is not trimmed keeps its spaces."""
    chat = [{"role": "assistant", "content": "I think \n"}]
    for template, wanted in (
        ("<{{ messages[0].content | trim }}>", "<I think"),
        ("<{{ messages[0].content }}>", "<I think \n"),
    ):
        assert render(template, chat, None, False, True, {}) == wanted


def test_old_files_split_text_as_their_architecture_does() -> None:
    """Those that say nothing of it: phi-2's punctuation after a space is one piece."""
    letters = ["'", "t", "I", "(", "y", "e", "\u0120", "\u0120(", "'t"]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": letters, "tokenizer.ggml.merges": ["\u0120 (", "' t"],
    }  # fmt: skip
    for architecture, wanted in (("phi2", ["\u0120(", "y"]), ("llama", ["\u0120", "(", "y"])):
        made = from_gguf({**values, "general.architecture": architecture})
        assert made.encode(" (y", add_special_tokens=False).tokens == wanted


def test_phi_3s_marks_take_the_space_behind_them() -> None:
    pieces = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "\u2581", "H", "i", "\u2581H", "<0x0A>"]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": [0.0] * len(pieces),
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 3, 1, 1, 1, 1, 6], "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip
    made = {
        architecture: from_gguf({**values, "general.architecture": architecture}).encode("<|user|>\nHi<|end|>\n").ids
        for architecture in ("phi3", "llama")
    }
    assert made["phi3"] == [pieces.index(piece) for piece in ("<|user|>", "\u2581H", "i", "<|end|>")]
    assert pieces.index("<0x0A>") in made["llama"]


def of_transformers(place: Path) -> Any:
    return AutoTokenizer.from_pretrained(place) if place.is_dir() else gguf.read_tokenizer(place)


def test_ids_and_special_tokens_are_those_of_transformers(place: Path) -> None:
    ours, theirs = load_tokenizer(place), of_transformers(place)
    for text in TEXTS:
        for special in (True, False):
            assert ours(text, add_special_tokens=special)["input_ids"] == list(
                theirs(text, add_special_tokens=special)["input_ids"]
            )
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    both = ours(TEXTS[:2], return_offsets_mapping=True), theirs(TEXTS[:2], return_offsets_mapping=True)
    assert both[0]["input_ids"] == both[1]["input_ids"]
    assert both[0]["offset_mapping"] == both[1]["offset_mapping"]
    assert ours.get_vocab() == theirs.get_vocab()
    for name in ("bos_token_id", "eos_token_id", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert ours.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)


def test_chats_are_those_of_transformers(place: Path) -> None:
    ours, theirs = load_tokenizer(place), of_transformers(place)
    for prompt in (True, False):
        mine = ours.apply_chat_template(CHAT, add_generation_prompt=prompt)
        assert mine["input_ids"] == list(theirs.apply_chat_template(CHAT, add_generation_prompt=prompt)["input_ids"])
    last = [*CHAT[:2], {"role": "assistant", "content": "I think  "}]
    options: dict[str, Any] = {"tokenize": False, "continue_final_message": True}
    assert ours.apply_chat_template(last, **options) == theirs.apply_chat_template(last, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_have_what_transformers_offers(tmp_path: Path, name: str, tools: Any) -> None:
    shutil.copytree(DEMO, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "m" / "chat_template.jinja").write_text(TEMPLATES[name])
    ours, theirs = load_tokenizer(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")
    for prompt in (True, False):
        options = {"tools": tools, "add_generation_prompt": prompt, "tokenize": False, "extra": [1, {"a": None}]}
        assert ours.apply_chat_template(CHAT, **options) == theirs.apply_chat_template(CHAT, **options)


def test_several_templates(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "D"
    assert tokenizer.apply_chat_template(CHAT, tools=TOOLS, tokenize=False) == "T"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__init__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
        "{% for m in messages %}",
    ],
)
def test_templates_cannot_leave_the_sandbox(template: str) -> None:
    with pytest.raises(TemplateError):
        render(template, CHAT, None, False, False, {})


def test_a_message_that_the_template_does_not_write_cannot_be_continued() -> None:
    with pytest.raises(ValueError, match="cannot be continued"):
        render("x", CHAT, None, False, True, {})
    with pytest.raises(ValueError, match="no text to continue"):
        render("x", [{"role": "assistant", "content": []}], None, False, True, {})


def test_ends_of_texts() -> None:
    tokenizer = load_tokenizer(DEMO)
    assert eos_of(DEMO, open_checkpoint(DEMO).config, tokenizer) == {1}
    assert eos_of("m.gguf", {"eos_token_id": [3, 4]}, tokenizer) == {3, 4}
    assert eos_of("m.gguf", {}, tokenizer) == {1}
    assert eos_of("m.gguf", {}, None) == frozenset()


def test_the_detokenizer_has_a_table_for_it() -> None:
    tokenizer = load_tokenizer(DEMO)
    table = detokenizer(tokenizer)
    assert isinstance(table, TokenBytes)
    assert text_of(table.open(), tokenizer.encode(TEXTS[1])) == TEXTS[1]


def test_a_folder_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer\.json is damaged") as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


def test_neither_torch_nor_transformers_is_imported() -> None:
    program = """
import sys
from outrider.backends.native.text_tokenizer import load_tokenizer
load_tokenizer(sys.argv[1]).apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
heavy = {name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "jaxtyping", "scipy"}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program, str(DEMO)], check=True)
