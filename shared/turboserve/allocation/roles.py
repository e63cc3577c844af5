"""How many workers denoise and how many decode.

NeuStream's measure (section 4.2): with k visits of a stage for each chunk, a worker that does nothing else
makes g = max b / (L(b) k) chunks a second. A stage on a workers makes a · g.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor


def neustream_chunks_per_s(latency_s: Mapping[int, float], slo_s: float, visits: float = 1.0) -> float:
    """Return g by NeuStream's own formula (1): max {b: L(b) ≤ SLO} / (SLO · k). 0.0: no batch ends in time.

    A batch counts as if it took the whole partial SLO. So g is too small by L(b) / SLO, and too large only
    where a smaller batch has the better rate. `slo_s`: partial SLO of one visit, seconds.
    """
    largest = max((size for size, seconds in latency_s.items() if seconds <= slo_s), default=0)
    return largest / (slo_s * visits)


def partial_slos(
    latency_s: Mapping[str, float], visits: Mapping[str, float], slo_s: float
) -> dict[str, float]:
    """Divide a chunk's end-to-end SLO into partial SLOs of each stage's visit, by the stages' own latencies.

    NeuStream divides "by inference time" (section 4.1). `latency_s`: L(1) of each stage, seconds. `visits`:
    of each stage for a chunk. The sum of visits × partial SLOs is `slo_s`.
    """
    whole_s = sum(latency_s[stage] * visits[stage] for stage in latency_s)
    return {stage: slo_s * seconds / whole_s for stage, seconds in latency_s.items()}


def neustream_split(workers: int, per_s: Mapping[str, float]) -> dict[str, int]:
    """Divide workers by NeuStream's Algorithm 2, with Δ = 1 and one device for each SPU.

    Each stage gets one worker; each further one goes to the stage with the least g. `per_s`: g of one worker
    of a stage, chunks a second. Its inverse proportion of latency and share, L(b, a) ∝ 1/a, makes g of a
    stage proportional to its workers. Raises ValueError for fewer workers than stages.
    """
    if workers < len(per_s):
        raise ValueError(f"workers: {workers} is less than one for each of {len(per_s)} stages")
    given = dict.fromkeys(per_s, 1)
    for _ in range(workers - len(per_s)):
        given[min(per_s, key=lambda stage: (given[stage] * per_s[stage], stage))] += 1
    return given


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
