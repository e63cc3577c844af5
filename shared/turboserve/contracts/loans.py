"""Loans: workers of one host that compute the forwards of one session together."""

from __future__ import annotations

from enum import StrEnum

from turboserve.contracts.base import Contract, Id


class LoanRole(StrEnum):
    """A worker's part in a loan between two workers of one host."""

    HOME = "home"
    """It owns the session, and borrows the other worker's device."""
    DONOR = "donor"
    """It lends its device: it computes half of each forward of the other worker's session."""


class WorkerLoan(Contract):
    """The loan in which a worker takes part. It may end at any time, and changes no owner."""

    role: LoanRole
    peer: Id
    """The other worker."""
