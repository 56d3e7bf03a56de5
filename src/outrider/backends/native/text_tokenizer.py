"""A model's tokenizer with its special tokens and its chat template, from a .gguf file or a folder.

`TextTokenizer` has the few methods of transformers' tokenizers that Outrider uses, so that either kind serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ...params import InputError, first_line
from .checkpoint import GGUF, read_json
from .files import open_gguf
from .tokenizer import from_gguf

CONFIGS = "tokenizer_config.json", "special_tokens_map.json"  # the latter of folders that are older
# Tokens that end a text or a turn in every model that has them, as llama.cpp knows them; but HARMONY's END_OF_PART.
ENDS = (
    "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>",
    "<|return|>", "<|call|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
HARMONY, END_OF_PART = {"<|return|>", "<|call|>"}, "<|end|>"  # of gpt-oss, which ends a channel with the latter
SPECIAL = "bos", "eos", "unk", "pad", "sep", "cls", "mask"
IN_GGUF = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


@dataclass(frozen=True)
class TextTokenizer:
    """Text to token ids and back.

    Attributes:
        backend_tokenizer: does the work.
        special_tokens_map: by use, as in `eos_token`: the text of special tokens.
        chat_template: of jinja2, or several by name; None: there is none.
    """

    backend_tokenizer: Tokenizer = field(repr=False)
    special_tokens_map: Mapping[str, str]
    chat_template: str | Mapping[str, str] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        verbose: bool = True,
    ) -> dict[str, Any]:
        """Token ids of a text, or of several; with the characters that each token stands for, if wanted."""
        if isinstance(text, str):
            one = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return {"input_ids": one.ids} | ({"offset_mapping": one.offsets} if return_offsets_mapping else {})
        made = self.backend_tokenizer.encode_batch(list(text), add_special_tokens=add_special_tokens)
        offsets = {"offset_mapping": [one.offsets for one in made]} if return_offsets_mapping else {}
        return {"input_ids": [one.ids for one in made]} | offsets

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **ignored: Any) -> str:
        """The text of token ids; nothing is cleaned up."""
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def get_vocab(self) -> dict[str, int]:
        """Ids by token."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """The name of a token."""
        return self.backend_tokenizer.id_to_token(token)

    def apply_chat_template(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> Any:
        """Chat messages as the model's template (or another `chat_template`) writes them: a text, its token ids, or a
        mapping with `input_ids`.

        Raises:
            TemplateError: of jinja2: the template refuses the messages.
            ValueError: there is no such template, or no message.
        """
        from .chat_template import render

        if not messages:
            raise ValueError("a chat has at least one message")
        more = {**self.special_tokens_map, **variables}
        template = chat_template or self._template(tools)
        text = render(template, messages, tools, add_generation_prompt, continue_final_message, more)
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": ids} if return_dict else ids

    def _template(self, tools: Any) -> str:
        known = self.chat_template
        if isinstance(known, Mapping):
            known = known.get("tool_use") if tools is not None and "tool_use" in known else known.get("default")
        if not known:
            raise ValueError("the model has no chat template")
        return known

    def _id(self, use: str) -> int | None:
        name = self.special_tokens_map.get(f"{use}_token")
        return None if name is None else self.backend_tokenizer.token_to_id(name)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the begin-of-text token."""
        return self._id("bos")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-text token."""
        return self._id("eos")


def load_tokenizer(place: str | Path) -> TextTokenizer:
    """The tokenizer of a .gguf file, or of a folder with a tokenizer.json.

    Raises:
        InputError: there is none, or it is damaged or of a kind that is not supported.
    """
    place = Path(place)
    return _of_gguf(place) if place.name.lower().endswith(GGUF) else _of_folder(place)


def _of_gguf(file: Path) -> TextTokenizer:
    values = open_gguf(file).metadata
    try:
        backend = from_gguf(values)
    except InputError:
        raise
    except Exception as error:  # the tokenizers package tells no kinds of damage apart
        raise InputError(f"{file} has a damaged vocabulary ({first_line(error)}); fetch it again") from None
    words = values["tokenizer.ggml.tokens"]
    ids = {use: values.get(f"tokenizer.ggml.{theirs}_token_id") for use, theirs in IN_GGUF.items()}
    special = {f"{use}_token": words[i] for use, i in ids.items() if isinstance(i, int) and 0 <= i < len(words)}
    return TextTokenizer(backend, special, templates_of(values))


def templates_of(values: Mapping[str, Any]) -> str | Mapping[str, str] | None:
    """The chat template of a .gguf file, or several by name."""
    main, names = values.get("tokenizer.chat_template"), values.get("tokenizer.chat_templates")
    known = {"default": main} if isinstance(main, str) else {}
    for name in names if isinstance(names, list) else ():
        if isinstance(text := values.get(f"tokenizer.chat_template.{name}"), str):
            known[str(name)] = text
    return known if len(known) > 1 else known.get("default")


def _of_folder(folder: Path) -> TextTokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{folder} has no tokenizer.json, which native models need; fetch it too")
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the reader raises nothing more exact
        raise InputError(f"{file} is damaged ({first_line(error)}); fetch it again") from None
    backend.no_truncation()  # which a training may have left in the file
    backend.no_padding()
    own, older = (read_json(folder / name) if (folder / name).is_file() else {} for name in CONFIGS)
    config = own if "added_tokens_decoder" in own else {**older, **own}
    special: dict[str, str] = {}
    for use in SPECIAL:
        token = config.get(f"{use}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            special[f"{use}_token"] = token
    unknown = [token for token in special.values() if backend.token_to_id(token) is None]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in unknown])
    return TextTokenizer(backend, special, _template_of(folder, config))


def _template_of(folder: Path, config: Mapping[str, Any]) -> str | Mapping[str, str] | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        main = {"default": file.read_text(encoding="utf-8")}
        return main | {other.stem: other.read_text(encoding="utf-8") for other in others} if others else main["default"]
    known = config.get("chat_template")
    if known is None and (folder / "chat_template.json").is_file():
        known = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(known, list):
        named = [one for one in known if isinstance(one, Mapping)]
        return {str(one.get("name")): str(one.get("template")) for one in named}
    return known if isinstance(known, str) else None


def file_ends(tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text although a .gguf file may not say so; tokenizer: ours or one of transformers', or None."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return frozenset()
    return frozenset([*turn_ends(tokenizer), *known_ends(tokenizer)])


def known_ends(tokenizer: Any) -> list[int]:
    """The tokens of ENDS that the vocabulary has."""
    there = {name: tokenizer.backend_tokenizer.token_to_id(name) for name in ENDS}
    harmony = all(there[name] is not None for name in HARMONY)
    return [i for name, i in there.items() if i is not None and not (harmony and name == END_OF_PART)]


def turn_ends(tokenizer: Any) -> list[int]:
    """The special token that the chat template writes after an answer; none where it has none."""
    if not tokenizer.chat_template:
        return []
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # a template may fail in any way, and then tells nothing
        return []
    _, written, behind = text.rpartition("answer")
    first = tokenizer.encode(behind.strip(), add_special_tokens=False)[:1] if written else []
    known = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return [token for token in first if token in known and known[token].special]


def eos_of(place: str | Path, config: Mapping[str, Any], tokenizer: TextTokenizer | None) -> frozenset[int]:
    """Every token that ends a text: those of generation_config.json or else of the config, or the tokenizer's. A .gguf
    file may name the end of a text alone or that of a turn: its template and its vocabulary have the others."""
    place = Path(place)
    ends = None
    if place.is_dir() and (place / "generation_config.json").is_file():
        ends = read_json(place / "generation_config.json").get("eos_token_id")
    ends = config.get("eos_token_id") if ends is None else ends
    ends = getattr(tokenizer, "eos_token_id", None) if ends is None else ends
    ids = [ends] if isinstance(ends, int) else ends if isinstance(ends, list) else []
    if place.is_file():
        ids = [*ids, *file_ends(tokenizer)]
    return frozenset(end for end in ids if isinstance(end, int))
