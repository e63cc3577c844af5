"""The state store's process: who answers what; its databases are not its own and survive it."""

from __future__ import annotations

from collections.abc import Callable

from turboserve import subjects
from turboserve.bench.simulate.kernel import Program
from turboserve.bench.simulate.log import Stream
from turboserve.bench.simulate.network import Handler, Network
from turboserve.bench.simulate.store.aftermath import Aftermath
from turboserve.bench.simulate.store.database import Database
from turboserve.bench.simulate.store.hot import HotStore, Latents, Playheads
from turboserve.bench.simulate.store.moves import Moves
from turboserve.bench.simulate.store.rows import Rows
from turboserve.bench.simulate.store.sessions import Sessions
from turboserve.bench.simulate.store.workers import Workers
from turboserve.contracts.workers import Assignment
from turboserve.state_store.core.leases import Leases


class Store:
    """Each life begins with empty memory and goes on with the rows as they are."""

    def __init__(
        self,
        program: Program,
        network: Network,
        database: Database,
        hot: HotStore,
        chunks: Stream,
        events: Stream,
        assign: Callable[[str, Assignment], None],
        lease_s: float,
        worker_timeout_s: float,
    ) -> None:
        self.program, self.database, self.hot = program, database, hot
        self.playheads = Playheads()
        self._chunks, self._events, self._assign = chunks, events, assign
        self._network, self._lease_s, self._worker_timeout_s = network, lease_s, worker_timeout_s
        self._handlers: dict[str, Handler] = {}
        network.serve("state-store", program, lambda name: self._handlers[name])

    def boot(self) -> None:
        self.playheads = Playheads()
        aftermath = Aftermath(
            self.program, self.database, self._chunks, self._events, self.playheads, self._assign
        )
        kernel = self.program.kernel
        rows = Rows(kernel, self.database, self.hot, aftermath, self._worker_timeout_s)
        leases = Leases(self._lease_s, self._worker_timeout_s, kernel.now)
        workers = Workers(rows, leases, lambda: self._network.connection(self.program))
        self._handlers = handlers(rows, workers)
        aftermath.start()

    def playhead(self, session: str, playhead_s: float, viewers: int) -> None:
        """A hint of the gateway's."""
        self.playheads.report(session, playhead_s, viewers, self.program.kernel.now)

    def latents(self, session: str, latents: Latents) -> None:
        """A hint of a worker's."""
        self.hot.keep(session, latents)


def handlers(rows: Rows, workers: Workers) -> dict[str, Handler]:
    """By subject, as `state_store.endpoints` has them."""
    sessions, moves = Sessions(rows), Moves(rows)
    return {
        subjects.CREATE_SESSION.subject: sessions.create,
        subjects.GET_SESSION.subject: sessions.get,
        subjects.LIST_SESSIONS.subject: sessions.list_sessions,
        subjects.SUBMIT_PROMPT.subject: sessions.submit_prompt,
        subjects.PAUSE_SESSION.subject: sessions.pause,
        subjects.RESUME_SESSION.subject: sessions.resume,
        subjects.END_SESSION.subject: sessions.end,
        subjects.FAIL_SESSION.subject: sessions.fail,
        subjects.PLACE_SESSION.subject: sessions.place,
        subjects.NOTE_DECISION.subject: sessions.note,
        subjects.SUSPEND_IDLE.subject: sessions.suspend_idle,
        subjects.GET_LATENTS.subject: sessions.get_latents,
        subjects.BEGIN_MOVE.subject: moves.begin,
        subjects.COMMIT_MOVE.subject: moves.commit,
        subjects.ABANDON_MOVE.subject: moves.abandon,
        subjects.RENEW.subject: workers.renew,
        subjects.WORKER_GONE.subject: workers.gone,
        subjects.DRAIN_WORKER.subject: workers.drain,
        subjects.LIST_WORKERS.subject: workers.list,
        subjects.GET_LEADER.subject: workers.get_leader,
        subjects.CAMPAIGN.subject: workers.campaign,
        subjects.KEEP_LEAD.subject: workers.keep_lead,
        subjects.REPORT_POOL.subject: workers.report_pool,
    }
