"""From a request to its rows: encoded prompts, sampling and stops; impossible requests are refused."""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from uuid import uuid4

from .. import __version__, machine
from ..core.text import Places
from ..encoding import has_template
from ..engine.request import Request, check_prompt
from ..engine.stopping import Stop
from ..infill import Infill
from ..llm import LLM
from ..params import InputError, Sampling
from .call import Call, Channel
from .fleet import Choice
from .guide import Calls, Grammars, Guide
from .job import Job, Watch
from .protocol import ChatRequest, Common, CompletionRequest, Message, Ours, Refusal
from .scheduler import Scheduler
from .scoring import Scoring
from .texts import Voice
from .tools import Caller, caller_of

PROBE = 8  # characters per token of the context that are tokenised to see whether a longer text may fit
SLACK = 64  # tokens by which the rest of a text may shorten its tokenised beginning


@dataclass(frozen=True)
class Limits:
    """Limits of requests and connections."""

    body: int = 0  # maximum bytes; 0: enough for the longest prompt (`fitted`)
    texts: int = 64  # prompts times samples
    output: int = 4096  # default max_tokens of chats
    seconds: float = 600.0  # from arrival to the end of its last text
    connections: int = 1000
    header: float = 10.0  # seconds until a request's header must be complete
    send: float = 10.0  # seconds after which a client that reads nothing is disconnected

    def fitted(self, context: int, places: int) -> Limits:
        """The limits adapted to a model's context (tokens) and to the scheduler's queue, which bounds the texts."""
        body = self.body or max(1 << 20, 64 * context)
        return replace(self, body=body, texts=min(self.texts, places))


