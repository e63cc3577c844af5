"""A donor in a process of its own: computes its half of the forwards that it is asked for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import PartnerLostError
from turboserve.worker.engine.interface import EngineOptions
from turboserve.worker.engine.memory import SlabLayout
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.parallel_forward import ParallelForward
from turboserve.worker.engine.sequence_parallel import DONOR, HOME, ForwardSpec
from turboserve.worker.engine.tensor_backend import TensorBackend
from turboserve.worker.replicas.toyworld import load_toyworld
from turboserve.worker.sequence_parallel.group import GlooGroup

CONNECT_S = 30.0
KEY, NAME = bytes(32), "bench"


def engine_of(
    models: Models, slabs: int = 2, profiles: Mapping[str, Mapping[int, float]] | None = None
) -> Engine:
    """An engine of these models with `slabs` slabs. `profiles`: see `Pipeline`."""
    layout = SlabLayout.of(models.transformer.config, models.transformer.patch_embedding.weight.dtype)
    return Engine(models, EngineOptions(slabs * layout.total_bytes, max_batch=slabs), profiles=profiles)


def parallel_of(engine: Engine) -> ParallelForward:
    """The engine's forwards, to borrow or lend."""
    backend = engine.backend
    assert isinstance(backend, TensorBackend)
    return backend.parallel


class DonorProcess:
    """The process, and this process's end of the group with it."""

    def __init__(self, process: Any, pipe: Connection, group: GlooGroup) -> None:
        self._process, self._pipe = process, pipe
        self.group = group

    def announce(self, spec: ForwardSpec) -> None:
        """See `ParallelForward.borrow`."""
        self._pipe.send(spec)

    def loan(self, number: int) -> None:
        """Begin a loan: the donor drops what it kept for the last one."""
        self._pipe.send(number)

    @property
    def pid(self) -> int:
        """Id of the process."""
        pid: int = self._process.pid
        return pid

    def sent_bytes(self) -> int:
        """Bytes that the donor has sent. Waits until it has computed all that it was asked for."""
        self._pipe.send("sent bytes")
        if not self._pipe.poll(CONNECT_S):
            raise PartnerLostError("the donor does not answer")
        found: int = self._pipe.recv()
        return found

    def die_in_exchange(self, number: int) -> None:
        """Make the donor kill itself before exchange `number` of the group."""
        self._pipe.send(("die", number))

    def freeze_in_exchange(self, number: int) -> None:
        """Make the donor stop itself (SIGSTOP) before exchange `number` of the group."""
        self._pipe.send(("freeze", number))


@contextmanager
def donor_process(limit_s: float, load: Callable[[], Models] = load_toyworld) -> Iterator[DonorProcess]:
    """Start a donor and connect to it; kill it at the end. `limit_s`: longest time of one exchange."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="turboserve-bench-") as folder:
        path = str(Path(folder) / "store")
        process = context.Process(target=_main, args=(path, theirs, limit_s, load), daemon=True)
        process.start()
        theirs.close()
        try:
            group = GlooGroup(_store(path), HOME, KEY, NAME, CONNECT_S, limit_s)
            yield DonorProcess(process, pipe, group)
        finally:
            process.kill()
            process.join()


def _store(path: str) -> FileStore:
    store = FileStore(path, 2)
    store.set_timeout(timedelta(seconds=CONNECT_S))
    return store


def _main(path: str, pipe: Connection, limit_s: float, load: Callable[[], Models]) -> None:
    torch.set_num_threads(1)
    parallel = parallel_of(engine_of(load(), 1))
    memory = parallel.lent_memory()
    group = GlooGroup(_store(path), DONOR, KEY, NAME, CONNECT_S, limit_s)
    lent = parallel.lend(0, memory, group)
    while True:
        match pipe.recv():
            case ForwardSpec() as spec:
                lent(spec)
            case int(loan):
                lent = parallel.lend(loan, memory, group)
            case "sent bytes":
                pipe.send(group.sent_bytes)
            case (str(fault), int(number)):
                _fault(group, signal.SIGKILL if fault == "die" else signal.SIGSTOP, number)


def _fault(group: GlooGroup, which: signal.Signals, number: int) -> None:
    exchange = group._wait

    def wait(work: Any) -> None:
        if group.exchanges == number:
            os.kill(os.getpid(), which)
        exchange(work)

    group._wait = wait  # type: ignore[method-assign]
