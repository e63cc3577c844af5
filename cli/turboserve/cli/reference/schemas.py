"""The schema set: every message on the bus as JSON Schema, by subject. Each version is a checked-in file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic.json_schema import models_json_schema

from turboserve import subjects
from turboserve.contracts.base import ID_PATTERN, NOTE_LIMIT, NUMBER_LIMIT, TEXT_LIMIT, Contract
from turboserve.contracts.canaries import Canary
from turboserve.contracts.chunks import ChunkHeader, Ownership
from turboserve.contracts.errors import ErrorBody
from turboserve.contracts.events import SessionEvent, WorkerEvent
from turboserve.contracts.versions import SCHEMA_VERSION, SchemaVersion
from turboserve.subject_types import Log

FOLDER = Path("reference/schemas")
"""Folder of the checked-in sets, below the documentation."""
ERROR = "error"
"""Name, among the messages of a set, of the body of every refusal."""

SchemaSet = Mapping[str, Any]
"""A set: `version`, `limits`, `messages` (subject → kind of message → names of contracts), and `$defs`."""

LOGGED: dict[Log, tuple[type[Contract], ...]] = {
    subjects.OWN: (Ownership,),
    subjects.CHUNK: (ChunkHeader,),
    subjects.EVENT: get_args(SessionEvent),
    subjects.WORKER_EVENT: get_args(WorkerEvent),
    subjects.CANARY_CHUNKS: (Canary,),
    subjects.CANARY_EVENTS: (Canary,),
}
"""The messages of each log."""
_PROSE = frozenset({"title", "description", "examples"})
"""Members of a schema that do not affect what it accepts."""


def messages() -> dict[str, dict[str, tuple[type[Contract], ...]]]:
    """Return all messages on the bus: subject → `request`, `answer`, `message` or `entry` → contracts."""
    found: dict[str, dict[str, tuple[type[Contract], ...]]] = {ERROR: {"answer": (ErrorBody,)}}
    for endpoint in subjects.ENDPOINTS:
        found[endpoint.subject] = {"request": (endpoint.request,), "answer": (endpoint.response,)}
    for topic in subjects.TOPICS:
        found[topic.pattern] = {"message": (topic.message,)}
    for log in subjects.LOGS:
        found[log.pattern] = {"entry": LOGGED[log]}
    return found


def schema_set() -> SchemaSet:
    """Return the schema set of this code."""
    found = messages()
    kinds = {kind for subject in found.values() for listed in subject.values() for kind in listed}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    _, schemas = models_json_schema([(kind, "validation") for kind in ordered])
    names = {
        subject: {part: sorted(kind.__name__ for kind in listed) for part, listed in parts.items()}
        for subject, parts in found.items()
    }
    limits = {"id": ID_PATTERN, "note": NOTE_LIMIT, "number": NUMBER_LIMIT, "text": TEXT_LIMIT}
    # Validators in Python enforce these limits, so no schema shows them.
    return {
        "version": str(SCHEMA_VERSION),
        "limits": limits,
        "messages": dict(sorted(names.items())),
        "$defs": {name: _without_prose(schema) for name, schema in sorted(schemas["$defs"].items())},
    }


def _without_prose(schema: Any, *, fields: bool = False) -> Any:
    """Return a schema without `_PROSE`. `fields`: `schema` maps names of fields to schemas."""
    if isinstance(schema, dict):
        return {
            name: _without_prose(value, fields=name == "properties" and not fields)
            for name, value in schema.items()
            if fields or name not in _PROSE
        }
    if isinstance(schema, list):
        return [_without_prose(value) for value in schema]
    return schema


def text_of(schemas: SchemaSet) -> str:
    """Return the text of a set's file."""
    return json.dumps(schemas, indent=1, ensure_ascii=False) + "\n"


def file_of(version: SchemaVersion, docs: Path) -> Path:
    """Return the file of a version's set below the folder `docs`."""
    return docs / FOLDER / f"{version}.json"


def checked_in(docs: Path) -> dict[SchemaVersion, SchemaSet]:
    """Return all sets below the folder `docs`, oldest first."""
    found = {}
    for file in (docs / FOLDER).glob("*.json"):
        version = SchemaVersion.parse(file.stem)
        if version is None:
            raise ValueError(f"{file}: the name is not MAJOR.MINOR.json")
        found[version] = json.loads(file.read_text())
    return dict(sorted(found.items()))


def write_new(docs: Path) -> Path | None:
    """Write the set of this code, if its version has no file yet. Returns the new file.

    Raises ValueError if the version's file has another set: released sets do not change.
    """
    file = file_of(SCHEMA_VERSION, docs)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text_of(schema_set()))
        return file
    if json.loads(file.read_text()) != schema_set():
        raise ValueError(
            f"the messages differ from {file}. Raise SCHEMA_VERSION in "
            "shared/turboserve/contracts/versions.py, and run the command again. Only if no release contains "
            f"schema version {SCHEMA_VERSION}: delete the file instead"
        )
    return None
