"""The checked-in documents: OpenAPI for HTTP, AsyncAPI for the WebSocket, and the schema of trace files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turboserve.cli.reference import operations


def _asyncapi() -> dict[str, Any]:
    from turboserve.gateway.stream import asyncapi

    return asyncapi.document()


def _trace_files() -> dict[str, Any]:
    from turboserve.experiments.autoscale.trace import table_schema

    return table_schema()


DOCUMENTS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "reference/openapi.json": operations.openapi,
    "reference/asyncapi.json": _asyncapi,
    "reference/trace.schema.json": _trace_files,
}
"""File below the documentation → the document."""


def text_of(document: Mapping[str, Any]) -> str:
    """Return the text of a document's file."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def update(docs: Path) -> list[Path]:
    """Write the documents that differ from their files below the folder `docs`. Returns these files."""
    written = []
    for name, make in DOCUMENTS.items():
        file, text = docs / name, text_of(make())
        if not file.exists() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            written.append(file)
    return written
