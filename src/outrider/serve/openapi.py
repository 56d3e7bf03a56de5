"""The OpenAPI document, made from the models that parse requests."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic.json_schema import models_json_schema

from .. import __version__
from .protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

POSTS: dict[str, tuple[Any, str]] = {
    "/v1/chat/completions": (ChatRequest, "A chat completion."),
    "/v1/completions": (CompletionRequest, "A completion of a prompt."),
    "/tokenize": (TokenizeRequest, "The tokens of a prompt or of messages."),
    "/detokenize": (DetokenizeRequest, "The text of tokens."),
}
GETS = {
    "/v1/models": "The model and its drafters.",
    "/v1/models/{model}": "One model.",
    "/health": "Whether the engine is running.",
    "/ready": "Whether requests are accepted.",
    "/metrics": "Prometheus metrics.",
    "/version": "Outrider's version.",
    "/load": "Rows running and waiting.",
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The OpenAPI document, from the models of requests."""
    kinds = [(kind, "validation") for kind, _ in POSTS.values()]
    _, schemas = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    refused = {"description": "Refused; the error says why.", "content": {"application/json": {"schema": ERROR}}}
    paths: dict[str, Any] = {path: {"get": {"summary": what, "responses": done(path)}} for path, what in GETS.items()}
    named = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [named]
    paths["/v1/models/{model}"]["get"]["responses"]["404"] = refused
    for path, (kind, what) in POSTS.items():
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        paths[path] = {
            "post": {
                "summary": what,
                "requestBody": {"required": True, "content": body},
                "responses": {
                    **done(path), **dict.fromkeys(("400", "401", "404", "408", "413", "415", "429", "503"), refused),
                },
            }
        }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def done(path: str) -> dict[str, Any]:
    """The responses of a request that is served."""
    content: dict[str, Any] = {"text/plain": {}} if path == "/metrics" else {"application/json": {}}
    if path.endswith("completions"):
        content["text/event-stream"] = {}
    made: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    if path in ("/health", "/ready"):
        made["503"] = {"description": "No.", "content": {"application/json": {}}}
    return made
