"""The trace of one run, and the digest by which two runs are compared."""

from __future__ import annotations

import hashlib

from turboserve.simulation.runtime.loop import VirtualLoop


class EventTrace:
    """What took place, line by line."""

    def __init__(self, loop: VirtualLoop, keep_lines: bool = False) -> None:
        self.lines: list[str] | None = [] if keep_lines else None
        self._loop = loop
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """Digest of all lines so far and of the number of callbacks that have run."""
        digest = self._digest.copy()
        digest.update(str(self._loop.callbacks).encode())
        return digest.hexdigest()

    def note(self, *what: object) -> None:
        """Write one line."""
        line = str(what[0]) if len(what) == 1 else " ".join(map(str, what))
        now = self._loop.time()
        self._digest.update(f"{now:.6f} {line}\n".encode())
        if self.lines is not None:
            self.lines.append(f"{now:9.3f}  {line}")
