"""The AsyncAPI document of the WebSocket, from the models of its messages."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from turboserve.contracts.public_events import SCHEMAS
from turboserve.gateway.openapi import example
from turboserve.gateway.stream import protocol
from turboserve.gateway.stream.client_messages import CLIENT_MESSAGES

_REF = "#/components/schemas/{model}"
_CHANNEL = {"$ref": "#/channels/stream"}
_SEGMENTS = {
    "initSegment": "An fMP4 init segment. It follows `init`, with nothing in between.",
    "fragment": "A closed fMP4 fragment that starts with a key frame. It follows `chunk`, with nothing in "
    "between.",
}
_QUERY = {
    "after": {
        "type": "integer",
        "minimum": -1,
        "description": "Begin right after this chunk. Without it: at the chunk that contains the playhead.",
        "examples": [41],
    },
    "events_after": {
        "type": "integer",
        "minimum": 0,
        "description": "Begin with the event after this `sequence`. Without it: new events only.",
        "examples": [4],
    },
    "ticket": {
        "type": "string",
        "description": "A ticket for the session, for clients that cannot set the header Authorization.",
        "examples": ["tst_…"],
    },
}


def server_messages() -> dict[str, type[BaseModel]]:
    """Return the JSON messages that the gateway sends, by `type`."""
    models: list[type[BaseModel]] = [*protocol.SERVER_MESSAGES, *SCHEMAS.values()]
    return {_type(model): model for model in models}


def client_messages() -> dict[str, type[BaseModel]]:
    """Return the messages that the gateway takes, by `type`."""
    return {_type(model): model for model in CLIENT_MESSAGES}


def document() -> dict[str, Any]:
    """Return the AsyncAPI 3 document. `send` is what the gateway sends."""
    sent, taken = server_messages(), client_messages()
    schemas = _schemas(sent.values(), "serialization")
    for schema in schemas.values():
        _without_null(schema)
    schemas |= _schemas(taken.values(), "validation")
    messages: dict[str, Any] = {
        kind: _message(kind, model, schemas) for kind, model in (sent | taken).items()
    }
    for name, meaning in _SEGMENTS.items():
        payload = {"type": "string", "format": "binary", "description": meaning}
        messages[name] = {"name": name, "title": name, "summary": meaning, "contentType": "video/mp4"}
        messages[name]["payload"] = payload
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "TurboServe stream",
            "version": f"{protocol.VERSION}.0.0",
            "description": "Live video and events of a session over a WebSocket. Text messages are JSON "
            "objects with a `type`, and omit members that would be null. Binary messages are video.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "gateway": {
                "host": "localhost:8080",
                "protocol": "ws",
                "description": "A gateway on this machine.",
            }
        },
        "channels": {
            "stream": {
                "address": "/v1/sessions/{session}/stream",
                "title": "Stream of a session",
                "description": "Opened with a handshake that may have a query. The gateway speaks first.",
                "parameters": {"session": {"description": "Id of the session.", "examples": ["ses_5f3a9c"]}},
                "messages": {kind: {"$ref": f"#/components/messages/{kind}"} for kind in messages},
                "bindings": {
                    "ws": {
                        "method": "GET",
                        "query": {"type": "object", "properties": _QUERY},
                        "bindingVersion": "0.1.0",
                    }
                },
            }
        },
        "operations": {
            "sendToViewer": _operation("send", "What the gateway sends.", [*sent, *_SEGMENTS]),
            "receiveFromViewer": _operation("receive", "What the gateway takes.", list(taken)),
        },
        "components": {"messages": messages, "schemas": dict(sorted(schemas.items()))},
    }


def _type(model: type[BaseModel]) -> str:
    [kind] = model.model_fields["type"].annotation.__args__  # type: ignore[union-attr]
    return str(kind)


def _schemas(models: Any, mode: JsonSchemaMode) -> dict[str, Any]:
    _, found = models_json_schema([(model, mode) for model in models], ref_template=_REF)
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def _without_null(schema: dict[str, Any]) -> None:
    """Describe an object whose members are omitted instead of null, and all others always present."""
    required = []
    for name, member in schema.get("properties", {}).items():
        choices = member.get("anyOf", ())
        if "default" in member and member["default"] is None and not choices:
            # Any JSON, also null.
            member.pop("default")
            continue
        if {"type": "null"} not in choices:
            required.append(name)
            continue
        kept = [choice for choice in choices if choice != {"type": "null"}]
        member.pop("default", None)
        del member["anyOf"]
        member |= kept[0] if len(kept) == 1 else {"anyOf": kept}
    if required:
        schema["required"] = required


def _message(kind: str, model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    schema = schemas[model.__name__]
    return {
        "name": kind,
        "title": kind,
        "summary": schema["description"],
        "payload": {"$ref": _REF.format(model=model.__name__)},
        "examples": [{"name": kind, "payload": example(schema, schemas)}],
    }


def _operation(action: str, summary: str, kinds: list[str]) -> dict[str, Any]:
    return {
        "action": action,
        "channel": _CHANNEL,
        "summary": summary,
        "messages": [{"$ref": f"#/channels/stream/messages/{kind}"} for kind in kinds],
    }
