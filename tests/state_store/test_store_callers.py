"""Limits on a caller's requests beyond its role's endpoints."""

from __future__ import annotations

import pytest

from turboserve.contracts.errors import ForbiddenError
from turboserve.contracts.requests import FailSession, GetLatents, Renew, SessionRef, WorkerGone
from turboserve.contracts.weights import FindWeights
from turboserve.contracts.workers import LoadReport, WorkerPhase
from turboserve.state_store.endpoints import check
from turboserve.subject_types import Caller

SCHEDULER, AUTOSCALER = Caller("scheduler"), Caller("autoscaler")


@pytest.mark.parametrize("missing", ["term", "renewed_at"])
def test_a_scheduler_declares_a_worker_gone_only_with_its_term_and_what_it_read(missing: str) -> None:
    whole = WorkerGone(worker="w", reason="silent", term=3, renewed_at=1.0)
    check(SCHEDULER, whole)
    request = whole.model_copy(update={missing: None})
    with pytest.raises(ForbiddenError) as refused:
        check(SCHEDULER, request)
    assert refused.value.field == missing
    check(AUTOSCALER, request)


def test_a_worker_with_a_user_of_its_own_speaks_for_itself() -> None:
    load = LoadReport(worker="wk1_a", model="toyworld", capacity=4, phase=WorkerPhase.READY)
    fail = FailSession(session="s", epoch=1, worker="wk1_a", reason="out of memory")
    latents = GetLatents(session="s", index=0, worker="wk1_a")
    weights = FindWeights(worker="wk1_a", model="toyworld")
    for request in (Renew(load=load), fail, latents, weights):
        check(Caller("worker", "wk1"), request)
        # Workers that share a user cannot be distinguished.
        check(Caller("worker"), request)
        with pytest.raises(ForbiddenError) as refused:
            check(Caller("worker", "wk2"), request)
        assert refused.value.field == "worker"
    check(Caller("worker", "wk2"), SessionRef(session="s"))
