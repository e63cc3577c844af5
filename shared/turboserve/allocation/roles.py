"""How many workers denoise and how many decode.

NeuStream's measure (section 4.2): with k visits of a stage for each chunk, a worker that does nothing else
makes g = max b / (L(b) k) chunks a second. A stage on a workers makes a · g.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor


def chunks_per_s(latency_s: Mapping[int, float], visits: float = 1.0) -> float:
    """Return g: the most chunks a second of a worker that computes only this stage.

    `latency_s`: L(b), seconds by batch size. `visits`: how often a chunk visits the stage.
    """
    return max(size / (seconds * visits) for size, seconds in latency_s.items())


@dataclass(frozen=True)
class RoleCapacity:
    """What one worker of a role can carry."""

    chunks_per_s: float
    sessions: int
    """Sessions whose part of the state its memory holds."""

    def of(self, workers: int, chunk_s: float) -> int:
        """Sessions that so many workers carry in real time, where a chunk plays for `chunk_s` seconds."""
        # A rate that is exactly enough must not fail by rounding.
        return min(floor(workers * self.chunks_per_s * chunk_s + 1e-9), workers * self.sessions)


@dataclass(frozen=True)
class RoleSplit:
    """Workers by role, and the sessions that they carry."""

    denoise: int
    decode: int
    """0: every worker does both."""
    sessions: int


def in_turns(denoise_per_s: float, decode_per_s: float) -> float:
    """Return the chunks a second of a worker that denoises and decodes in turns."""
    return 1.0 / (1.0 / denoise_per_s + 1.0 / decode_per_s)


def best_split(
    workers: int, denoise: RoleCapacity, decode: RoleCapacity, both: RoleCapacity, chunk_s: float
) -> RoleSplit:
    """Return the split that carries the most sessions. Workers that do both win a tie, then fewer decoders.

    A chunk is denoised and decoded, so a split carries the fewer of what its two roles carry. In computing
    time alone, no split carries more than workers that do both in turns: min(a g, (n − a) h) ≤ n / (1/g +
    1/h). A split can carry more where memory is the limit.
    """
    found = [RoleSplit(workers, 0, both.of(workers, chunk_s))]
    for decoders in range(1, workers):
        carried = min(denoise.of(workers - decoders, chunk_s), decode.of(decoders, chunk_s))
        found.append(RoleSplit(workers - decoders, decoders, carried))
    return max(found, key=lambda split: (split.sessions, -split.decode))
