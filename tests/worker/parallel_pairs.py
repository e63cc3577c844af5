"""Two ends of an exchange within one process: a donor's half of every forward runs on a thread."""

import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.helpers.waiting import LIMIT_S
from turboserve.worker.engine.errors import PartnerLostError
from turboserve.worker.engine.parallel_forward import ParallelForward
from turboserve.worker.engine.sequence_parallel import ForwardSpec
from turboserve.worker.engine.state import SessionState


class LocalExchange:
    """See `sequence_parallel.Exchange`. Counts the bytes that both ends send."""

    def __init__(self, sends: "queue.SimpleQueue[Any]", receives: "queue.SimpleQueue[Any]") -> None:
        self._sends, self._receives = sends, receives
        self.bytes_sent = 0
        self.fails_at: int | None = None
        """Number of this end's exchange that breaks."""
        self.count = 0

    def __call__(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        if self.count == self.fails_at:
            raise PartnerLostError("broken by the test")
        self.count += 1
        self._sends.put([x.clone() for x in sent])
        self.bytes_sent += sum(x.numel() * x.element_size() for x in sent)
        try:
            arrived = self._receives.get(timeout=LIMIT_S)
        except queue.Empty:
            raise PartnerLostError("no partner") from None
        assert [x.shape for x in arrived] == [x.shape for x in received]
        for to, found in zip(received, arrived, strict=True):
            to.copy_(found)


class LocalDonor:
    """A donor on a thread, and the home's two connections to it."""

    def __init__(self, parallel: ParallelForward) -> None:
        there, back = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
        self.home, self.donor = LocalExchange(there, back), LocalExchange(back, there)
        self.specs: list[ForwardSpec] = []
        self.accepts = True
        self.broken: list[Exception] = []
        self._lent = parallel.lend(1, parallel.lent_memory(), self.donor)
        self._waiting = queue.SimpleQueue[ForwardSpec | None]()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def lend_to(self, home: ParallelForward, state: SessionState) -> None:
        home.borrow(1, state, self._waiting.put, self.home, self.broken.append)

    def end(self) -> None:
        self._waiting.put(None)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        torch.set_num_threads(1)
        while (spec := self._waiting.get()) is not None:
            self.specs.append(spec)
            try:
                self._lent(spec, accept=self.accepts)
            except PartnerLostError:
                return
