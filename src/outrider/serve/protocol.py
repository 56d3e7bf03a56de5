"""The fields of requests: OpenAI's, a few of vLLM's, and our own `outrider` object.

Fields that would change the output and are not supported are refused by name, and so are unknown fields. A field that
is null counts as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

# Fields that do not change the text: accepted and ignored.
IGNORED = (
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "stream_interval",
)  # fmt: skip

# Unsupported fields that would change the text or the response, with their neutral values.
REFUSED: dict[str, Any] = {
    "audio": None, "modalities": ["text"], "prediction": None, "web_search_options": None, "functions": None,
    "function_call": None, "moderation": None, "store": False, "reasoning_effort": None,
    "prompt_logprobs": None, "verbosity": None, "bad_words": [], "allowed_token_ids": None,
    "truncate_prompt_tokens": None, "include_stop_str_in_output": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "length_penalty": 1.0, "use_beam_search": False, "documents": None,
    "chat_template": None, "thinking_token_budget": None, "priority": 0, "add_special_tokens": None, "best_of": 1,
    "logprob_token_ids": None, "return_tokens_as_token_ids": False, "guided_json": None, "guided_regex": None,
    "guided_choice": None, "guided_grammar": None, "regex": None, "ebnf": None, "echo_logprobs": None,
    "repetition_detection": None,
}  # fmt: skip


class Refusal(Exception):
    """An error response: status, OpenAI's type and code, and the field."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, kind: str = "", code: str | None = None
    ):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class Strict(BaseModel):
    """A body without unknown fields, infinities or type coercion."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, given: Any) -> Any:
        """A field that is null counts as absent."""
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Words = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(Strict):
    """What a stream contains besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False  # accepted and ignored: padding does not change the text
    continuous_usage_stats: bool = False  # vLLM's: with `include_usage`, every chunk has the counts so far


class Ours(Strict):
    """How to speculate for this request. None of it changes the text."""

    speculate: bool = True
    drafter: str | None = Field(None, description="One of the loaded drafters; default: the server's.")
    budget: int | None = Field(None, ge=0, le=1024, description="Maximum tokens drafted per round.")
    rounds: bool = Field(False, description="Send each round's tree and which text was drafted.")


class JsonSchema(Strict):
    """A JSON schema for the response."""

    name: str = Field("schema", max_length=64)
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Strict):
    """The format of the response."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """One of four restrictions of the text (vLLM's field)."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: Words | None = None
    choice: list[Words] | None = Field(None, min_length=1, max_length=256)
    grammar: str | None = Field(None, min_length=1, max_length=100_000)


class Common(Strict):
    """Fields common to chats and completions."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict, max_length=1024)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Words | Annotated[list[Words], Field(max_length=16)] = Field(default_factory=list)
    stop_token_ids: list[Token] = Field(default_factory=list, max_length=64)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    request_id: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    outrider: Ours | None = None


class Message(BaseModel):
    """One message of a chat, which the model's template interprets."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class Function(Strict):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class Tool(Strict):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


class Named(Strict):
    """A function by its name."""

    name: str


class ToolChoice(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: Named


class TextPart(Strict):
    """A piece of text."""

    type: Literal["text"]
    text: str


class Prediction(Strict):
    """What the answer may contain, such as the file that it changes; drafts are copied from it."""

    type: Literal["content"] = "content"
    content: str | list[TextPart] = ""

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Common):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Tool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    prediction: Prediction = Field(default_factory=Prediction)


class CompletionRequest(Common):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=128)]
        | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=128)]
    )
    suffix: str = ""  # fill-in-the-middle: what follows the completion
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False


class TokenizeRequest(Strict):
    """The body of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[Token]


def parse(body: bytes, kind: type[Strict]) -> Any:
    """Parse a request's body. Raises Refusal, naming the field."""
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise Refusal("the body must be a JSON object")
    fields = {name: value for name, value in given.items() if value is not None and name not in IGNORED}
    for name in [name for name in fields if name in REFUSED and name not in kind.model_fields]:
        if fields.pop(name) != REFUSED[name]:
            raise Refusal(f"{name} is not supported by this server; leave it out", name)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise first(error) from None


def first(error: ValidationError) -> Refusal:
    """The first validation error in one sentence."""
    detail = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place: list[str] = []
    for part in map(str, detail["loc"]):
        if part in ("str", "dict[str,any]") or part.startswith(("list[", "constrained", "ToolChoice", "literal")):
            message = "has none of the accepted forms" if len(detail["loc"]) == len(place) + 1 else None
            return Refusal(f"{'.'.join(place)}: {message or detail['msg']}", ".".join(place))
        place.append(part)
    where = ".".join(place)
    if detail["type"] == "extra_forbidden":
        return Refusal(f"the field {where} is unknown; leave it out", where)
    return Refusal(f"{where or 'the request'}: {detail['msg']}", where or None)
