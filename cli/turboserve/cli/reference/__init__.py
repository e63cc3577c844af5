"""`turboserve reference`: tables, API documents and schema sets of the documentation, from the code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from turboserve.cli import settings
from turboserve.cli.reference import api_documents, events, operations, schemas, subjects
from turboserve.cli.tables import Table


def _metrics() -> Table:
    # Imports OpenTelemetry's SDK, which no other command of this module needs.
    from turboserve.cli.reference.metrics import metrics_table

    return metrics_table()


def _attributes() -> Table:
    from turboserve.cli.reference.metrics import attributes_table

    return attributes_table()


TABLES: dict[str, Callable[[], Table]] = {
    "attributes": _attributes,
    "events": events.table,
    "metrics": _metrics,
    "operations": operations.table,
    "settings": settings.table,
    "subjects": subjects.table,
}
"""Name of a table → what makes it from the code."""


def markers(table: str) -> tuple[str, str]:
    """Return the lines that enclose `table` in a document."""
    return f"<!-- begin: turboserve reference {table} -->", f"<!-- end: turboserve reference {table} -->"


def _places(text: str) -> dict[str, slice]:
    """Return where the tables of a document are, between their markers, in the order of the document.

    Raises ValueError for a table that does not begin and end once.
    """
    found = {}
    for table in TABLES:
        begin, end = markers(table)
        if begin in text:
            if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
                raise ValueError(f"the table {table} needs one line {begin!r} and one {end!r} after it")
            found[table] = slice(text.index(begin) + len(begin), text.index(end))
    return dict(sorted(found.items(), key=lambda item: item[1].start))


def tables_in(text: str) -> dict[str, str]:
    """Return the tables in a document: name → Markdown. Raises ValueError as `_places`."""
    return {table: text[place].strip() for table, place in _places(text).items()}


def updated(text: str) -> str:
    """Return the document with all tables regenerated from the code. Raises ValueError as `_places`."""
    # From the end on, so that the places before stay valid.
    for table, place in reversed(_places(text).items()):
        text = f"{text[: place.start]}\n{TABLES[table]().markdown()}\n{text[place.stop :]}"
    return text


def reference(
    table: Annotated[str | None, typer.Argument(help=f"One of: {', '.join(TABLES)}.")] = None,
    update: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Rewrite the tables in all Markdown files below this folder and the API documents, and "
            "write a new schema set.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object for each line.")] = False,
) -> None:
    """Print a table of the reference documentation, or update all of them in place."""
    if update is not None:
        if table is not None:
            raise typer.BadParameter("--update takes no table: it updates all of them")
        if as_json:
            raise typer.BadParameter("--update prints no table: leave out --json")
        _update(update)
        return
    if table not in TABLES:
        raise typer.BadParameter(f"name one of: {', '.join(TABLES)}")
    made = TABLES[table]()
    typer.echo(json.dumps(made.records(), indent=2) if as_json else made.markdown())


def _update(folder: Path) -> None:
    found = 0
    for file in sorted(folder.rglob("*.md")):
        text = file.read_text()
        try:
            found += len(tables_in(text))
            new = updated(text)
        except ValueError as error:
            raise typer.BadParameter(f"{file}: {error}") from error
        if new != text:
            file.write_text(new)
            typer.echo(f"updated {file}")
    if not found:
        raise typer.BadParameter(f"no Markdown file below {folder} holds a table")
    for file in api_documents.update(folder):
        typer.echo(f"updated {file}")
    try:
        written = schemas.write_new(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if written is not None:
        typer.echo(f"wrote {written}")
