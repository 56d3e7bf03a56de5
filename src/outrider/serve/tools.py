"""Tools: what a chat may call, and how calls are told from text.

A forced call (`required`, or a named function) is written under a grammar made of the functions' own schemas, so it is
valid whatever the model is. A free one (`auto`) is in the model's own words: those of templates that write
`<tool_call>{"name": ..., "arguments": ...}</tool_call>` are understood.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from .guide import of_schema
from .protocol import ChatRequest, Refusal, Tool, ToolChoice

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Caller:
    """How one chat may call tools."""

    kind: str  # named, required, auto or none
    name: str = ""  # of the function, if it is named
    grammar: str | None = None
    shown: bool = True  # are the tools shown to the template?

    def split(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """A finished text as content and tool calls."""
        if self.kind == "none":
            return text, []
        if self.kind == "named":
            return None, [call(self.name, text)]
        if self.kind == "required":
            try:
                found = json.loads(text)
                return None, [call(c["name"], json.dumps(c["arguments"], ensure_ascii=False)) for c in found]
            except (ValueError, KeyError, TypeError):
                return text, []  # cut short by the length
        calls = []
        for match in CALL.finditer(text):
            try:
                made = json.loads(match[1])
                calls.append(call(str(made["name"]), json.dumps(made.get("arguments", {}), ensure_ascii=False)))
            except (ValueError, KeyError, TypeError):
                return text, []
        rest = CALL.sub("", text).strip()
        return (rest or None, calls) if calls else (text, [])


def call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call as OpenAI's clients read it."""
    return {
        "id": f"call_{uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def caller_of(request: ChatRequest, template: Any) -> Caller | None:
    """What the fields `tools` and `tool_choice` ask for."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none"):
            raise Refusal("tool_choice needs tools", "tool_choice")
        return None
    if choice == "none":
        return Caller("none", shown=False)
    if isinstance(choice, ToolChoice):
        wanted = [tool for tool in request.tools if tool.function.name == choice.function.name]
        if not wanted:
            raise Refusal(f"there is no tool {choice.function.name!r} among the tools", "tool_choice")
        return Caller("named", choice.function.name, of_schema(parameters(wanted[0])))
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
        return Caller("required", grammar=of_schema(schema))
    if "tool_call" not in str(template):
        raise Refusal(
            "this model's chat template knows no tools; use tool_choice 'required' or name a function", "tool_choice"
        )
    return Caller("auto")


def parameters(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments; without one, no arguments."""
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
