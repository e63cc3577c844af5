"""Sequence parallelism: one session's forwards on one worker and on two, in turns within one run.

- `ratio`: median time of a forward on one worker over that on two. Above 1, two are faster.
- `bytes.home`, `bytes.donor`: what each end sends for a forward; `bytes.attentions`: the part of both around
  the attentions, by formula. `bytes.first_forward`: what the home sends for the first forward of a loan, at a
  full window.
- `largest_difference`: between the latents of both, over all chunks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from turboserve.bench.report import percentile

if TYPE_CHECKING:
    from torch import Tensor

    from turboserve.worker.engine.engine import Engine

LIMIT_S = 10.0
"""Longest time of one exchange: a busy machine is slow, not broken."""
PROMPT = "a red circle moving left on black"
SESSION = "measured"


class MeasuredEngine:
    """An engine with one session that is always due, and the times of its forwards."""

    def __init__(self) -> None:
        from turboserve.bench.sequence_parallel.donor import engine_of
        from turboserve.worker.engine.interface import SessionSpec
        from turboserve.worker.replicas.toyworld import load_toyworld

        self.engine: Engine = engine_of(load_toyworld())
        self.engine.admit(SessionSpec(SESSION, PROMPT, 3), time.monotonic())
        self.engine.playhead(SESSION, 1e6, now=time.monotonic())
        self.seconds: list[float] = []
        self._forward = self.engine.backend.forward
        self.engine.backend.forward = self._timed  # type: ignore[method-assign]

    def chunk(self) -> Tensor:
        """Generate one chunk. Returns its latents [F, C, H, W]."""
        from turboserve.worker.engine.interface import ChunkReady

        while True:
            for event in self.engine.step(time.monotonic()):
                if isinstance(event, ChunkReady):
                    return event.latents

    def _timed(self, works: Any) -> list[Tensor]:
        began = time.perf_counter()
        flows = self._forward(works)
        self.seconds.append(time.perf_counter() - began)
        return flows


def run(
    chunks: Annotated[int, typer.Option(min=1, help="Number of chunks on each, after the warm-up.")] = 12,
) -> dict[str, Any]:
    """Compute a session of toyworld alternately on one worker and on two processes of this machine.

    Both processes run on the CPU, each with one thread, and exchange over gloo.
    """
    import torch

    from turboserve.bench.sequence_parallel.donor import donor_process, parallel_of
    from turboserve.worker.engine.sequence_parallel_sizes import exchanged_bytes

    torch.set_num_threads(1)
    alone, home = MeasuredEngine(), MeasuredEngine()
    config = home.engine.config
    # A full window, so that every forward reads equally much.
    warm_up = 2 + -(-config.window_frames // config.frames_per_chunk)
    broken: list[str] = []
    with donor_process(LIMIT_S) as donor:
        state = home.engine.sessions[SESSION].state

        def borrow(loan: int) -> None:
            donor.loan(loan)
            parallel_of(home.engine).borrow(
                loan, state, donor.announce, donor.group, lambda error: broken.append(repr(error))
            )

        borrow(1)
        differences = [_difference(alone, home) for _ in range(warm_up)]
        alone.seconds.clear()
        home.seconds.clear()
        before = donor.group.sent_bytes, donor.sent_bytes()
        differences += [_difference(alone, home) for _ in range(chunks)]
        sent = donor.group.sent_bytes - before[0], donor.sent_bytes() - before[1]
        forwards, seconds = len(home.seconds), [alone.seconds[:], home.seconds[:]]
        parallel_of(home.engine).return_donor()
        first = _first_forward(home, donor.group, borrow)
    one, two = (percentile(each, 0.5) or 0.0 for each in seconds)
    return {
        "model": "toyworld",
        "forwards": forwards,
        "broken": broken,
        "one_worker": {"forward_s": one, "forwards_per_s": 1 / one},
        "two_workers": {"forward_s": two, "forwards_per_s": 1 / two},
        "ratio": one / two,
        "bytes": {
            "home": sent[0] / forwards,
            "donor": sent[1] / forwards,
            "attentions": exchanged_bytes(config, config.frames_per_chunk, 4),
            "first_forward": first,
        },
        "largest_difference": max(differences),
    }


def table(result: Mapping[str, Any]) -> Table:
    """Format the result of `run`."""
    shown = Table("workers", "forward, ms", "forwards per second", "ratio", box=box.SIMPLE)
    for name, ratio in (("one_worker", ""), ("two_workers", f"{result['ratio']:.2f}")):
        one = result[name]
        shown.add_row(
            name.replace("_", " "), f"{one['forward_s'] * 1e3:.1f}", f"{one['forwards_per_s']:.1f}", ratio
        )
    sent = result["bytes"]
    shown.caption = (
        f"Bytes of a forward: home {sent['home']:,.0f}, donor {sent['donor']:,.0f}; of a loan's first: home "
        f"{sent['first_forward']:,.0f}. Largest difference of latents: {result['largest_difference']:.1e}."
    )
    return shown


def _difference(alone: MeasuredEngine, home: MeasuredEngine) -> float:
    return float((alone.chunk() - home.chunk()).abs().max())


def _first_forward(home: MeasuredEngine, group: Any, borrow: Any) -> int:
    """Bytes that the home sends for the first forward of a loan."""
    borrow(2)
    sent, count = group.sent_bytes, len(home.seconds)
    while len(home.seconds) == count:
        home.engine.step(time.monotonic())
    found: int = group.sent_bytes - sent
    return found
