"""The trace of one run, and the digest by which two runs are compared."""

from __future__ import annotations

import hashlib
from zlib import crc32

from turboserve.simulation.runtime.loop import VirtualLoop

_SUM = 2**64 - 1


class EventTrace:
    """What took place, line by line, and the results: what left a process, with its time and contents."""

    def __init__(self, loop: VirtualLoop, keep_lines: bool = False) -> None:
        self.lines: list[str] | None = [] if keep_lines else None
        self._loop = loop
        self._digest = hashlib.blake2b(digest_size=16)
        self._results = 0
        """Sum of the hashes of all results: those of one time have no order among them."""

    @property
    def digest(self) -> str:
        """Digest of all lines and results so far.

        It also covers the number of callbacks that have run, unless the loop has a fixed order: then a run
        with fewer callbacks may have the same results.
        """
        digest = self._digest.copy()
        callbacks = 0 if self._loop.fixed_order else self._loop.callbacks
        digest.update(f"{self._results} {callbacks}".encode())
        return digest.hexdigest()

    def note(self, *what: object) -> None:
        """Write one line."""
        line = str(what[0]) if len(what) == 1 else " ".join(map(str, what))
        now = self._loop.time()
        self._digest.update(f"{now:.6f} {line}\n".encode())
        if self.lines is not None:
            self.lines.append(f"{now:9.3f}  {line}")

    def result(self, name: str, contents: bytes, number: int = 0) -> None:
        """Add a result: a message, a chunk of the log, or one that a viewer gets."""
        # Hashes of numbers are the same in each process, unlike those of texts.
        key = self._loop._now, crc32(contents, crc32(name.encode())), number
        self._results = (self._results + hash(key)) & _SUM
