"""A service's start: what it does not import, and the garbage collector afterwards."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import subprocess
import sys

import pytest

from turboserve import program_start
from turboserve.service import EXIT_SETTINGS


@pytest.mark.parametrize(("url", "imported"), [("nats://127.0.0.1:4222", False), ("wss://127.0.0.1", True)])
def test_aiohttp_is_imported_only_for_the_transport_that_uses_it(url: str, imported: bool) -> None:
    if imported and importlib.util.find_spec("aiohttp") is None:
        pytest.skip("aiohttp is not installed")
    refused = {"TURBOSERVE_NATS_URL": url, "TURBOSERVE_HEALTH_PORT": "none"}
    ended = subprocess.run(
        [sys.executable, "-v", "-m", "turboserve.scheduler"],
        env={**os.environ, **refused},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == EXIT_SETTINGS, ended.stderr[-2000:]
    assert "import 'nats.aio.transport'" in ended.stderr
    assert ("import 'aiohttp'" in ended.stderr) is imported


def test_garbage_is_collected_after_the_start_and_never_off_elsewhere() -> None:
    importlib.reload(importlib.import_module("turboserve.program_start"))
    assert gc.isenabled()
    gc.disable()
    frozen = gc.get_freeze_count()
    try:
        program_start.finish()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.enable()


def test_full_collections_can_be_rare() -> None:
    before = gc.get_threshold()
    try:
        program_start.collect_rarely()
        assert gc.get_threshold() == (*before[:2], program_start.RARELY)
        assert before[2] * 10 <= program_start.RARELY
    finally:
        gc.set_threshold(*before)
