"""The actor that runs one worker process on a node of a Ray cluster.

Ray ships this module by value, so that a node needs the worker's packages and not the autoscaler's. So this
module may import only the standard library.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys

HEALTH_VARIABLE = "TURBOSERVE_HEALTH_PORT"
KILL_S = 5.0
PROBE_S = 1.0
PR_SET_PDEATHSIG = 1


class WorkerHost:
    """Runs one worker. The kernel kills the worker when the actor's process ends."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0

    async def start(
        self, command: list[str | None], environment: dict[str, str], inherited: list[str]
    ) -> str | None:
        """Start the worker, once; returns an error text, or None.

        A None in `command` stands for this node's Python. `inherited` names the variables of this node's
        environment that the worker gets (see `of_node`).
        """
        if self._process is not None:
            return None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        libc = ctypes.CDLL(None)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable if part is None else part for part in command),
                env={**of_node(inherited), **environment, HEALTH_VARIABLE: str(self._port)},
                stdin=asyncio.subprocess.DEVNULL,
                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            )
        except OSError as error:
            return f"{command[0] or sys.executable}: {error}"
        return None

    async def alive(self) -> bool:
        """Whether the worker was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def ready(self) -> bool:
        """Whether the worker answers /readyz with 200."""
        if not await self.alive():
            return False
        try:
            return await asyncio.wait_for(self._probe(), PROBE_S)
        except (OSError, TimeoutError):
            return False

    async def _probe(self) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(b"GET /readyz HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n\r\n")
            await writer.drain()
            return b" 200 " in await reader.readline()
        finally:
            writer.close()

    async def wait(self) -> int | None:
        """Wait until the worker has ended; returns its return code, or None if none was started."""
        return None if self._process is None else await self._process.wait()

    async def stop(self, grace_s: float) -> bool:
        """Ask the worker to end, and after `grace_s` force it; returns whether it has ended."""
        for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            if self._process is None or self._process.returncode is not None:
                return True
            self._process.send_signal(number)
            try:
                await asyncio.wait_for(self._process.wait(), limit_s)
            except TimeoutError:
                continue
        return self._process is None or self._process.returncode is not None


def of_node(names: list[str]) -> dict[str, str]:
    """Return the variables of this node's environment that match `names`. A final `*` matches any rest."""
    exact = {name for name in names if not name.endswith("*")}
    prefixes = tuple(name[:-1] for name in names if name.endswith("*"))
    return {
        name: value
        for name, value in os.environ.items()
        if name.upper() in exact or name.upper().startswith(prefixes)
    }
