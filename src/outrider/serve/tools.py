"""Tools that a chat may call, and the parsing of calls.

A forced call (`required`, or a named function) follows a grammar made of the functions' schemas, so it is valid with
any model. A free one (`auto`) is in the model's own format: that of templates with `<tool_call>{"name": ...,
"arguments": ...}</tool_call>` is supported.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from .guide import of_schema
from .protocol import ChatRequest, Refusal, Tool, ToolChoice

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Strings match as a unit, so that a </tool_call> inside one does not end the call.
CALL = re.compile(r'<tool_call>\s*(\{(?:[^"]|"[^"\\]*(?:\\.[^"\\]*)*")*?\})\s*</tool_call>', re.DOTALL)
# In a template: {"name" after <tool_call>, with the Jinja and quotes between them.
WRITES = re.compile(r"<tool_call>(\\n|\W){1,30}name\b")


@dataclass(frozen=True)
class Caller:
    """How one chat may call tools."""

    kind: str  # named, required or auto
    name: str = ""  # of the function, if it is named
    grammar: str | None = None
    single: bool = False  # at most one call: `parallel_tool_calls` is false

    def ready(self, text: str) -> str:
        """The prefix of an unfinished text that is content, whatever follows."""
        if self.kind != "auto":
            return ""
        at = text.find(OPEN)
        if at < 0:  # the text may end with the beginning of one
            at = next(i for i in range(max(0, len(text) - len(OPEN)), len(text) + 1) if OPEN.startswith(text[i:]))
        return text[:at].rstrip()

    def split(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """A finished text as content and tool calls. An incomplete call is content."""
        try:
            if self.kind == "named":
                json.loads(text)
                return None, [call(self.name, text)]
            if self.kind == "required":
                return None, [call(c["name"], spelled(c["arguments"])) for c in json.loads(text)]
        except (ValueError, RecursionError):
            return text, []
        calls, rest, at = [], "", 0
        for match in CALL.finditer(text, 0, text.rfind(CLOSE) + len(CLOSE) if CLOSE in text else 0):
            rest, at = rest + text[at : match.start()].rstrip(), match.end()
            try:
                made = json.loads(match[1])
                calls.append(call(str(made["name"]), spelled(made.get("arguments", {}))))
            except (ValueError, KeyError, TypeError, RecursionError):
                return text, []
        return ((rest + text[at:]).rstrip() or None, calls[: 1 if self.single else None]) if calls else (text, [])


def spelled(value: Any) -> str:
    """A value as JSON. Raises ValueError for numbers that JSON has not (1e999 is read as infinity)."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call in OpenAI's format. Raises ValueError for half of a surrogate pair, which is no text."""
    (name + arguments).encode()
    return {
        "id": f"call_{uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def caller_of(request: ChatRequest, template: Any) -> Caller | None:
    """The caller for the fields `tools` and `tool_choice`."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none"):
            raise Refusal("tool_choice needs tools", "tool_choice")
        return None
    if choice == "none":
        return None
    if isinstance(choice, ToolChoice):
        named = [tool for tool in request.tools if tool.function.name == choice.function.name]
        if not named:
            raise Refusal(f"there is no tool {choice.function.name!r} among the tools", "tool_choice")
        return Caller("named", choice.function.name, of_schema(parameters(named[0]), "tools"))
    if choice == "required":
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": parameters(tool)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in request.tools
        ]
        several = {} if request.parallel_tool_calls else {"maxItems": 1}
        schema = {"type": "array", "minItems": 1, **several, "items": {"anyOf": calls}}
        return Caller("required", grammar=of_schema(schema, "tools"))
    if not WRITES.search(str(template)):
        raise Refusal(
            "this model's chat template writes no JSON in <tool_call>; use tool_choice 'required' or name a function",
            "tool_choice",
        )
    return Caller("auto", single=not request.parallel_tool_calls)


def parameters(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments; without one, no arguments."""
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
