"""The order in which waiting sessions get slots, fair between tenants."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping

from turboserve.scheduler.session_view import SessionView

Share = tuple[str, str]
"""Model and tenant: tenants share the slots of one model."""


def share_of(session: SessionView) -> Share:
    return session.record.model, session.record.tenant


def in_fair_order(
    sessions: Iterable[SessionView], slots: Mapping[Share, int], served: Mapping[Share, int]
) -> list[SessionView]:
    """Order the sessions for slots (max-min fairness by tenant).

    Each next slot of a model goes to the tenant with the fewest slots of that model, including those that
    this order gives it. Ties go to the tenant that got a slot longest ago, then to the tenant whose next
    session has waited longest. Within a tenant, the session that has waited longest comes first; after a
    restart of the scheduler, the session that was created first.

    So of two tenants with waiting sessions, neither gets ahead of the other by more than one slot, and single
    slots alternate between them, however many sessions wait. With one tenant, that is first come, first
    served.

    `slots`: slots of each tenant, without those of `sessions`. `served`: number of each tenant's last
    placement; later placements have larger numbers. Cost: O(n log n).
    """
    queues: defaultdict[Share, list[SessionView]] = defaultdict(list)
    for session in sessions:
        queues[share_of(session)].append(session)
    for queue in queues.values():
        queue.sort(key=_waited, reverse=True)
    heap = [
        (slots.get(share, 0), served.get(share, 0), _waited(queue[-1]), share)
        for share, queue in queues.items()
    ]
    heapq.heapify(heap)
    order: list[SessionView] = []
    newest = max(served.values(), default=0)
    while heap:
        count, _, _, share = heap[0]
        queue = queues[share]
        order.append(queue.pop())
        if queue:
            heapq.heapreplace(heap, (count + 1, newest + len(order), _waited(queue[-1]), share))
        else:
            heapq.heappop(heap)
    return order


def _waited(session: SessionView) -> tuple[float, float, str]:
    since = 0.0 if session.waiting is None else session.waiting.since
    return since, session.record.created_at, session.id
