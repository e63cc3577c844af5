"""SlackServe's choice of a chunk's configuration, and the fixed levels that it was compared with.

In the paper both decide every three seconds. Here they decide at every chunk boundary.
"""

from __future__ import annotations

from turboserve.worker.engine.fidelity_forecast import EngineLoad, StreamLoad, stream_of
from turboserve.worker.engine.fidelity_profile import MeasuredFidelity, choose_within_budget

ALPHA = 2.0
"""Credit below which a session is urgent, in times of its next chunk; twice that, above which it is relaxed
(SlackServe, 3.1)."""


class BudgetedFidelity:
    """The best configuration whose time alone keeps the session's own budget (SlackServe's BMPR, 4.2).

    The budget is the playout slack. The policy sees no other session and no queue.
    """

    def choose(self, session: str, load: EngineLoad) -> int:
        """See `FidelityPolicy.choose`."""
        stream = stream_of(session, load)
        frontier = [
            MeasuredFidelity(
                rung.fidelity, load.chunk_time_s(place), rung.quality, (rung.quality, rung.quality)
            )
            for place, rung in enumerate(load.ladder.rungs[: stream.lowest + 1])
        ]
        # The floor of the session has already shortened the ladder.
        chosen = choose_within_budget(frontier, 0.0, _generated_s(stream, load))
        return 0 if chosen is None else frontier.index(chosen)


class FixedLevels:
    """A fast, a medium or the best configuration by the session's tier (SlackServe, ablation)."""

    def choose(self, session: str, load: EngineLoad) -> int:
        """See `FidelityPolicy.choose`."""
        stream = stream_of(session, load)
        alone_s = load.chunk_time_s(0)
        credit_s = _generated_s(stream, load) - alone_s
        if credit_s < ALPHA * alone_s:
            return stream.lowest
        return (stream.lowest + 1) // 2 if credit_s <= 2 * ALPHA * alone_s else 0


def _generated_s(stream: StreamLoad, load: EngineLoad) -> float:
    """Playout slack with the chunks that are generated and not yet decoded."""
    return stream.slack_s + stream.undecoded * load.chunk_s
