"""Stream executors, which run jobs beside the engine's thread, and what differs between a CPU and a GPU."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

DEVICE_LOST: tuple[type[Exception], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)
"""Errors of a failed device: every later call fails too, for any session. An engine does not catch them,
because its process has to end; sessions continue elsewhere."""


def settle(device: torch.device | None) -> None:
    """Wait until all work that this thread launched is done. Never call it inside a forward. None: a CPU."""
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """An event after this thread's work so far, for another stream to wait for; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host. A copy from a GPU is asynchronous, in page-locked memory: valid after
    `settle`."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on the device, without waiting for the copy."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Job(Protocol):
    """Work for a stream executor. A job keeps its own result."""

    def run(self) -> None:
        """Run the job. Must raise only `DEVICE_LOST` errors, which end the executor. On a GPU, everything
        that it launches goes to the executor's stream."""
        ...


J = TypeVar("J", bound=Job)
_Entry = tuple[J, "torch.cuda.Event | None"]


class Wakeup:
    """Signals that a job is done: wakes the waiting thread, and calls `notify`."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.notify: Callable[[], None] | None = None
        """Called on an executor's thread; must not block."""

    def notify_done(self) -> None:
        """Signal that a job is done."""
        self._event.set()
        if self.notify is not None:
            self.notify()

    def clear(self) -> None:
        """Reset the signal, before finished jobs are collected."""
        # A look takes no lock, and nearly always there is no signal.
        if self._event.is_set():
            self._event.clear()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the signal. Returns whether it came."""
        return self._event.wait(timeout_s)


class StreamExecutor(Generic[J]):
    """Runs jobs in the order of submission. One thread owns it, as it owns the engine."""

    def __init__(self, name: str, device: torch.device, wakeup: Wakeup, threaded: bool) -> None:
        """`wakeup` is signaled for each finished job."""
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
        """Number of jobs submitted and not collected."""
        return self._handed_in

    @property
    def finished(self) -> bool:
        """Whether `collect` has something to return or raise."""
        return bool(self._done or self._failed)

    def submit(self, job: J) -> None:
        """Submit a job. Its inputs must not change until the job is collected."""
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
        """Return the finished jobs, in order, each once. Raises `RuntimeError` if the executor has failed."""
        if self._failed:
            raise RuntimeError(f"stream executor {self._name} has failed") from self._failed[0]
        done = []
        while self._done:
            done.append(self._done.popleft())
        self._handed_in -= len(done)
        return done

    def _start(self) -> None:
        # The thread refers only to the queues, so that it ends with the executor's last reference.
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
    # The first call of a thread sets its number of threads to the process's; without it, kernels would use
    # another.
    torch.get_num_threads()
    try:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
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
    # Only this thread waits. After that, any stream may use and free the job's tensors.
    stream.synchronize()


def bytes_of(tensor: Tensor) -> bytes:
    """A tensor's elements as they lie in memory. Also supports types that numpy does not know."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
