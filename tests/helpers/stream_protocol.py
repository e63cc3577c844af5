"""Checks messages of a session's stream against the checked-in AsyncAPI document."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "asyncapi.json"


@cache
def document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DOCUMENT.read_text())
    return loaded


def _kinds(operation: str) -> list[str]:
    listed = document()["operations"][operation]["messages"]
    return [reference["$ref"].rpartition("/")[2] for reference in listed]


@cache
def _validator(operation: str, kind: str) -> tuple[Draft202012Validator, frozenset[str]]:
    """Return the validator of a message's payload, and the names of its members."""
    whole = document()
    assert kind in _kinds(operation), f"{operation} has no message {kind}"
    reference = whole["components"]["messages"][kind]["payload"]["$ref"]
    members = whole["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    return Draft202012Validator({"$ref": reference, "components": whole["components"]}), frozenset(members)


def check_sent(message: dict[str, Any]) -> None:
    """Check a JSON message of the gateway: the document has its type and all its members."""
    valid, members = _validator("sendToViewer", message["type"])
    valid.validate(message)
    assert set(message) <= members, message


def client_examples() -> dict[str, dict[str, Any]]:
    """Return the example of each message that the gateway takes, by type."""
    messages = document()["components"]["messages"]
    return {kind: messages[kind]["examples"][0]["payload"] for kind in _kinds("receiveFromViewer")}
