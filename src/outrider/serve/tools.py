"""Tools that a chat may call, and the parsing of calls.

A forced call (`required`, or a named function) follows a grammar made of the functions' schemas, so it is valid with
any model. A free one (`auto`) is in the model's own format: that of templates with `<tool_call>{"name": ...,
"arguments": ...}</tool_call>` is supported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from .guide import Calls, of_schema
from .protocol import ChatRequest, Refusal, Tool, ToolChoice

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BEGINS, ENDS = re.compile(rf"{OPEN}\s*(?={{)"), re.compile(rf"\s*{CLOSE}")
# Keys of a JSON schema whose values are no schemas, and those whose values are schemas by name.
DATA = "const", "enum", "default", "examples"
NAMED = "properties", "patternProperties", "$defs", "definitions", "dependentSchemas"
# In a template: {"name" after <tool_call>, with the Jinja and quotes between them.
WRITES = re.compile(r"<tool_call>(\\n|\W){1,30}name\b")


@dataclass(frozen=True)
class Caller:
    """How one chat may call tools."""

    kind: str  # named, required or auto
    name: str = ""  # of the function, if it is named
    grammar: str | None = None
    single: bool = False  # at most one call: `parallel_tool_calls` is false
    tools: tuple[Tool, ...] = ()  # that the model may call if it wants to

    def calls(self, any_arguments: bool = False) -> Calls | None:
        """The calls that the model may write instead of a formatted response."""
        return Calls(OPEN, CLOSE, call_schema(self.tools, any_arguments), self.single) if self.tools else None

    def ready(self, text: str) -> str:
        """The prefix of an unfinished text that is content, whatever follows."""
        if self.kind != "auto":
            return ""
        at = text.find(OPEN)
        if at < 0:  # the text may end with the beginning of one
            at = next(i for i in range(max(0, len(text) - len(OPEN)), len(text) + 1) if OPEN.startswith(text[i:]))
        return text[:at].rstrip()

    def split(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """A finished text as content and tool calls. A call that is incomplete or broken, and what follows it, is
        content."""
        try:
            if self.kind == "named":
                json.loads(text)
                return None, [call(self.name, text)]
            if self.kind == "required":
                return None, [call(c["name"], spelled(c["arguments"])) for c in json.loads(text)]
        except (ValueError, RecursionError):
            return text, []
        calls, rest, at, last = [], "", 0, text.rfind(CLOSE)
        while (match := BEGINS.search(text, at)) and match.start() < last:
            try:
                made, end = json.JSONDecoder().raw_decode(text, match.end())
                closed = ENDS.match(text, end)
                if closed is None:
                    break
                calls.append(call(str(made["name"]), arguments_of(made)))
            except (ValueError, KeyError, TypeError, RecursionError):
                break
            rest, at = rest + text[at : match.start()].rstrip(), closed.end()
        return ((rest + text[at:]).rstrip() or None, calls[: 1 if self.single else None]) if calls else (text, [])


def arguments_of(made: dict[str, Any]) -> str:
    """The arguments of a call that a model wrote, as JSON; some write them as a string, or name them as Llama does.
    Raises ValueError for a string that is no object, KeyError where an object stands under another name."""
    for name in ("arguments", "parameters"):
        if name in made:
            value = made[name]
            if isinstance(value, str):
                value = json.loads(value or "{}")
                if not isinstance(value, dict):
                    raise ValueError(f"arguments are an object, not {value!r}")
            return spelled(value)
    if any(isinstance(value, dict) for value in made.values()):
        raise KeyError("arguments")
    return "{}"


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
        several = {} if request.parallel_tool_calls else {"maxItems": 1}
        call = call_schema(request.tools)
        schema = {"type": "array", "minItems": 1, **several, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}
        return Caller("required", grammar=of_schema(schema, "tools"))
    if not WRITES.search(str(template)):
        raise Refusal(
            "this model's chat template writes no JSON in <tool_call>; use tool_choice 'required' or name a function",
            "tool_choice",
        )
    return Caller("auto", single=not request.parallel_tool_calls, tools=tuple(request.tools))


def call_schema(tools: Sequence[Tool], any_arguments: bool = False) -> dict[str, Any]:
    """The JSON schema of a call of one of these tools. any_arguments: its arguments may be any object."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    schemas = [{"type": "object"} if any_arguments else parameters(tool) for tool in tools]
    inner = {str(i): rebased(schema, f"#/$defs/{i}") for i, schema in enumerate(schemas)}
    return {"anyOf": calls, "$defs": inner}


def rebased(schema: Any, place: str) -> Any:
    """A JSON schema for use at the pointer `place` of another one: its references to itself are prefixed."""
    if isinstance(schema, list):
        return [rebased(part, place) for part in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # its references are relative to `$id`
        return schema
    made = {key: part if key in DATA else rebased(part, place) for key, part in schema.items() if key not in NAMED}
    for key in NAMED:
        if isinstance(schemas := schema.get(key), dict):
            made[key] = {name: rebased(part, place) for name, part in schemas.items()}
    if isinstance(to := schema.get("$ref"), str) and (to == "#" or to.startswith("#/")):
        made["$ref"] = place + to[1:]
    return made


def parameters(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments; without one, no arguments."""
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
