"""`turboserve reference`: tables, API documents and schema sets of the documentation, from the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from turboserve.cli import settings
from turboserve.cli.reference import api_documents, events, operations, schemas, subjects


def _metrics() -> str:
    # Imports OpenTelemetry's SDK, which no other command of this module needs.
    from turboserve.cli.reference.metrics import metrics_table

    return metrics_table()


def _attributes() -> str:
    from turboserve.cli.reference.metrics import attributes_table

    return attributes_table()


TABLES: dict[str, Callable[[], str]] = {
    "attributes": _attributes,
    "events": events.markdown,
    "metrics": _metrics,
    "operations": operations.markdown,
    "settings": settings.markdown,
    "subjects": subjects.markdown,
}
"""Name of a table → its Markdown."""


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
        text = f"{text[: place.start]}\n{TABLES[table]()}\n{text[place.stop :]}"
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
) -> None:
    """Print a table of the reference documentation, or update all of them in place."""
    if update is not None:
        if table is not None:
            raise typer.BadParameter("--update takes no table: it updates all of them")
        _update(update)
        return
    if table not in TABLES:
        raise typer.BadParameter(f"name one of: {', '.join(TABLES)}")
    typer.echo(TABLES[table]())


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
