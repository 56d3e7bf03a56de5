"""The endpoints: HTTP requests to rows of the scheduler, and their events to responses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from .. import __version__
from ..core.text import text_of
from ..encoding import has_template
from . import answers
from .call import Call, Channel
from .gate import Gate, closing
from .journal import Journal
from .metrics import Metrics
from .openapi import document
from .protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Refusal, TokenizeRequest, parse
from .scheduler import Closed, Full
from .service import Service
from .turns import Turns

log = logging.getLogger("outrider.serve")

STUCK = 120.0  # seconds without a turn of the engine's loop after which the server is not healthy
RESTRICTING = ("structured_outputs", "response_format", "tools", "tool_choice")  # fields that may lead to a grammar
PAGE = Path(str(files("outrider") / "serve" / "page"))


class Events(StreamingResponse):
    """Server-sent events of one call; when it ends for whatever reason, its rows are cancelled."""

    def __init__(self, service: Service, call: Call):
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(answers.chunks(service, call), media_type="text/event-stream", headers=headers)
        self.service, self.call = service, call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            # A client that reads nothing keeps its connection no longer than the time limit of its texts.
            with anyio.move_on_after(self.service.limits.seconds + 30):
                await super().__call__(scope, receive, send)
        finally:
            finish(self.service, self.call)


class Endpoints:
    """The handlers of all paths."""

    def __init__(self, service: Service):
        self.service = service
        most = service.scheduler.queue
        self.encoding = Turns("encoding", most)  # one thread tokenises: not all tokenizers are thread-safe
        self.compiling = Turns("compiling", most)  # grammars take longer, and prompts need not wait for them

    async def chat(self, request: Request) -> Response:
        return await self.write(request, ChatRequest, self.service.chat)

    async def completions(self, request: Request) -> Response:
        return await self.write(request, CompletionRequest, self.service.completion)

    async def write(self, request: Request, kind: Any, prepare: Callable[..., Call]) -> Response:
        """Encode, submit and respond, streaming or not."""
        service, scheduler = self.service, self.service.scheduler
        raw = await body_of(request)
        parsed = parse(raw, kind)
        service.check(parsed)
        call = await unless_gone(request, self.prepared(parsed, len(raw), prepare))
        try:
            scheduler.submit(call.jobs)
        except Closed as closed:
            scheduler.metrics.rejections("closed").inc()
            return refused(Refusal(str(closed), status=503), {"retry-after": "5"})
        request.scope["outrider.entry"].call = call
        if parsed.stream:
            return Events(service, call)
        try:
            return JSONResponse(await unless_gone(request, answers.complete(service, call)))
        finally:
            finish(service, call)

    async def prepared(self, parsed: Any, size: int, prepare: Callable[..., Call]) -> Call:
        """Compile the grammar and tokenise the prompt outside the event loop. size: bytes of the request."""
        bound: Any = None, None
        if any(getattr(parsed, name, None) for name in RESTRICTING):
            bound = await self.compiling.run(size, self.service.bound, parsed)
        return await self.encoding.run(size, prepare, parsed, Channel(self.service.scheduler.wake), *bound)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.model()]})

    async def one_model(self, request: Request) -> Response:
        self.service.check_model(request.path_params["model"])
        return JSONResponse(self.model())

    def model(self) -> dict[str, Any]:
        service, fleet = self.service, self.service.scheduler.fleet
        return {
            "id": service.name, "object": "model", "created": int(self.started), "owned_by": "outrider",
            "max_model_len": service.llm.target.context,
            "outrider": {
                "exact": service.exact,
                "precision": service.llm.target.arithmetic,
                "chat": has_template(service.llm.tokenizer),
                "drafters": [name for name in fleet.drafters if name not in fleet.failed],
                "failed_drafters": fleet.failed,
            },
        }  # fmt: skip

    started = time.time()

    async def health(self, request: Request) -> Response:
        """Healthy: the engine's loop is running."""
        scheduler = self.service.scheduler
        if scheduler.dead or scheduler.stuck(STUCK):
            reason = scheduler.dead or "the engine has not responded for two minutes"
            return JSONResponse({"status": "unhealthy", "reason": reason}, 503)
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Taking requests."""
        if self.service.scheduler.closing:
            return JSONResponse({"status": "draining"}, 503)
        return await self.health(request)

    async def metrics(self, request: Request) -> Response:
        page = self.service.scheduler.metrics.page()
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def load(self, request: Request) -> Response:
        scheduler = self.service.scheduler
        return JSONResponse({"running": scheduler.active, "waiting": len(scheduler.waiting), "rows": scheduler.rows})

    async def tokenize(self, request: Request) -> Response:
        raw = await body_of(request)
        parsed = parse(raw, TokenizeRequest)
        return JSONResponse(await unless_gone(request, self.encoding.run(len(raw), self.tokens, parsed)))

    def tokens(self, parsed: TokenizeRequest) -> dict[str, Any]:
        service = self.service
        service.check_model(parsed.model)
        if (parsed.prompt is None) == (parsed.messages is None):
            raise Refusal("give either a prompt or messages", "prompt")
        if parsed.messages is not None:
            tokens = service.template(parsed.messages, parsed.add_generation_prompt)
        elif service.llm.tokenizer is None:
            raise Refusal("this model has no tokenizer; send token ids to /v1/completions", "prompt")
        else:
            service.check_length(parsed.prompt or "", "prompt")
            given = service.llm.tokenizer(parsed.prompt, add_special_tokens=parsed.add_special_tokens)
            tokens = list(given["input_ids"])
        return {"count": len(tokens), "max_model_len": service.llm.target.context, "tokens": tokens}

    async def detokenize(self, request: Request) -> Response:
        raw = await body_of(request)
        parsed = parse(raw, DetokenizeRequest)
        self.service.check_model(parsed.model)
        return JSONResponse(
            {"prompt": await unless_gone(request, self.encoding.run(len(raw), self.text, parsed.tokens))}
        )

    def text(self, tokens: list[int]) -> str:
        llm = self.service.llm
        if len(tokens) > llm.target.context:
            raise Refusal(f"more tokens than the model's context of {llm.target.context}; send fewer", "tokens")
        if any(token >= llm.target.vocab for token in tokens):
            raise Refusal(f"a token is outside the vocabulary of {llm.target.vocab}", "tokens")
        if llm.tokenizer is None:
            raise Refusal("this model has no tokenizer", "tokens")
        return text_of(llm.detokenizer.open(special=True), tokens)

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(document())

    async def page(self, request: Request) -> Response:
        policy = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html", headers=headers)


async def body_of(request: Request) -> bytes:
    """A request's body, which is freed before the response is complete."""
    return b"".join([part async for part in request.stream()])


