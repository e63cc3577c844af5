"""The way from one composition to another: make before break.

At every step, the workers that serve have a place for every live session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from turboserve.allocation.classes import Capability, SessionClass
from turboserve.allocation.linear import LinearProgram
from turboserve.autoscaler.control.composition import Composition, Offer, OfferKey, Terms
from turboserve.autoscaler.control.session_places import with_place, without_place

LEAST_ROOM = 1e-6


class StepKind(StrEnum):
    """What happens to one worker."""

    HIRE = "hire"
    SWITCH = "switch"
    """The worker drains, loads other models, and serves again under a new id."""
    RELEASE = "release"


@dataclass(frozen=True)
class Step:
    """One change of one worker. The next step begins when it is done."""

    kind: StepKind
    before: OfferKey | None = None
    """The worker's offer before the step. None: it is hired."""
    after: OfferKey | None = None
    """The worker's offer after the step. None: it is released."""
    extra: bool = False
    """Whether the step belongs to a worker that serves only during the transition."""


@dataclass(frozen=True)
class Transition:
    """Steps in order."""

    steps: Sequence[Step]
    complete: bool
    """Whether the steps end in the wanted composition. False: no further step leaves every session a place.
    The wanted composition has too few places for the live sessions, or no kind has room for one worker
    more."""


def share_with_places(
    offers: Mapping[OfferKey, Offer], workers: Composition, sessions: Mapping[SessionClass, int]
) -> float:
    """Return the least share of a class that has places, with fractions of sessions. 1: all sessions have."""
    linear = LinearProgram()
    terms: dict[SessionClass, list[tuple[int, float]]] = {one: [] for one, n in sessions.items() if n}
    if not terms:
        return 1.0
    for key, count in workers.items():
        if count:
            _serve(linear, offers[key].capability, count, terms)
    if not all(terms.values()):
        return 0.0
    served = linear.column(0.0, 1.0)
    for one, places in terms.items():
        linear.row([*places, (served, -float(sessions[one]))], lower=0.0)
    return linear.minimize([(served, -1.0)]).values[served]


def _serve(
    linear: LinearProgram,
    capability: Capability,
    workers: int,
    terms: dict[SessionClass, list[tuple[int, float]]],
) -> None:
    time_terms, byte_terms = [], []
    for one, places in terms.items():
        if capability.serves(one):
            column = linear.column()
            places.append((column, 1.0))
            time_terms.append((column, 1.0 / capability.sessions[one]))
            if capability.memory_bytes and (size := capability.state_bytes.get(one, 0)):
                byte_terms.append((column, size / capability.memory_bytes))
    if time_terms:
        linear.row(time_terms, upper=float(workers))
    if byte_terms:
        linear.row(byte_terms, upper=float(workers))


def plan(
    terms: Mapping[str, Terms],
    offers: Sequence[Offer],
    present: Composition,
    wanted: Composition,
    sessions: Mapping[SessionClass, int],
) -> Transition:
    """Return the steps from `present` to `wanted`, during which all `sessions` keep a place.

    Hires come first, as far as the limit of their kind allows. Then every step that leaves all sessions a
    place: a switch before a release, since it brings capacity that others may need. If none does, one worker
    more is hired and released at the end: of the kinds with room, the cheapest one with which a step becomes
    possible. If `present` has no place for all sessions, no step lowers the share that has one.
    """
    return _Planner(terms, offers, present, wanted, sessions).run()


class _Planner:
    def __init__(
        self,
        terms: Mapping[str, Terms],
        offers: Sequence[Offer],
        present: Composition,
        wanted: Composition,
        sessions: Mapping[SessionClass, int],
    ) -> None:
        self._terms, self._sessions = terms, sessions
        self._offers = {offer.key: offer for offer in offers}
        self._now = Counter({key: count for key, count in present.items() if count})
        less = Counter({key: n for key, count in present.items() if (n := count - wanted.get(key, 0)) > 0})
        more = Counter({key: n for key, count in wanted.items() if (n := count - present.get(key, 0)) > 0})
        self._least = min(1.0, share_with_places(self._offers, present, sessions))
        """Share of the sessions of each class that has places at the start."""
        shares = any(len(offer.models) > 1 for offer in offers)
        self._placed = with_place(self._workers(present), sessions) if shares else None
        """Whole sessions that have a place at the start. None: each worker has one model, so that shares say
        it."""
        self._wanted = wanted
        self._ends_well = self._has_places(wanted)
        self._hires: list[Step] = []
        self._others: list[Step] = []
        for key in sorted(more):
            for _ in range(more[key]):
                source = next((other for other in sorted(less) if other[0] == key[0] and less[other]), None)
                if source is None:
                    self._hires.append(Step(StepKind.HIRE, None, key))
                else:
                    less[source] -= 1
                    self._others.append(Step(StepKind.SWITCH, source, key))
        for key in sorted(less):
            self._others += [Step(StepKind.RELEASE, key, None)] * less[key]
        self._extra: list[Step] = []
        """Releases of the workers that serve only during the transition: the last steps."""
        self._steps: list[Step] = []

    def run(self) -> Transition:
        while self._hires or self._others or self._extra:
            if not self._hires and not self._others:
                self._others, self._extra = self._extra, []
            hire = next((step for step in self._hires if self._has_room(step)), None)
            if hire is not None:
                self._hires.remove(hire)
                self._take(hire)
                continue
            step = self._possible()
            if step is not None:
                self._others.remove(step)
                self._take(step)
            elif not self._hire_extra():
                return Transition(tuple(self._steps), False)
        return Transition(tuple(self._steps), True)

    def _take(self, step: Step) -> None:
        self._steps.append(step)
        if step.before is not None:
            self._now[step.before] -= 1
        if step.after is not None:
            self._now[step.after] += 1

    def _has_room(self, step: Step) -> bool:
        assert step.after is not None
        kind = step.after[0]
        return sum(count for key, count in self._now.items() if key[0] == kind) < self._terms[kind].most

    def _possible(self) -> Step | None:
        """Return a step after whose first half, the drain, all sessions have places."""
        tried: set[OfferKey | None] = set()
        for step in self._others:
            if step.before not in tried:
                tried.add(step.before)
                if self._leaves_places(step, self._now):
                    return step
        return None

    def _leaves_places(self, step: Step, now: Counter[OfferKey]) -> bool:
        after = now.copy()
        if step.before is not None:
            after[step.before] -= 1
        return self._enough(after)

    def _enough(self, workers: Composition) -> bool:
        # `with_place` may place fewer sessions on more workers. Extra workers would then never be released.
        if self._ends_well and all(workers.get(key, 0) >= count for key, count in self._wanted.items()):
            return True
        return self._has_places(workers)

    def _has_places(self, workers: Composition) -> bool:
        if share_with_places(self._offers, workers, self._sessions) < self._least - LEAST_ROOM:
            return False
        return self._placed is None or not without_place(self._workers(workers), self._placed)

    def _workers(self, workers: Composition) -> list[tuple[Mapping[SessionClass, int], int]]:
        return [(self._offers[key].capability.sessions, count) for key, count in workers.items()]

    def _hire_extra(self) -> bool:
        if not self._ends_well:
            # The worker could not be released again.
            return False
        for key in sorted(self._offers, key=lambda key: (self._terms[key[0]].price, key)):
            hire = Step(StepKind.HIRE, None, key, extra=True)
            if not self._has_room(hire):
                continue
            after = self._now.copy()
            after[key] += 1
            if any(self._leaves_places(step, after) for step in self._others):
                self._take(hire)
                self._extra.append(Step(StepKind.RELEASE, key, None, extra=True))
                return True
        return False
