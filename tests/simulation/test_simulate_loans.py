"""A lent worker's own sessions are never late because of the loan."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.loan_host import LoanHost
from turboserve.worker.sequence_parallel import policy

SECONDS = 10.0
LIMITS_S = (0.1, 0.5, 0.8)
"""Longest times of one exchange; the second is the shipped one."""


def late_because_of_loans(
    seeds: range, limit_s: float | None = None, breaks: float | None = None
) -> tuple[dict[int, dict[str, list[int]]], Counter[str]]:
    """Return the late chunks of donors whose sessions are in time without loans, and what took place."""
    counts: Counter[str] = Counter()
    found = {}
    for seed in seeds:
        longest_s = LIMITS_S[seed % 3] if limit_s is None else limit_s
        alone = LoanHost(seed, longest_s, lends=False, breaks=breaks)
        alone.run(SECONDS)
        if alone.late():
            continue
        counts["donors"] += 1
        host = LoanHost(seed, longest_s, breaks=breaks)
        host.run(SECONDS)
        counts.update(host.counts)
        if late := host.late():
            found[seed] = late
    return found, counts


def test_no_loan_makes_an_own_session_of_the_donor_late() -> None:
    late, counts = late_because_of_loans(range(16))
    assert late == {}
    assert counts["donors"] > 8
    assert min(counts[name] for name in ("loans", "declined", "forwards")) > 0


def test_neither_does_a_home_or_a_donor_that_breaks_in_the_middle_of_a_layer() -> None:
    late, counts = late_because_of_loans(range(14), limit_s=0.5, breaks=1.0)
    assert late == {}
    assert counts["home freezes"] > 0
    assert counts["donor dies"] + counts["donor freezes"] > 0


def test_a_donor_that_always_lends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "may_lend", lambda shrinking, limit_s: True)
    late, _ = late_because_of_loans(range(7, 8))
    assert late


def test_a_donor_that_does_not_count_the_longest_exchange_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sessions are relaxed, and a home that freezes stops the donor for longer than they can wait."""
    monkeypatch.setattr(
        policy, "may_lend", lambda shrinking, limit_s: all(one.tier == "relaxed" for one in shrinking)
    )
    late, counts = late_because_of_loans(range(2, 3), limit_s=0.8, breaks=0.5)
    assert late
    assert counts["home freezes"] > 0
