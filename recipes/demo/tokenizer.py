"""The demo tokenizer: byte-level BPE with 4,096 entries, digits one by one, and a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipes.demo.data import SOURCES, documents

VOCAB = 4096
SPECIALS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|pad|>")
# Words and punctuation may carry one leading space; so may a digit, but digits never join.
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# A system message is read as the opening of the first user turn: the model has seen no other role.
CHAT_TEMPLATE = """\
{%- set ns = namespace(system='') -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set ns.system = ns.system + message['content'] + '\\n\\n' -%}
{%- elif message['role'] == 'user' -%}
{{- '<|user|>' + ns.system + message['content'] + '<|end|>' -}}
{%- set ns.system = '' -%}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant|>' + message['content'] + '<|end|>' -}}
{%- else -%}
{{- raise_exception('The demo model knows the roles system, user and assistant, not ' + message['role'] + '.') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train(texts: Iterable[str], vocab: int = VOCAB) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIALS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def sample(work: Path, characters: int = 1_200_000) -> Iterator[str]:
    """The same number of characters of every domain, so that no big one owns the vocabulary."""
    for domain in SOURCES:
        left = characters
        for document in documents(work, "train", domain):
            parts = [words for _, words in document.messages] or [document.text]
            yield from parts
            left -= sum(map(len, parts))
            if left < 0:
                break


def save(tokenizer: Tokenizer, folder: Path, context: int = 2048) -> None:
    begin, end, _, _, pad = SPECIALS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token=end,
        pad_token=pad,
        additional_special_tokens=list(SPECIALS[2:4]),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder, save_jinja_files=False)
    config = folder / "tokenizer_config.json"
    fields = {
        **json.loads(config.read_text()),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # older releases read it too
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def build(work: Path):
    """Trains the tokenizer once; returns the loaded one."""
    folder = work / "tokenizer"
    if not (folder / "tokenizer_config.json").exists():
        save(train(sample(work)), folder)
    return AutoTokenizer.from_pretrained(folder)
