"""Where a forward's tokens go in a session's ring, and which tokens its attention reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Where one forward's tokens go: runs of (start in the slab, offset in the forward, count), in tokens."""

    runs: tuple[tuple[int, int, int], ...]
    visible: int
    """Tokens of the filled prefix of the slab. Attention reads all of them, unless `reads` names fewer."""
    reads: tuple[tuple[int, int], ...] = ()
    """Runs of (start in the slab, count), in tokens, that attention reads. Empty: the filled prefix."""
    sparsity: float = 0.0
    """See `fidelity.Fidelity.sparsity`."""


@dataclass(frozen=True, eq=False)
class LayerPlacement:
    """One layer's part of a placement, as views of the slab, created once for all of a chunk's forwards."""

    writes: tuple[tuple[Tensor, Tensor, int, int], ...]
    """Keys and values [count, heads, head_dim] to overwrite, offset in the forward, count."""
    kept: tuple[tuple[Tensor, int, int], ...]
    """Sink keys to keep as written, offset, count."""
    keys: tuple[Tensor, ...]
    """Keys that attention reads, run by run, [1, heads, tokens, head_dim] each."""
    values: tuple[Tensor, ...]
    """Values that attention reads, run by run, [1, heads, tokens, head_dim] each."""


def reduced_reads(
    frames: Sequence[int], visible: int, always_read: int, oldest: int, tokens: int
) -> tuple[tuple[int, int], ...]:
    """Runs of (start in the slab, count) of the sink and the newest frames, in tokens; empty: all.

    `frames`: frame at each filled ring position. `visible`: number of positions that attention could read.
    `always_read`: number of positions of the sink. `oldest`: oldest frame to read. `tokens`: tokens of a
    frame.

    Up to three runs: the sink, and the newest frames on both sides of the place where the ring closes.
    """
    runs: list[tuple[int, int]] = []
    for position in range(visible):
        if position >= always_read and frames[position] < oldest:
            continue
        start = position * tokens
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + tokens)
        else:
            runs.append((start, tokens))
    return () if runs == [(0, visible * tokens)] else tuple(runs)
