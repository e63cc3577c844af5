"""Leadership: the compare-and-set of a term. No I/O and no clock: candidates measure time themselves."""

from __future__ import annotations

from turboserve.contracts.errors import StaleTermError
from turboserve.contracts.leading import Campaign, KeepLead, LeaderRecord, StepDown
from turboserve.state_store.core.change import expect_term


def campaign(record: LeaderRecord, request: Campaign) -> LeaderRecord | None:
    """Return the row with its new holder; None if the old holder lives.

    The old holder lives if the row has a holder and has changed since the candidate read it.
    """
    unchanged = (record.term, record.beat) == (request.term, request.beat)
    if record.holder is not None and not unchanged:
        return None
    return record.model_copy(
        update={"holder": request.holder, "term": record.term + 1, "beat": record.beat + 1}
    )


def keep(record: LeaderRecord, request: KeepLead) -> LeaderRecord:
    """Return the row after a renewal. Raises StaleTermError unless its holder asks, in its term."""
    _own(record, request)
    return record.model_copy(update={"beat": record.beat + 1})


def step_down(record: LeaderRecord, request: StepDown) -> LeaderRecord:
    """Return the row without a holder. The term stays, so that the holder's last requests are not refused."""
    _own(record, request)
    return record.model_copy(update={"holder": None, "beat": record.beat + 1})


def _own(record: LeaderRecord, request: KeepLead) -> None:
    expect_term(record, request.term)
    if record.holder != request.holder:
        raise StaleTermError(
            f"{request.holder} does not lead in term {record.term}: {record.holder or 'no process'} does",
            field="holder",
            limit=record.holder,
        )
