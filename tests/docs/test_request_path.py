"""The page of a session's path names the files of a recording: `python tools/main_path.py --write FILE`."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture/request-path.md").read_text()
RECORDED = {
    line.strip()
    for line in (ROOT / "tests/data/main_path.txt").read_text().splitlines()
    if line.startswith("  ")
}
HOP = re.compile(r"Note over [A-Z]: (\S+)")
SHARED = re.compile(r"`(shared/turboserve/[\w/]+\.py)`")


def as_named(file: str) -> str:
    """Return the name of a file on the page: files of a service begin with its package."""
    return file if file.startswith("shared/") else file.partition("/turboserve/")[2]


def test_recorded_files_exist() -> None:
    assert len(RECORDED) > 50
    assert [file for file in sorted(RECORDED) if not (ROOT / file).is_file()] == []


def test_the_diagram_names_only_recorded_files() -> None:
    files = {file for hop in HOP.findall(PAGE) for file in hop.split("<br/>")}
    assert len(files) > 50
    # The recording has calls of Python functions only.
    named = {file for file in files if file.endswith(".py")}
    assert named - {as_named(file) for file in RECORDED} == set()


def test_the_page_names_every_recorded_file() -> None:
    names = {*SHARED.findall(PAGE), *re.findall(r"[\w/]+\.py", PAGE)}
    assert {as_named(file) for file in RECORDED} - names == set()
