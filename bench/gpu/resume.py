"""The resumption of a suspended session, layer by layer and as a whole.

    python bench/gpu/resume.py --out resume.json

Layer by layer, the first forward begins when layer 0 of the state is there; this is what the engine does. As
a whole, it begins when all layers are. `--tiny` tries the script with a small model, also on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("bench", "services/worker", "shared")]

import torch  # noqa: E402
from notes import Notes  # noqa: E402

from turboserve.bench.engine.random_models import load, load_tiny  # noqa: E402
from turboserve.worker.engine.budget import plan  # noqa: E402
from turboserve.worker.engine.engine import Engine  # noqa: E402
from turboserve.worker.engine.interface import (  # noqa: E402
    ChunkReady,
    EngineOptions,
    Event,
    SessionFailed,
    SessionSpec,
    Suspended,
    SuspendRefused,
)
from turboserve.worker.engine.layer_arrival import LayerArrival  # noqa: E402
from turboserve.worker.engine.models import Models  # noqa: E402
from turboserve.worker.engine.state_transfer import Transfer, TransferDirection  # noqa: E402
from turboserve.worker.engine.tensor_backend import TensorBackend  # noqa: E402
from turboserve.worker.engine.work import Work  # noqa: E402
from turboserve.worker.replicas.models import ModelOptions  # noqa: E402

CHUNKS = 5
"""Chunks before the first suspension; then the window is full."""
LIMIT_S = 60.0
WAIT_S = 0.5


class ResumeError(RuntimeError):
    """The session failed, was refused, or took too long."""


class Resumptions:
    """One engine with one session, which is suspended and resumed."""

    def __init__(self, models: Models) -> None:
        budget = plan(models, 1 << 62)
        state = budget.slab_bytes + budget.decode_cache_bytes + budget.state_bytes + (1 << 20)
        options = EngineOptions(
            2 * budget.slab_bytes, 2 * state, max_lead_s=float("inf"), max_batch=2, overlap=True
        )
        self.state_bytes = budget.slab_bytes + budget.decode_cache_bytes + budget.state_bytes
        self._engine = Engine(models, options)
        self._forward_s: list[float] = []
        self._forwards = models.transformer.config.chunk_forwards
        self._cuda = models.transformer.patch_embedding.weight.is_cuda
        compute = TensorBackend.forward

        def timed(backend: TensorBackend, works: Sequence[Work]) -> list[torch.Tensor]:
            self._forward_s.append(time.monotonic())
            return compute(backend, works)

        TensorBackend.forward = timed  # type: ignore[method-assign]
        self._engine.admit(SessionSpec("one", "", seed=1), time.monotonic())
        self._until(ChunkReady, CHUNKS)

    def measure(self) -> dict[str, float]:
        """Suspend and resume once. Seconds from the call of `resume`."""
        self._engine.suspend("one")
        self._until(Suspended)
        if self._cuda:
            torch.cuda.synchronize()
        self._forward_s.clear()
        with copied() as copies:
            began = time.monotonic()
            self._engine.resume("one", began)
            # A chunk that was denoised before the suspension may come first.
            while len(self._forward_s) < self._forwards:
                self._until(ChunkReady)
            chunk_s = time.monotonic() - began
        return {
            "first_forward_s": self._forward_s[0] - began,
            "state_there_s": copies[0] - began,
            "first_chunk_s": chunk_s,
        }

    def chunk_s(self) -> float:
        """Return the seconds of a chunk without a resumption."""
        began = time.monotonic()
        self._until(ChunkReady, 3)
        return (time.monotonic() - began) / 3

    def _until(self, kind: type[Event], count: int = 1) -> None:
        deadline = time.monotonic() + LIMIT_S
        while count > 0:
            if time.monotonic() > deadline:
                raise ResumeError(f"no {kind.__name__} in {LIMIT_S:g} s")
            for event in self._engine.step(time.monotonic()):
                if isinstance(event, SessionFailed | SuspendRefused):
                    raise ResumeError(str(event))
                count -= isinstance(event, kind)
            if count > 0 and not self._engine.has_work(time.monotonic()):
                self._engine.wait(WAIT_S)


@contextmanager
def copied() -> Iterator[list[float]]:
    """Note the times at which arriving transfers are done, in the list that this returns."""
    ends: list[float] = []
    run = Transfer.run

    def timed(transfer: Transfer) -> None:
        run(transfer)
        if transfer.way is TransferDirection.ARRIVING:
            ends.append(time.monotonic())

    Transfer.run = timed  # type: ignore[method-assign]
    try:
        yield ends
    finally:
        Transfer.run = run  # type: ignore[method-assign]


@contextmanager
def as_a_whole() -> Iterator[None]:
    """Let a forward begin only when all layers have arrived."""
    begun = LayerArrival.begun
    LayerArrival.begun = LayerArrival.complete  # type: ignore[method-assign]
    try:
        yield
    finally:
        LayerArrival.begun = begun  # type: ignore[method-assign]


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median of each figure, and all of them."""
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {**medians, "runs": runs}


def main() -> None:
    """Measure both ways in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, to check the script")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    notes = Notes(arguments.out, float("inf"))
    notes.found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    notes.found["torch"] = torch.__version__
    with torch.inference_mode():
        models = (load_tiny if arguments.tiny else load)(ModelOptions(device, dtype))
        resumptions = Resumptions(models)
        notes.found["state_bytes"] = resumptions.state_bytes
        notes.found["chunk_s"] = resumptions.chunk_s()
        resumptions.measure()
        layered, whole = [], []
        for _ in range(arguments.repeats):
            layered.append(resumptions.measure())
            with as_a_whole():
                whole.append(resumptions.measure())
            notes.found |= {"layer_by_layer": summary(layered), "as_a_whole": summary(whole)}
            notes.save()
    print({name: value for name, value in notes.found["layer_by_layer"].items() if name != "runs"})
    print({name: value for name, value in notes.found["as_a_whole"].items() if name != "runs"})


if __name__ == "__main__":
    main()