def finish(service: Service, call: Call) -> None:
    """After the response or a disconnect: cancel what is still running."""
    service.scheduler.cancel([voice.job for voice in call.voices if voice.end is None])


async def unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of a task, which is cancelled if the client disconnects. Raises ClientDisconnect."""
    task = asyncio.ensure_future(work)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()


def refused(refusal: Refusal, headers: dict[str, str] | None = None) -> Response:
    """The response of a refusal."""
    return JSONResponse(refusal.body(), refusal.status, {**(headers or {}), **closing(refusal.status)})


async def on_refusal(request: Request, error: Exception) -> Response:
    """Handles refusals."""
    assert isinstance(error, Refusal)
    return refused(error)


async def on_full(metrics: Metrics, request: Request, error: Exception) -> Response:
    """Handles a full queue, of rows or of the tokenising thread."""
    assert isinstance(error, Full)
    metrics.rejections("queue_full").inc()
    busy = Refusal(str(error), status=429, kind="rate_limit_error", code="queue_full")
    return refused(busy, {"retry-after": str(error.seconds)})


async def on_http(request: Request, error: Exception) -> Response:
    """Handles Starlette's errors: no such path, no such method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return refused(Refusal(str(error.detail), status=error.status_code), headers)


async def on_gone(request: Request, error: Exception) -> Response:
    """Handles clients that have disconnected; nobody reads the response."""
    return Response(status_code=499)


async def on_error(request: Request, error: Exception) -> Response:
    """Handles everything else: 500, with the reason in the log."""
    log.error("a request failed", exc_info=error)
    return refused(Refusal("the server failed to answer; its log says why", status=500))


def application(service: Service, key: str = "", local: bool = True) -> Journal:
    """The ASGI application. key: may be empty. local: accept loopback Host names only."""
    ends = Endpoints(service)

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        if not service.scheduler.thread.is_alive():
            service.scheduler.thread.start()
        yield
        service.scheduler.abort()
        ends.encoding.close()
        ends.compiling.close()

    def post(path: str, function: Any) -> Route:
        return Route(path, function, methods=["POST"])

    app = Starlette(
        routes=[
            post("/v1/chat/completions", ends.chat),
            post("/v1/completions", ends.completions),
            Route("/v1/models", ends.models),
            Route("/v1/models/{model:path}", ends.one_model),
            Route("/health", ends.health),
            Route("/ready", ends.ready),
            Route("/metrics", ends.metrics),
            Route("/version", ends.version),
            Route("/load", ends.load),
            post("/tokenize", ends.tokenize),
            post("/detokenize", ends.detokenize),
            Route("/openapi.json", ends.openapi),
            Route("/", ends.page),
            Mount("/page", StaticFiles(directory=PAGE, check_dir=False)),
        ],
        exception_handlers={
            Refusal: on_refusal, Full: partial(on_full, service.scheduler.metrics), HTTPException: on_http,
            ClientDisconnect: on_gone, Exception: on_error,
        },
        lifespan=life,
    )  # fmt: skip
    return Journal(Gate(app, key, service.limits.body, local))
