"""The table of HTTP operations, from the gateway's OpenAPI."""

from __future__ import annotations

from typing import Any

from turboserve.cli.tables import Cell, Code, Table

_METHODS = ("get", "post", "put", "patch", "delete")


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of a gateway with default settings. The gateway is not started."""
    from turboserve.gateway.app import create_app, create_gateway
    from turboserve.gateway.settings import Settings

    defaults = Settings.model_construct()
    # Neither bus nor clock is used before the application serves.
    gateway = create_gateway(defaults, object(), object(), dict)  # type: ignore[arg-type]
    return create_app(gateway).openapi()


def table() -> Table:
    """Return the table of the documentation."""
    found: list[tuple[Cell, ...]] = []
    for path, operations in openapi()["paths"].items():
        for method in _METHODS:
            if (operation := operations.get(method)) is None:
                continue
            parameters = operation.get("parameters", [])
            query = tuple(each["name"] for each in parameters if each["in"] == "query")
            answers = sorted(operation["responses"])
            good = ", ".join(status for status in answers if status < "300")
            bad = ", ".join(status for status in answers if status >= "300")
            found.append((Code(f"{method.upper()} {path}"), operation["summary"], query, good, bad))
    return Table.of(("operation", "what it does", "query", "answers", "problems"), found)
