"""How decode workers and text workers serve other workers: the address, and the end of the process."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable

from turboserve import logs
from turboserve.host_port import host_port
from turboserve.service import Runtime
from turboserve.worker.remote_decoding.role_server import DeviceHangsError, RoleServer
from turboserve.worker.settings import Settings
from turboserve.worker.transfer.interface import find_interface
from turboserve.worker.transfer.network import Serve, listen

HUNG_STATUS = 1
"""Exit status of a worker whose computation does not return."""

log = logs.get("decoding")
Listen = Callable[[Serve], Awaitable[tuple[str, Callable[[], None]]]]
"""Accepts connections. Returns the address, and what ends that. Raises `OSError`."""


async def run_until_it_hangs(served: RoleServer) -> None:
    """Serve until canceled. Raises the error of a failed device.

    A computation that hangs ends the process at once: its thread would keep an orderly end waiting.
    """
    try:
        await served.run()
    except DeviceHangsError as error:
        log.error("worker ends", error=str(error))
        logging.shutdown()
        os._exit(HUNG_STATUS)


def at_interface(settings: Settings) -> Listen:
    """Return what listens at the configured address. Raises `InterfaceError`."""
    host, port = find_interface(settings.transfer_host).address, settings.transfer_port

    async def listening(serve: Serve) -> tuple[str, Callable[[], None]]:
        listener, found = await listen(serve, host, port)
        return f"tcp://{host_port(host, found)}", listener.close

    return listening


async def serve_role(runtime: Runtime, served: RoleServer, listening: Listen, name: str) -> str:
    """Serve workers until the runtime stops, as the task `name`. Returns the address. Raises `OSError`."""
    address, end = await listening(served.serve)

    async def close() -> None:
        end()

    runtime.on_stop(close)
    runtime.spawn(run_until_it_hangs(served), name)
    return address
