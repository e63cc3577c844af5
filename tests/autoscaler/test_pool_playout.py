"""The pool's status has the playout slack of each member's sessions, by its newest load report."""

from __future__ import annotations

from turboserve.autoscaler.pool_members import PoolMember, playout_of
from turboserve.contracts.fidelity import ChunkFidelity, SessionSlack, Tier
from turboserve.contracts.loans import LoanRole, WorkerLoan
from turboserve.contracts.workers import HeldSession, LoadReport


def held(session: str, slack: SessionSlack | None, *, lowered: bool = False) -> HeldSession:
    fidelity = ChunkFidelity(steps=2, window_chunks=1, quality=0.9) if lowered else None
    return HeldSession(session=session, epoch=1, next_chunk=0, resident=True, slack=slack, fidelity=fidelity)


def test_a_members_playout_is_the_least_of_its_sessions_and_counts_their_tiers() -> None:
    found = playout_of(
        LoadReport(
            worker="w",
            model="m",
            capacity=4,
            started_at=0.0,
            quality=0.95,
            loan=WorkerLoan(role=LoanRole.HOME, peer="w2"),
            sessions=(
                held("a", SessionSlack(slack_s=2.0, credit_s=1.5, tier=Tier.RELAXED)),
                held("b", SessionSlack(slack_s=-0.5, credit_s=-1.0, tier=Tier.URGENT), lowered=True),
                held("suspended", None, lowered=True),
            ),
        )
    )
    assert (found.slack_s, found.credit_s) == (-0.5, -1.0)
    assert (found.urgent, found.normal, found.relaxed) == (1, 0, 1)
    assert (found.lowered, found.quality) == (1, 0.95)
    assert found.loan == WorkerLoan(role=LoanRole.HOME, peer="w2")


def test_a_member_without_a_running_session_has_no_slack_and_a_new_worker_no_playout() -> None:
    report = LoadReport(worker="w", model="m", capacity=4, started_at=0.0)
    assert playout_of(report).slack_s is None
    member = PoolMember("p-0", 0, worker="w")
    member.playout = playout_of(report)
    member.occupy("w2", 1.0)
    assert member.playout is None
