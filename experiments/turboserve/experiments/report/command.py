"""One HTML page from the JSON results of a folder: every figure and table beside the published numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from turboserve.bench.report import BenchError
from turboserve.experiments.report.page import Section, Source, page, sections

TITLE = "TurboServe: evaluation"


def run(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder with results of `bench paper` and `bench autoscale --only unseen`."),
    ],
    out: Annotated[Path | None, typer.Option(help="The page. None: report.html in the folder.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder that gets the results without their single runs.")
    ] = None,
) -> dict[str, Any]:
    """Write one page without scripts or network from the JSON files of a folder.

    Files that have no such results are named in `left_out`, and so are experiments whose report failed. Of
    two files with the same experiment, the one whose name comes last counts.
    """
    if not folder.is_dir():
        raise BenchError(f"DIR: {folder} is not a folder")
    sources: list[Source] = []
    left_out: list[str] = []
    for file in sorted(folder.glob("*.json")):
        try:
            value = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise BenchError(f"DIR: {file.name} cannot be read: {error}") from None
        if isinstance(value, dict) and (value.get("experiments") or value.get("unseen")):
            sources.append(Source(file.name, value))
            left_out += [
                f"{file.name}: {name}, {report['error']}"
                for name, report in value.get("experiments", {}).items()
                if "error" in report
            ]
        else:
            left_out.append(file.name)
    by_name: dict[str, Section] = {}
    try:
        for section in sections(sources):
            by_name[section.name] = section
    except (KeyError, TypeError, IndexError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise BenchError(f"DIR: results of another version: {detail}; run the experiments again") from error
    if not by_name:
        raise BenchError(f"DIR: {folder} has no results; see `turboserve bench paper --json FILE`")
    if data is not None:
        _keep(sources, data)
    target = out or folder / "report.html"
    text = page(TITLE, list(by_name.values()))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return {
        "page": str(target),
        "bytes": len(text.encode()),
        "left_out": left_out,
        "experiments": {
            name: {"sentences": [result.sentence for result in section.results],
                   "verdicts": [result.verdict for result in section.results]}
            for name, section in by_name.items()
        },
    }  # fmt: skip


def _keep(sources: Sequence[Source], data: Path) -> None:
    """Write what the page is made from. Single runs (`cells`) are left out."""
    data.mkdir(parents=True, exist_ok=True)
    for source in sources:
        value = dict(source.value)
        if "experiments" in value:
            value["experiments"] = {
                name: {key: each for key, each in report.items() if key != "cells"}
                for name, report in value["experiments"].items()
            }
        (data / source.file).write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def table(result: Mapping[str, Any]) -> str:
    """Name the page, and say each result in a sentence."""
    lines = [f"{result['page']}: {result['bytes']:,} bytes"]
    lines += [f"left out: {name}" for name in result["left_out"]]
    for name, found in result["experiments"].items():
        lines += [f"{name}: {verdict}: {text}" for text, verdict in zip(found["sentences"], found["verdicts"],
                                                                        strict=True)]  # fmt: skip
    return "\n".join(lines)
