"""Lanes: work that goes on beside the engine's own, one job after the other.

Decoding has one, so that a chunk is decoded while the next is denoised; moving state to the host and back has
another. A threaded lane has its own thread and, on a GPU, its own stream. Without threads a job is done where
it is handed in: for a single core, and for clocks that are not the wall's.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from turboserve.worker.engine.streams import mark, settle


class Job(Protocol):
    """Something to be done in a lane. It keeps its own result."""

    def run(self) -> None:
        """Do it; must not raise but `DEVICE_LOST`, which ends the lane. On a GPU all it launches goes to the
        lane's stream."""
        ...


J = TypeVar("J", bound=Job)
_Entry = tuple[J, "torch.cuda.Event | None"]


class Wakeup:
    """Rung when a job is done: wakes whoever waits, and calls whom that concerns."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.notify: Callable[[], None] | None = None
        """Called on a lane's thread; must not block."""

    def notify_done(self) -> None:
        """A job is done."""
        self._event.set()
        if self.notify is not None:
            self.notify()

    def clear(self) -> None:
        """What was rung for is about to be looked at."""
        self._event.clear()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until it rings; whether it did."""
        return self._event.wait(timeout_s)


class StreamExecutor(Generic[J]):
    """Does jobs in the order in which they are handed in. Owned by one thread, like the engine it serves."""

    def __init__(self, name: str, device: torch.device, wakeup: Wakeup, threaded: bool) -> None:
        """`wakeup` rings for each job that is done."""
        self.threaded = threaded
        self._name = name
        self._device = device
        self._wakeup = wakeup
        self._jobs: queue.SimpleQueue[_Entry[J] | None] = queue.SimpleQueue()
        self._done: deque[J] = deque()
        self._failed: list[BaseException] = []
        self._handed_in = 0
        self._thread: threading.Thread | None = None

    @property
    def load(self) -> int:
        """Jobs handed in and not collected."""
        return self._handed_in

    @property
    def finished(self) -> bool:
        """Whether `collect` would give something."""
        return bool(self._done or self._failed)

    def submit(self, job: J) -> None:
        """Hand a job in. What it reads must stay as it is until it is collected."""
        self._handed_in += 1
        if not self.threaded:
            job.run()
            settle(self._device)
            self._done.append(job)
            self._wakeup.notify_done()
            return
        if self._thread is None:
            self._start()
        self._jobs.put((job, mark(self._device)))

    def collect(self) -> list[J]:
        """The jobs that are done, in order, each once. Raises `RuntimeError` if the lane has broken down."""
        if self._failed:
            raise RuntimeError(f"lane {self._name} has broken down") from self._failed[0]
        done = []
        while self._done:
            done.append(self._done.popleft())
        self._handed_in -= len(done)
        return done

    def _start(self) -> None:
        # The thread holds the queues alone, so that it ends with the lane's last user.
        self._thread = threading.Thread(
            target=_main,
            args=(self._jobs, self._done, self._failed, self._wakeup, self._device),
            name=self._name,
            daemon=True,
        )
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)


def _main(
    jobs: queue.SimpleQueue[_Entry[J] | None],
    done: deque[J],
    failed: list[BaseException],
    wakeup: Wakeup,
    device: torch.device,
) -> None:
    # The first call of a thread gives it the process's number of threads; else kernels would take their own.
    torch.get_num_threads()
    try:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        while (entry := jobs.get()) is not None:
            _do(entry, stream)
            done.append(entry[0])
            del entry
            wakeup.notify_done()
    except BaseException as error:
        failed.append(error)
        wakeup.notify_done()


def _do(entry: _Entry[J], stream: torch.cuda.Stream | None) -> None:
    job, before = entry
    if stream is None:
        job.run()
        return
    with torch.cuda.stream(stream):
        if before is not None:
            stream.wait_event(before)
        job.run()
    # Only this thread waits. Whoever collects the job may use and free its tensors on any stream.
    stream.synchronize()
