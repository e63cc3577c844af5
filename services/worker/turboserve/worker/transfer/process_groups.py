"""What links and sequence parallelism share to create torch's process groups of two."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from turboserve.worker.transfer.listeners import opened_by


@contextmanager
def gloo_options(host: str, peers: Collection[str], seconds: float) -> Iterator[Any]:
    """Options of a gloo group, which is created and proved within the `with` block.

    Gloo listens on `host`. Only `peers` may connect there, and nothing any more after the block.

    Args:
        seconds: Time for the other side to connect.

    Raises:
        RuntimeError: Gloo cannot listen on `host`.
    """
    # Only these private options, which torch's stubs lack, set the address and the number of threads.
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = time_limit(seconds)
    options._threads = 1
    device, listeners = opened_by(lambda: dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False))
    try:
        listeners.only_from(peers)
        options._devices = [device]
        yield options
        # The pair is connected: the library's listener is not needed any more.
        listeners.refuse_all()
    finally:
        listeners.close()


def first_line(error: Exception) -> str:
    """The first line of an error of torch, which may have a stack trace below it."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def time_limit(seconds: float) -> timedelta:
    """A time limit for torch, at least 1 ms: 0 would mean no limit."""
    return timedelta(seconds=max(0.001, seconds))
