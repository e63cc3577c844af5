"""The command starts itself again with huge pages, once, and only where that is of use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from turboserve.simulation import huge_pages
from turboserve.simulation.huge_pages import VARIABLES, environment_of

PROGRAM, LIBC, SWITCH = "/opt/bin/turboserve", "glibc 2.36", "always [madvise] never"


def test_the_command_starts_again_once() -> None:
    again = environment_of({"HOME": "/root"}, PROGRAM, LIBC, SWITCH)
    assert again == {"HOME": "/root", **VARIABLES}
    assert environment_of(again, PROGRAM, LIBC, SWITCH) is None


@pytest.mark.parametrize(
    ("environment", "program", "libc", "switch"),
    [
        ({"PYTHONMALLOC": "pymalloc"}, PROGRAM, LIBC, SWITCH),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}, PROGRAM, LIBC, SWITCH),
        ({}, "/opt/bin/pytest", LIBC, SWITCH),
        ({}, PROGRAM, "glibc 2.31", SWITCH),
        ({}, PROGRAM, "", SWITCH),
        ({}, PROGRAM, LIBC, "always madvise [never]"),
    ],
)
def test_it_continues_where_that_is_of_no_use(
    environment: dict[str, str], program: str, libc: str, switch: str
) -> None:
    assert environment_of(environment, program, libc, switch) is None


def test_a_process_keeps_its_arguments(tmp_path: Path) -> None:
    switch = tmp_path / "enabled"
    switch.write_text(SWITCH)
    code = (
        "import os, sys; from turboserve.simulation import huge_pages as h;"
        "h._libc = lambda: 'glibc 2.36'; h.SWITCH = h.Path(sys.argv[1]); argument = sys.argv[1];"
        "sys.argv[0] = 'turboserve'; h.use_huge_pages();"
        "print(os.environ['PYTHONMALLOC'], argument)"
    )
    plain = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    ran = subprocess.run(
        [sys.executable, "-c", code, str(switch)], env=plain, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["malloc", str(switch)]


def test_only_processes_that_start_within_the_block_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = tmp_path / "enabled"
    switch.write_text(SWITCH)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huge_pages, "SWITCH", switch)
    monkeypatch.setattr(huge_pages, "_libc", lambda: LIBC)
    with huge_pages.huge_pages_for_children():
        assert not VARIABLES.keys() & os.environ.keys(), "pytest is not the command"
    monkeypatch.setattr(sys, "argv", [PROGRAM])
    with huge_pages.huge_pages_for_children():
        assert VARIABLES.items() <= os.environ.items()
    assert not VARIABLES.keys() & os.environ.keys()
