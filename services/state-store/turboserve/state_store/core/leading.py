"""Who leads: the compare-and-set of a term. No I/O and no clock; candidates judge time, by their own."""

from __future__ import annotations

from turboserve.contracts.errors import StaleTermError
from turboserve.contracts.leading import Campaign, KeepLead, LeaderRecord, StepDown


def campaign(record: LeaderRecord, request: Campaign) -> LeaderRecord | None:
    """The row with its new holder; None if it is not as the candidate has seen it: the old one lives."""
    unchanged = (record.term, record.beat) == (request.term, request.beat)
    if record.holder is not None and not unchanged:
        return None
    return record.model_copy(
        update={"holder": request.holder, "term": record.term + 1, "beat": record.beat + 1}
    )


def keep(record: LeaderRecord, request: KeepLead) -> LeaderRecord:
    """The row after a renewal. Raises StaleTermError to anyone but its holder in its term."""
    _own(record, request)
    return record.model_copy(update={"beat": record.beat + 1})


def step_down(record: LeaderRecord, request: StepDown) -> LeaderRecord:
    """The row without a holder; the term stays, so what its holder still sends is not refused for nothing."""
    _own(record, request)
    return record.model_copy(update={"holder": None, "beat": record.beat + 1})


def check(record: LeaderRecord, term: int) -> None:
    """Raises StaleTermError if `term` is not the row's."""
    if record.term != term:
        raise StaleTermError(
            f"term {term} of the {record.name} is over: {record.holder or 'nobody'} leads in {record.term}",
            field="term",
            limit=record.term,
        )


def _own(record: LeaderRecord, request: KeepLead) -> None:
    check(record, request.term)
    if record.holder != request.holder:
        raise StaleTermError(
            f"{request.holder} does not lead in term {record.term}: {record.holder or 'nobody'} does",
            field="holder",
            limit=record.holder,
        )
