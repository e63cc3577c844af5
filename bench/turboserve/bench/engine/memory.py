"""Peak memory of a running engine, tensor by tensor, against its budget's expectation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turboserve.worker.engine.budget import MemoryBudget, plan
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import ChunkReady, Control, EngineOptions, SessionFailed, SessionSpec
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.state_pages import SOURCES_AT_ONCE, Page

PROMPTS = ("a red circle moving left on black", "a blue square on white")


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all live tensors that are created under it, on this thread.

    A CPU has no such counter, and the size of a process is too coarse for megabytes. Memory inside an
    operation is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def overlook(self, tensors: Iterator[Tensor]) -> None:
        """Ignore tensors that existed before, and their views."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self._known:
                self._born(leaf.untyped_storage())
        return result

    def _born(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._died, key, size)

    def _died(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


def peak_and_expected(
    models: Models, sessions: int, chunks: int, decode_batch: int = 1
) -> tuple[int, int, MemoryBudget]:
    """Measure an engine on a CPU. Returns the peak bytes, the bytes that the budget expects, and the budget.

    All sessions run at once for `chunks` chunks and change their prompts in between. Up to `decode_batch`
    sessions are decoded at once. As many sessions as permitted migrate to another worker concurrently, each
    round for two chunks. Suspended sessions are excluded: the host pool has a size of its own.
    """
    budget = plan(models, 1 << 62, decode_batch)
    peak = PeakMemory()
    networks = [models.transformer, models.text, models.decoder]
    networks += [part for network in networks for part in vars(network).values()]
    for network in networks:
        if isinstance(network, torch.nn.Module):
            peak.overlook(iter([*network.parameters(), *network.buffers()]))
    with peak:
        options = EngineOptions(
            sessions * budget.slab_bytes,
            host_bytes=0,
            max_lead_s=float("inf"),
            max_batch=sessions,
            policy="step" if decode_batch == 1 else "chunk",
            decode_batch=decode_batch,
        )
        engine = Engine(models, options)
        for number in range(sessions):
            engine.admit(SessionSpec(str(number), PROMPTS[0], seed=number), 0.0)
        made = 0
        sent: list[Sequence[Page]] = []
        for turn, prompt in enumerate(islice(cycle(PROMPTS), chunks), 1):
            while made < turn * sessions:
                made += _step(engine)
            for number in range(sessions):
                engine.control(str(number), Control(turn, prompt=prompt))
            if turn % 2 == 0:
                # A round of a migration keeps the pages that it has read until they are sent.
                sent = [engine.pages(str(n)) for n in range(min(sessions, SOURCES_AT_ONCE))]
        del sent
    return models.weight_bytes + peak.peak_bytes, budget.expected_bytes(sessions), budget


def _step(engine: Engine) -> int:
    made = 0
    for event in engine.step(0.0):
        if isinstance(event, SessionFailed):
            raise RuntimeError(f"session {event.session}: {event.error}")
        made += isinstance(event, ChunkReady)
    return made
