"""NCCL between two workers: device memory from GPU to GPU."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from turboserve.worker.transfer.deadline import Deadline
from turboserve.worker.transfer.errors import (
    DeadlineExceededError,
    TransferBackendError,
)
from turboserve.worker.transfer.link import (
    PROGRESS_S,
)
from turboserve.worker.transfer.pair import LinkEndpoints, PairLink
from turboserve.worker.transfer.process_groups import first_line, time_limit

POLL_S = 0.0005


def gpu_uuid(device: torch.device) -> str:
    """UUID of a CUDA device; empty for another device.

    NCCL refuses a communicator of two processes on one GPU.
    """
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


class NcclLink(PairLink):
    """Transfers device memory from GPU to GPU."""

    kind = "nccl"

    def __init__(
        self,
        name: str,
        store: HashStore,
        rank: int,
        ends: LinkEndpoints,
        device: torch.device,
        seconds: float,
    ) -> None:
        """Create the communicator and prove the key. Blocks until the other side does the same.

        Raises `TransferBackendError`, `AuthenticationError`, `PeerLostError` or `DeadlineExceededError`.
        """
        super().__init__(name, store, rank, device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = time_limit(seconds)
        try:
            self._group = dist.ProcessGroupNCCL(store, rank, 2, options)
        except RuntimeError as error:
            raise TransferBackendError(f"nccl: {first_line(error)}") from error
        self.recognize(ends.key, seconds)

    def close(self) -> None:
        """See `Link.close`. An operation under way is aborted."""
        group = self._group
        super().close()
        if group is not None:
            group.abort()

    def _wait(self, work: Any, deadline: Deadline) -> None:
        # `wait` alone would only order the stream: the host would not notice that the peer is dead.
        until = time.monotonic() + deadline.left(PROGRESS_S)
        while not work.is_completed():
            deadline.left()
            if time.monotonic() >= until:
                raise DeadlineExceededError(f"nccl: no progress for {PROGRESS_S:g} s")
            time.sleep(POLL_S)
        work.wait()
        torch.cuda.current_stream(self.device).synchronize()
