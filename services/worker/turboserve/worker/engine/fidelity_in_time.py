"""The policy `in-time`: lowers the chunks that cost the least quality, until every chunk is in time.

One plan covers the next chunks of all sessions of a worker: see `QualityExchange`.
"""

from __future__ import annotations

import numpy as np

from turboserve.worker.engine.fidelity_exchange import MARGIN, QualityExchange
from turboserve.worker.engine.fidelity_forecast import HORIZON, ChunkQueue, EngineLoad, stream_of

RAISE_MARGIN = 1.0
"""As `MARGIN`, for raising a session's configuration: more, so that it does not fall again at once."""
HOLD_S = 10.0
"""Least time between two raises of a session. Between two raises its configuration only falls, so that it
changes at most 60 / `HOLD_S` + 1 times per rung and minute."""


class LeastLossInTime:
    """Keeps every chunk in time that can be, at the least loss of quality over all sessions.

    A first chunk that its viewer waits for gets the lowest configuration, so that it comes soon. The chunk
    after it continues from the configuration before it. Otherwise a configuration falls as soon as a chunk
    would be late. It rises if a plan with a larger margin raises it, and if its last raise is long enough
    ago.
    """

    def __init__(self, horizon: int = HORIZON) -> None:
        """`horizon`: number of next chunks of each session that a plan covers."""
        self._horizon = horizon

    def choose(self, session: str, load: EngineLoad) -> int:
        """See `FidelityPolicy.choose`."""
        stream = stream_of(session, load)
        if stream.lowest == 0 or load.forward(1) <= 0:
            return 0
        if stream.starts:
            # Its viewer sees nothing yet: time is worth more than one chunk's quality.
            return stream.lowest
        cap, may_rise = stream.cap, stream.raised_s >= HOLD_S
        if cap == stream.lowest and not may_rise:
            return cap
        queue = ChunkQueue(load, self._horizon)
        index = next(i for i, each in enumerate(load.streams) if each is stream)
        found = np.flatnonzero(queue.next & (queue.stream == index))
        if not len(found):
            return 0 if may_rise else cap
        chunk, caps = int(found[0]), queue.caps.copy()

        def place(highest: int, margin: float) -> int:
            caps[index] = highest
            exchange = QualityExchange(queue, caps, margin)
            exchange.run(chunk)
            return int(exchange.place[chunk])

        if cap and may_rise:
            cap = min(cap, place(0, RAISE_MARGIN))
        return cap if cap == stream.lowest else place(cap, MARGIN)
