"""What a process of paced workers is given."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Hosted:
    """The workers of one process."""

    nats_url: str
    identities: dict[str, str]
    """Broker identity of each worker, and its password."""
    slots: int
    """K: sessions of one worker."""
    chunk_bytes: int = 2_048
    """Bytes of each chunk's fragment, at least as many as its video needs."""
    state_bytes: int = 1 << 16
    """Bytes of each session's state."""

    def to_line(self) -> bytes:
        """Return the first line of the process's standard input."""
        return json.dumps(asdict(self)).encode() + b"\n"
