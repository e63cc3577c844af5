"""People: they create, prompt, pause, resume, end, leave and come back, at seeded moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turboserve import subjects
from turboserve.bench.simulate.gateway import Viewer
from turboserve.bench.simulate.worker import MODEL
from turboserve.contracts.requests import CreateSession, EndSession, MoveSession, SessionRef, SubmitPrompt
from turboserve.contracts.sessions import Activity, SessionRecord

if TYPE_CHECKING:
    from turboserve.bench.simulate.world import World

RECONNECT_S = 0.5
MOST = 14
"""Sessions that one run creates."""


class Users:
    """They act until told to stop; viewers reconnect for as long as they watch."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.viewers: list[Viewer] = []
        self._numbers = 0
        self._stopped = False
        self._pace_s = world.kernel.random.choice((0.3, 0.8, 2.0))
        world.kernel.at(0.5, self._act)
        world.kernel.at(RECONNECT_S, self._reconnect)

    def stop(self) -> None:
        self._stopped = True

    def end_all(self) -> None:
        """Everybody ends their session, again and again: a gateway that stood still may still create some."""
        for record in self._live():
            self._world.gateway.ask(subjects.END_SESSION, EndSession(session=record.id))
        self._world.kernel.at(1.0, self.end_all)

    def _live(self) -> list[SessionRecord]:
        return [record for record in self._world.database.rows() if not record.phase.ended]

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _reconnect(self) -> None:
        gateway = self._world.gateway
        self._world.kernel.at(RECONNECT_S, self._reconnect)
        for viewer in self.viewers:
            if viewer.watching and not viewer.over and not gateway.connected(viewer) and gateway.program.up:
                gateway.join(viewer)

    def _act(self) -> None:
        if self._stopped:
            return
        chance = self._world.kernel.random
        self._world.kernel.at(chance.expovariate(1.0 / self._pace_s), self._act)
        live = self._live()
        deed = chance.random()
        if len(self._world.seeds) < MOST and (deed < 0.4 or not live):
            self._create()
        elif live:
            self._fiddle(chance.choice(live), chance.random())

    def _create(self) -> None:
        number = self._number()
        session = f"ses_{number}"
        self._world.seeds[session] = number
        request = CreateSession(id=session, tenant="t", model=MODEL, prompt="a red circle", seed=number)
        attempts = self._world.kernel.random.choice((1, 4))
        self._world.gateway.ask(subjects.CREATE_SESSION, request, attempts)
        for _ in range(self._world.kernel.random.choice((0, 1, 1, 1, 2))):
            self.viewers.append(Viewer(f"view_{self._number()}", session))

    def _fiddle(self, record: SessionRecord, deed: float) -> None:
        gateway, ref = self._world.gateway, SessionRef(session=record.id)
        if deed < 0.3:
            event = f"evt_{self._number()}"
            gateway.ask(
                subjects.SUBMIT_PROMPT,
                SubmitPrompt(session=record.id, event_id=event, prompt="a blue square"),
            )
        elif deed < 0.5 and record.activity is Activity.WATCHING:
            gateway.ask(subjects.PAUSE_SESSION, ref)
        elif deed < 0.7 and record.activity is not Activity.WATCHING:
            gateway.ask(subjects.RESUME_SESSION, ref)
        elif deed < 0.78:
            gateway.ask(subjects.END_SESSION, EndSession(session=record.id))
        elif deed < 0.88:
            self._come_or_go(record.id)
        else:
            gateway.ask(subjects.MOVE_SESSION, MoveSession(session=record.id), 1)

    def _come_or_go(self, session: str) -> None:
        there = [v for v in self.viewers if v.session == session]
        for viewer in there:
            viewer.watching = not viewer.watching
            if not viewer.watching:
                self._world.gateway.leave(viewer)
        if not there:
            self.viewers.append(Viewer(f"view_{self._number()}", session))
