"""A simulated pool with several offers: each worker is of one of two kinds and serves one of two classes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

from turboserve.autoscaler.composition_loop import STUCK_S
from turboserve.autoscaler.control.class_demand import own_sessions
from turboserve.autoscaler.control.session_places import with_place, without_place
from turboserve.autoscaler.core import Pool
from turboserve.autoscaler.messages import SizesWanted
from turboserve.autoscaler.pool_file import OfferEntry, PoolFile, WorkerKind
from turboserve.autoscaler.pool_members import PoolMember
from turboserve.contracts.pool import LoadFeedback, PoolMemberPhase
from turboserve.simulation.session_classes import NAMES, SESSIONS, SessionClasses

MOST = (1, 1, 2)
"""Choices for the maximum number of workers of a kind."""
PRICES = (1.0, 2.0, 4.0)
START_S = 3.0


def draw_offers(seed: int) -> tuple[SessionClasses, PoolFile]:
    """Draw two classes, two kinds, and three offers: one kind may switch between the classes.

    The draws are independent of all others of the seed.
    """
    chance = random.Random(f"offers {seed}")
    first, second = chance.sample(NAMES, 2)
    classes = SessionClasses({first: chance.choice(SESSIONS), second: chance.choice(SESSIONS)})
    kinds = {
        name: WorkerKind(price=chance.choice(PRICES), most=chance.choice(MOST), start_s=START_S)
        for name in ("fixed", "either")
    }
    offers = (
        OfferEntry(name="stays", kind="fixed", model=first, least=chance.choice((0, 1))),
        OfferEntry(name="left", kind="either", model=first),
        OfferEntry(name="right", kind="either", model=second),
    )
    return classes, PoolFile(kinds=kinds, offers=offers)


def serving(members: list[PoolMember], offer: str) -> int:
    """Return how many workers of an offer serve and stay."""
    ready = (one for one in members if one.offer == offer and one.phase is PoolMemberPhase.READY)
    return sum(one.wanted for one in ready)


def takes_places(
    pool: Pool,
    event: SizesWanted,
    file: PoolFile,
    sessions: Mapping[str, int],
    feedback: Mapping[str, LoadFeedback],
    now: float,
) -> str | None:
    """Return what is wrong with new sizes of the pool; None if every live session keeps its place.

    `sessions`: n_j of a worker, by class. `feedback`: the newest of each class that the controller accepted
    and that is not stale. `now`: the pool's time.
    """
    had, members = pool.sizes, list(pool.members.values())
    # Those that wait for the place of another worker have none themselves.
    waiting = Counter(member.offer for member in members if member.wanted and member.waits_for)
    runs = {name: size - waiting[name] for name, size in had.items()}
    fewer = {name: runs[name] - size for name, size in event.sizes.items() if size < runs.get(name, 0)}
    if sum(fewer.values()) > 1:
        return f"{fewer} workers leave at once"
    ending = [member for member in members if not member.wanted and not member.held]
    if fewer and any(now - member.since <= STUCK_S for member in ending):
        return f"a worker leaves before another one has ended: {event}"
    if not fewer:
        return None
    required = {}
    for model in file.models:
        names = {offer.name for offer in file.offers if model in offer.served}
        ours = [member for member in members if member.offer in names]
        required[model] = max(
            own_sessions(feedback[model]) if model in feedback else 0,
            sum(member.sessions_of(model) for member in ours),
            int(any(member.suspended for member in ours)),
        )
    served = {offer.name: {model: sessions[model] for model in offer.served} for offer in file.offers}
    ready = {name: serving(members, name) for name in served}
    before = with_place([(served[name], ready[name]) for name in served], required)
    # Workers that are not ready are given up first.
    stay = [(served[name], min(ready[name], event.sizes.get(name, 0))) for name in served]
    for model, count in without_place(stay, before).items():
        return f"{required[model]} sessions of {model}, {count} of {before[model]} lose their place: {event}"
    return None