@dataclass
class Service:
    """A model with its scheduler and limits; turns requests into jobs."""

    llm: LLM
    scheduler: Scheduler
    name: str
    limits: Limits = field(default_factory=Limits)

    @property
    def exact(self) -> str:
        """How far texts are independent of load, batch and drafter: "bits" or "rounding"."""
        return self.llm.target.exact

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that texts depend on: if it is the same, so is the text of a seed."""
        target = self.llm.target
        about = (
            __version__, self.scheduler.engine.rule, target.vocab, self.exact, target.arithmetic, target.kernels,
            target.signature, machine.threads(), machine.processor(),
        )  # fmt: skip
        return f"fp_{hashlib.sha256(repr(about).encode()).hexdigest()[:12]}"

    def name_of(self, token: int) -> str:
        """The text of a single token, for displayed trees."""
        if self.llm.tokenizer is None:
            return str(token)
        return self.llm.detokenizer.name(token).decode(errors="replace")

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.llm.tokenizer, self.llm.target.vocab, self.llm.eos)

    def check_model(self, model: str | None) -> None:
        if model is not None and model != self.name:
            raise Refusal(
                f"there is no model {model!r} here; this server has {self.name!r}", "model", 404, code="model_not_found"
            )

    def check(self, request: ChatRequest | CompletionRequest) -> None:
        """Check a request before anything is computed. Raises Refusal."""
        self.check_model(request.model)
        prompts: Any = request.prompt if isinstance(request, CompletionRequest) else ""
        texts = request.n * (len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1)
        if texts > self.limits.texts:
            raise Refusal(f"a request may have at most {self.limits.texts} texts, not {texts}", "n")

    def bound(self, request: ChatRequest | CompletionRequest) -> tuple[Caller | None, Guide | None]:
        """The tool caller and the compiled grammar of a request; None where it has none."""
        caller = None
        if isinstance(request, ChatRequest):
            caller = caller_of(request, getattr(self.llm.tokenizer, "chat_template", None))
        return caller, self.guide(request, caller)

    def chat(self, request: ChatRequest, channel: Channel, caller: Caller | None, guide: Guide | None) -> Call:
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools] if caller else None
        prompt = self.template(
            request.messages, request.add_generation_prompt and not request.continue_final_message,
            request.continue_final_message, tools, request.chat_template_kwargs,
        )  # fmt: skip
        if request.max_tokens is not None and request.max_completion_tokens is not None:
            raise Refusal("max_tokens and max_completion_tokens are the same; give one of them", "max_tokens")
        requested = request.max_completion_tokens or request.max_tokens
        if request.top_logprobs and not request.logprobs:
            raise Refusal("top_logprobs needs logprobs to be true", "top_logprobs")
        limit = requested or max(1, min(self.limits.output, self.llm.target.context - len(prompt)))
        self.check_context(prompt, limit, "messages")
        top = request.top_logprobs if request.logprobs else None
        return self.call(request, channel, [prompt], limit, top, "chatcmpl", [], guide, caller)

    def completion(
        self, request: CompletionRequest, channel: Channel, caller: Caller | None, guide: Guide | None
    ) -> Call:
        if request.echo and request.logprobs is not None and self.llm.target.separate:
            raise Refusal("prompts of encoder-decoder models have no logprobs; leave out echo or logprobs", "echo")
        if not request.max_tokens and not request.echo:
            raise Refusal("max_tokens: 0 generates nothing and is only for echo", "max_tokens")
        given: Any = request.prompt
        pieces = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        prompts = [self.fim_prompt(piece, request) if request.suffix else self.encode(piece) for piece in pieces]
        for prompt in prompts:
            self.check_context(prompt, request.max_tokens, "prompt")
        echoes = []
        if request.echo:
            texts = [piece if isinstance(piece, str) else self.llm.decode(piece) for piece in pieces]
            echoes = [text for text in texts for _ in range(request.n)]
        return self.call(request, channel, prompts, request.max_tokens, request.logprobs, "cmpl", echoes, guide)

    def call(
        self,
        request: ChatRequest | CompletionRequest,
        channel: Channel,
        prompts: Sequence[Sequence[int]],
        limit: int,
        top: int | None,
        prefix: str,
        echoes: list[str],
        first: Guide | None = None,
        caller: Caller | None = None,
    ) -> Call:
        name = request.request_id or f"{prefix}-{uuid4().hex}"
        sampling, stops, choice = self.sampling(request), self.stops(request, limit), self.choice(request.outrider)
        if request.min_tokens > limit:
            raise Refusal("min_tokens is larger than max_tokens; lower it or raise max_tokens", "min_tokens")
        pauses = not self.llm.target.separate  # its rows cannot resume (`Batch.read`)
        behind = (lambda: channel.behind) if pauses else (lambda: False)
        voices: list[Voice] = []
        prediction = self.predicted(request)
        for i, prompt in enumerate(prompts):
            seed = seed_of(name, i) if request.seed is None else request.seed
            scoring = Scoring(prompt, top) if echoes and top is not None else None
            for j in range(request.n):
                guide = first.fork() if first else None
                watch = Watch(top, request.min_tokens, tuple(sorted(stops.eos)), guide)
                used = top is not None or request.min_tokens or guide
                row = Request(prompt, seed + j, limit, sampling, stops.cutting(prompt), prediction=prediction)
                try:
                    check_prompt(row if limit else replace(row, max_new_tokens=1), self.llm.target)
                except InputError as error:
                    raise Refusal(str(error)) from None
                job = Job(
                    row, choice, channel.deliver(len(voices), len(prompt)), time.monotonic() + self.limits.seconds,
                    watch if used else None, bool(request.outrider and request.outrider.rounds),
                    request.cache_salt or "", scoring, behind,
                )  # fmt: skip
                voices.append(Voice(job, stops, stops.stream(prompt), Places(stops.open(prompt))))
        return Call(name, request, channel, voices, sum(map(len, prompts)), echoes, caller)

    def check_context(self, prompt: Sequence[int], limit: int, field: str) -> None:
        """Refuse a prompt, that of `field`, which does not fit beside so many new tokens."""
        context = self.llm.target.context
        if len(prompt) + limit > context:
            raise Refusal(
                f"the prompt has {len(prompt)} tokens and {limit} are requested, but the model's context is {context}; "
                "shorten the prompt or ask for fewer", "max_tokens" if len(prompt) < context else field,
                code="context_length_exceeded",
            )  # fmt: skip

    def sampling(self, request: Common) -> Sampling:
        try:
            bias = {int(token): value for token, value in request.logit_bias.items()}
        except ValueError:
            raise Refusal("logit_bias: its keys are token ids", "logit_bias") from None
        names = (
            "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        )  # fmt: skip
        fields = {name: getattr(request, name) for name in names}
        try:
            return Sampling(top_k=max(0, request.top_k), logit_bias=bias, **fields)
        except InputError as error:
            raise Refusal(str(error), str(error).partition(" ")[0]) from None

    @cached_property
    def infill(self) -> Infill:
        """How the model fills in the middle. Raises Refusal where it cannot."""
        try:
            return Infill.of(self.llm.tokenizer, self.name)
        except InputError as error:
            raise Refusal(str(error), "suffix") from None

    def fim_prompt(self, prefix: str | Sequence[int], request: CompletionRequest) -> list[int]:
        """The prompt for what is missing between a prompt and the request's suffix. Raises Refusal."""
        if not isinstance(prefix, str) or request.echo:
            wrong = "echo" if request.echo else "a prompt of token ids"
            raise Refusal(f"suffix does not work with {wrong}; leave one of them out", "suffix")
        for text, name in ((prefix, "prompt"), (request.suffix, "suffix")):
            self.check_length(text, name)
        return self.infill.prompt(prefix, request.suffix)

    def predicted(self, request: ChatRequest | CompletionRequest) -> list[int]:
        """Token ids of what a chat's answer is expected to contain."""
        text = request.prediction.text if isinstance(request, ChatRequest) else ""
        self.check_length(text, "prediction")
        try:
            return self.llm.predicted(text)
        except InputError as error:
            raise Refusal(str(error), "prediction") from None

    def stops(self, request: Common, limit: int) -> Stop:
        strings = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        if strings and self.llm.tokenizer is None:
            raise Refusal("stop strings need a tokenizer, and this model has none", "stop")
        vocab = self.llm.target.vocab
        if (last := max(request.stop_token_ids, default=0)) >= vocab:
            raise Refusal(f"the token {last} is outside the vocabulary of {vocab}", "stop_token_ids")
        ends = frozenset() if request.ignore_eos else self.llm.eos
        if isinstance(request, CompletionRequest) and request.suffix and not request.ignore_eos:
            ends |= self.infill.ends
        return self.llm.stops(ends | frozenset(request.stop_token_ids), strings, limit, request.min_tokens)

    def choice(self, ours: Ours | None) -> Choice:
        """The drafter: the default, the requested one, or none."""
        fleet = self.scheduler.fleet
        if ours is None:
            return Choice(fleet.default)
        if ours.drafter is not None and ours.drafter not in fleet.drafters:
            names = ", ".join(fleet.drafters) or "none"
            raise Refusal(f"there is no drafter {ours.drafter!r} here; choose one of {names}", "outrider.drafter")
        if not ours.speculate or ours.budget == 0:
            return Choice("")
        name = ours.drafter or fleet.default
        return Choice(name) if ours.budget is None else Choice(name, ours.budget + 1)

    def guide(self, request: Common, caller: Caller | None) -> Guide | None:
        """The grammar of a request, if any. A model that may call tools may do so in place of a formatted response,
        with any object as arguments if their schemas cannot be grammars."""
        calls = caller.calls() if caller else None
        try:
            return self.compiled(request, caller.grammar if caller else None, calls)
        except Refusal:
            if caller is None or calls is None:
                raise
            return self.compiled(request, caller.grammar, caller.calls(any_arguments=True))

    def compiled(self, request: Common, of_tools: str | None, calls: Calls | None) -> Guide | None:
        """The grammar of a request, of which a formatted response may be calls instead."""
        options = {
            "tools": of_tools,
            "response_format": self.grammars.of_format(request.response_format, calls),
            "structured_outputs": self.grammars.of_structure(request.structured_outputs),
        }
        grammars = [(grammar, name) for name, grammar in options.items() if grammar is not None]
        if len(grammars) > 1:
            raise Refusal("response_format, structured_outputs and a forced tool exclude one another")
        if grammars and request.ignore_eos:
            raise Refusal("ignore_eos does not work with a grammar; leave it out", "ignore_eos")
        if grammars and request.min_tokens:
            raise Refusal("min_tokens does not work with a grammar; leave it out", "min_tokens")
        named = request.structured_outputs is not None and request.structured_outputs.grammar is not None
        return self.grammars.guide(*grammars[0], named) if grammars else None

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            self.check_length(prompt, "prompt")
        try:
            return self.llm.encode(prompt)
        except InputError as error:
            raise Refusal(str(error), "prompt") from None

    @cached_property
    def longest(self) -> int:
        """Length in characters of the tokenizer's longest token."""
        return max(map(len, self.llm.tokenizer.get_vocab()))

    def check_length(self, text: str, field: str) -> None:
        """Raise Refusal for a text that is too long for the context, tokenising at most about twice the tokens of the
        context."""
        tokenizer, context = self.llm.tokenizer, self.llm.target.context
        if tokenizer is None:
            return
        part, tokens = PROBE * context, 0
        while part < len(text) <= self.longest * context and tokens <= context + SLACK:
            tokens = len(tokenizer(text[:part], add_special_tokens=False)["input_ids"])
            part *= 2
        if len(text) > self.longest * context or tokens > context + SLACK:
            raise Refusal(
                f"the text has {len(text)} characters, more than the model's context of {context} tokens can hold; "
                "shorten it", field, code="context_length_exceeded",
            )  # fmt: skip

    def template(
        self,
        messages: Sequence[Message],
        generate: bool = True,
        going_on: bool = False,
        tools: list[dict[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Messages rendered by the model's chat template."""
        tokenizer = self.llm.tokenizer
        if not has_template(tokenizer):
            raise Refusal(f"{self.name} has no chat template; use /v1/completions", "messages")
        own = {"chat_template", *inspect.signature(tokenizer.apply_chat_template).parameters}
        if taken := own & set(kwargs or {}):
            raise Refusal(f"chat_template_kwargs: {min(taken)} is not for the template", "chat_template_kwargs")
        try:
            text = tokenizer.apply_chat_template(
                [plain(message) for message in messages], tools=tools, add_generation_prompt=generate,
                continue_final_message=going_on, tokenize=False, **(kwargs or {}),
            )  # fmt: skip
            self.check_length(text, "messages")
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])
        except Refusal:
            raise
        except Exception as error:  # a template may raise anything
            raise Refusal(f"the model's chat template refuses these messages: {error}", "messages") from None


def seed_of(name: str, prompt: int) -> int:
    """The default seed of a request's prompt, from the request's id and the prompt's index."""
    text = f"{name} {prompt}" if prompt else name
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def plain(message: Message) -> dict[str, Any]:
    """A message in the form that templates expect, with its parts as one text."""
    fields = message.model_dump(exclude_none=True)
    if fields["role"] == "developer":
        fields["role"] = "system"
    content = fields.get("content")
    if isinstance(content, list):
        for part in content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise Refusal(f"content of type {part.get('type')!r} is not supported; give text", "messages")
        content = "".join(part["text"] for part in content)
    fields["content"] = content if content is not None else ""
    if isinstance(calls := fields.get("tool_calls"), list):
        fields["tool_calls"] = [with_arguments(call) for call in calls]
    return fields


def with_arguments(call: Any) -> Any:
    """A tool call of an earlier turn with its arguments as an object: clients send them as JSON in a string, which
    templates that write JSON would quote again."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    assert isinstance(function, dict)
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
    except (ValueError, RecursionError):
        raise Refusal("the arguments of a tool call are not JSON", "messages") from None
