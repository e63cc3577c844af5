"""Free loopback ports, chosen once and stored, so that a restarted process has the same port again."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from turboserve.cli.embedded.layout import read_json, write_private_json
from turboserve.free_ports import LOWEST, any_free, is_free

HOST = "127.0.0.1"
LOCK_FILE = "up.lock"
"""File beside that of the ports, which the process that runs the stack locks."""


class PortTakenError(Exception):
    """Another program listens on the requested port. Choose another port."""

    def __init__(self, port: int) -> None:
        super().__init__(
            f"port {port} on {HOST} is in use: stop the process that listens there, or choose another port"
        )
        self.port = port


def next_free(port: int, attempts: int = 100) -> int:
    """Return `port` or the next free one. Raises PortTakenError if none of `attempts` ports is free."""
    for candidate in range(port, min(port + attempts, 65_536)):
        if is_free(candidate):
            return candidate
    raise PortTakenError(port)


class Ports:
    """The ports of one stack by name, stored in a file.

    While another process runs the stack, its ports are in use, so they are returned as they are, and the file
    is only read.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, file.with_name(LOCK_FILE)
        self._ports: dict[str, int] = {
            name: int(port) for name, port in read_json(file).items() if str(port).isdigit()
        }
        self._settled: set[str] = set()

    def get(self, name: str) -> int:
        """Return the stored port of `name`, or a new one if that is not free. Later calls return the same."""
        if name in self._settled:
            return self._ports[name]
        port = self._ports.get(name)
        if port is None or not (is_free(port) or self._stack_runs()):
            port = self._choose()
            self._ports[name] = port
            if not self._stack_runs():
                write_private_json(self._file, self._ports)
        self._settled.add(name)
        return port

    def _stack_runs(self) -> bool:
        """Whether another process runs the stack: it holds the lock of the folder, which names it."""
        try:
            with self._lock.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return file.read().strip() != str(os.getpid())
        except FileNotFoundError:
            pass
        return False

    def _choose(self) -> int:
        try:
            return any_free(HOST, self._ports.values())
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PortTakenError(LOWEST) from None
