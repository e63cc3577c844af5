"""`turboserve settings`: a table of all environment variables, from the settings classes."""

from __future__ import annotations

import importlib
import json
import types
import typing
from ipaddress import IPv4Network, IPv6Network
from typing import Annotated

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from turboserve.cli.tables import Code, Table
from turboserve.environment import settings_of

SOURCES = {
    "every service": ("turboserve.config", "Settings"),
    "gateway": ("turboserve.gateway.settings", "Settings"),
    "scheduler": ("turboserve.scheduler.settings", "SchedulerSettings"),
    "autoscaler": ("turboserve.autoscaler.settings", "AutoscalerSettings"),
    "worker": ("turboserve.worker.settings", "Settings"),
    "state-store": ("turboserve.state_store.settings", "Settings"),
    "recorder": ("turboserve.recorder.settings", "Settings"),
    "webhooks": ("turboserve.webhooks.settings", "Settings"),
}
"""Reader → module and class of its settings."""


def rows() -> list[tuple[str, str, str, str]]:
    """Return (variable, readers, default, meaning) of every setting. Shared settings come first, once."""
    found: dict[str, tuple[str, str, str, str]] = {}
    shared: set[str] = set()
    for reader, (module, name) in SOURCES.items():
        fields: dict[str, FieldInfo] = getattr(importlib.import_module(module), name).model_fields
        for field, info in fields.items():
            if field in shared:
                continue
            variable = f"TURBOSERVE_{field.upper()}"
            readers = f"{found[variable][1]}, {reader}" if variable in found else reader
            found[variable] = (variable, readers, _default(info), _meaning(info))
        if reader == "every service":
            shared = set(fields)
    return list(found.values())


def names(reader: str) -> frozenset[str]:
    """Return the variables that `reader`, a key of `SOURCES`, declares, shared ones included."""
    module, name = SOURCES[reader]
    return settings_of(getattr(importlib.import_module(module), name).model_fields)


def _default(info: FieldInfo) -> str:
    value = info.default
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is PydanticUndefined or value is None or value == "" or value == ():
        return "none"
    if isinstance(value, tuple):
        if isinstance(value[0], IPv4Network | IPv6Network):
            return ",".join(map(str, value))
        # A default command has this machine's path of the interpreter, which does not belong in a table.
        return " ".join("python" if "/" in str(part) else str(part) for part in value)
    return str(value)


def _meaning(info: FieldInfo) -> str:
    text = " ".join((info.description or "").split())
    choices = _choices(info.annotation)
    return " ".join(part for part in (text, f"One of: {', '.join(choices)}." if choices else "") if part)


def _choices(kind: object) -> list[str]:
    if typing.get_origin(kind) is typing.Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    if isinstance(kind, types.UnionType):
        return [choice for part in typing.get_args(kind) for choice in _choices(part)]
    return []


def table() -> Table:
    """Return the table of the documentation."""
    lines = [
        (Code(variable), reader, Code(default), meaning) for variable, reader, default, meaning in rows()
    ]
    return Table.of(("variable", "read by", "default", "meaning"), lines)


def settings(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object per variable.")] = False,
) -> None:
    """Print every environment variable that the services read, as a Markdown table or as JSON."""
    typer.echo(json.dumps(table().records(), indent=2) if as_json else table().markdown())
