"""What the services' logs contain."""

from __future__ import annotations

import subprocess
import sys

LIBRARIES = ("aioice.ice", "aiortc.rtcpeerconnection", "httpx", "nats.aio.client", "uvicorn.access")
WRITES = f"""
import logging
from turboserve import logs
from turboserve.config import Settings

logs.setup("gateway", Settings(log_level="INFO"))
for name in {LIBRARIES}:
    logging.getLogger(name).info("a request's step, %s", name)
    logging.getLogger(name).warning("a library's warning, %s", name)
logs.get("turboserve.gateway").info("an event")
"""


def test_libraries_write_warnings_only() -> None:
    """A WebRTC viewer's library writes dozens of lines with the viewer's address at INFO."""
    written = subprocess.run(
        [sys.executable, "-c", WRITES], capture_output=True, text=True, check=True
    ).stderr
    assert [name for name in LIBRARIES if f"a library's warning, {name}" in written] == [*LIBRARIES]
    assert "a request's step" not in written
    assert "an event" in written
