"""Chat templates, in jinja2's sandbox: a template comes with a model's file, and its author is unknown.

They are written for transformers, so names, filters and rules for white space are the ones that it offers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

END = "<|outrider: the last message goes on here|> "  # a template that trims a message takes the space
REASONING = "reasoning_content", "thinking", "reasoning"  # names of a message's reasoning, the usual one first


def render(
    template: str,
    messages: Sequence[Any],
    tools: Sequence[Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """Messages as one text.

    Args:
        template: in jinja2's language.
        messages: mappings with `role` and `content`.
        tools: JSON schemas of functions that may be called.
        add_generation_prompt: open an answer after the messages?
        continue_final_message: leave the last message open?
        variables: what else the template may read.

    Raises:
        TemplateError: the template is faulty, or refuses these messages.
        ValueError: the last message cannot be left open.
    """
    plain_messages = [_message(message) for message in messages]
    if continue_final_message:
        if add_generation_prompt:
            raise ValueError("the last message cannot be continued and an answer opened after it")
        _leave_open(plain_messages)
    text = _compiled(template).render(
        messages=plain_messages,
        tools=None if tools is None else plain(list(tools)),
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **plain(dict(variables)),
    )
    return _cut(text, plain_messages) if continue_final_message else text


def plain(value: Any) -> Any:
    """A value rebuilt of JSON's types, so that a template cannot call other objects' methods."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    return f"<{type(value).__name__}>"


def _message(message: Any) -> dict[str, Any]:
    made = plain(message)
    if not isinstance(made, dict):
        raise ValueError(f"a chat message is a mapping, not {type(message).__name__}")
    made = {key: value for key, value in made.items() if value is not None}
    reasoning = next((made[key] for key in REASONING if key in made), None)
    return made if reasoning is None else {"thinking": reasoning, **made, "reasoning_content": reasoning}


def _leave_open(messages: list[dict[str, Any]]) -> None:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + END
        return
    parts = [part for part in content if isinstance(part, dict) and "text" in part] if isinstance(content, list) else []
    if not parts:
        raise ValueError("the last message has no text to continue")
    parts[-1]["text"] += END


def _cut(text: str, messages: list[dict[str, Any]]) -> str:
    """The text up to where the last message ends. A template that trims a message trims it here too."""
    at = text.rfind(END.rstrip())
    if at < 0:
        raise ValueError("the chat template does not write the last message as it is, so it cannot be continued")
    return text[:at] if text.startswith(END, at) else text[:at].rstrip()


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace,
    }  # fmt: skip
    return environment.from_string(template)


class _Generation(Extension):
    """`{% generation %}`, which marks what a model has written for those who train on it; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict`, without the methods of a class."""

    def __call__(self, *args: Any, **more: Any) -> dict[Any, Any]:
        return dict(*args, **more)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace`, without attributes that Python keeps for itself."""

    def __init__(*args: Any, **more: Any) -> None:
        self, *positional = args
        values = dict(*positional, **more)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a chat template cannot set {name!r} in a namespace")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without the escapes of HTML that jinja2's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
