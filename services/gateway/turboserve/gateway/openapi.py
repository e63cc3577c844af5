"""The OpenAPI document: adds to FastAPI's what the gateway knows, and an example to each body and answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from turboserve.gateway.problems.schemas import Problem, problems

DESCRIPTION = (
    "Times are RFC 3339 in UTC. Names that end in `_s` are seconds. Unknown fields in a body are refused. "
    "Errors are RFC 9457 problems. The AsyncAPI document at `/asyncapi.json` describes the messages of the "
    "WebSocket `/v1/sessions/{session}/stream`."
)
TAGS = [
    {"name": "sessions", "description": "A session is one user's video: a prompt, a seed and a model."},
    {"name": "sharing", "description": "Links to one session, and tickets that open its streams."},
    {"name": "video", "description": "The video of a session, while it is generated."},
    {"name": "events", "description": "What happens to a session."},
    {"name": "webhooks", "description": "Where the events of a tenant's sessions are sent."},
    {"name": "recordings", "description": "Video of sessions that is kept."},
    {"name": "models", "description": "Models that sessions can use."},
    {"name": "workers", "description": "Processes that generate video."},
    {"name": "pools", "description": "Groups of workers that an autoscaler sizes."},
    {"name": "cost", "description": "GPU-seconds and money."},
    {"name": "keys", "description": "API keys in the database, for keys with the scope `admin`."},
    {"name": "audit", "description": "Who changed what, for keys with the scope `admin`."},
    {"name": "health", "description": "For supervisors, load balancers and Prometheus. They need no key."},
]
_PREFIX = "#/components/schemas/"
_FASTAPI_DESCRIPTION = "Successful Response"


def install(app: FastAPI, *, keys_needed: bool) -> None:
    """Make `app` describe its problems, its examples, and whether it requires keys."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(make(), keys_needed)
        return make()

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any], keys_needed: bool) -> None:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    problem = Problem.model_json_schema(ref_template=_PREFIX + "{model}")
    schemas |= problem.pop("$defs") | {"Problem": problem}
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for operations in document["paths"].values():
        for method, operation in operations.items():
            _true_responses(method, operation["responses"])
            _described(operation, schemas)
            if not keys_needed:
                operation.pop("security", None)


def _true_responses(method: str, responses: dict[str, Any]) -> None:
    # FastAPI declares a 422 in its own form for every path with a parameter. The gateway never sends it.
    if "application/json" in responses.get("422", {}).get("content", {}):
        del responses["422"]
    if method != "get":
        for status in (403, 413, 415):
            responses.setdefault(str(status), problems(status)[status])
    if "401" in responses:
        for status in (403, 429):
            responses.setdefault(str(status), problems(status)[status])


def _described(operation: dict[str, Any], schemas: Mapping[str, Any]) -> None:
    """Add an example to the JSON of the request and of each good answer, and a description to the answer."""
    answers = [answer for status, answer in operation["responses"].items() if status < "300"]
    for part in (operation.get("requestBody", {}), *answers):
        content = part.get("content", {}).get("application/json")
        if content is not None:
            content["example"] = example(content["schema"], schemas)
    for answer in answers:
        if answer["description"] == _FASTAPI_DESCRIPTION and "content" in answer:
            [content] = answer["content"].values()
            answer["description"] = _description(content["schema"], schemas)


def _description(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    name = schema.get("$ref", "").removeprefix(_PREFIX)
    text: str = schemas[name]["description"] if name else _FASTAPI_DESCRIPTION
    return text


def example(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
    """Return an example of a schema, made of those of its fields. `schemas` are those it may refer to.

    Raises LookupError for a schema without an example.
    """
    if "examples" in schema:
        return schema["examples"][0]
    if "$ref" in schema:
        return example(schemas[schema["$ref"].removeprefix(_PREFIX)], schemas)
    if "anyOf" in schema:
        return example(next(one for one in schema["anyOf"] if one != {"type": "null"}), schemas)
    if "const" in schema:
        return schema["const"]
    if schema.get("type") == "array":
        return [example(schema["items"], schemas)]
    if "properties" in schema:
        return {name: example(field, schemas) for name, field in schema["properties"].items()}
    raise LookupError(f"no example: {schema}")
