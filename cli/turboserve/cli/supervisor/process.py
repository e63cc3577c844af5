"""One running process, started in its own session. Its output is read line by line."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

LONGEST_LINE = 64 * 1024


class Process:
    """A child of the supervisor. `on_line` gets its output and its children's until all have ended."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int],
        on_line: Callable[[str], None],
    ) -> None:
        read, write = os.pipe()
        try:
            # In its own session, so that only the supervisor gets Ctrl-C, and stops the processes in order.
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                env=dict(environment),
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        self.pid = self._popen.pid
        self._reader = LineReader(read, on_line)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal. None: the process runs."""
        return self._popen.poll()

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def close(self) -> None:
        self._reader.close()


class LineReader:
    """Reads a pipe in the event loop and splits the data into lines."""

    def __init__(self, descriptor: int, on_line: Callable[[str], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor: int | None = descriptor
        self._on_line = on_line
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._read)

    def close(self) -> None:
        """Read the data in the pipe, then close it."""
        if self._descriptor is not None:
            self._read()
        if self._descriptor is not None:
            self._end()

    def _read(self) -> None:
        assert self._descriptor is not None
        try:
            data = os.read(self._descriptor, 65_536)
        except BlockingIOError:
            return
        if not data:
            self._end()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._give(line)
        if len(self._rest) > LONGEST_LINE:
            self._give(self._rest)
            self._rest = b""

    def _end(self) -> None:
        if self._descriptor is None:
            return
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None
        if self._rest:
            self._give(self._rest)
            self._rest = b""

    def _give(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._on_line(text)
