"""Values of typed controls in rows of a state store that knows none, as during an upgrade."""

from __future__ import annotations

import json

from tests.worker.table_bench import Bench, row
from turboserve.contracts.sessions import SessionRecord
from turboserve.worker.service import commands, events

LEFT = {"steer": "left"}


def older(record: SessionRecord) -> SessionRecord:
    """Return a row as a state store of schema version 1.1 sends it."""
    message = json.loads(record.to_text())
    del message["controls"]
    return SessionRecord.from_text(json.dumps(message))


def test_a_prompt_in_a_row_without_values_keeps_those_of_before() -> None:
    """Incident: an older state store answered one renewal, and the session lost its values for good."""
    bench = Bench()
    assert bench.run_from(row(controls=LEFT, control_seq=1)).values == LEFT
    said = row(version=3, prompt="a blue square", control_seq=2)
    bench.handle(events.Assigned(older(said)))
    assert bench.last(commands.SetConditions).values is None
    bench.renew(said.model_copy(update={"controls": LEFT}))
    # A control may have come with the prompt.
    again = bench.last(commands.SetConditions)
    assert (again.control_seq, again.values) == (2, LEFT)
    for record in (older(said), said.model_copy(update={"controls": LEFT})):
        bench.renew(record)
        bench.none(commands.SetConditions)


def test_a_session_that_starts_again_from_a_row_without_values_has_those_that_are_known() -> None:
    bench = Bench()
    known = row(controls=LEFT, control_seq=1)
    run = bench.run_from(known).run
    bench.renew(older(known))
    bench.handle(events.AdmissionRefused("s1", run, "no memory", False))
    bench.now += 60.0
    bench.handle(events.Tick())
    assert bench.last(commands.Admit).values == LEFT


def test_a_session_that_starts_from_a_row_without_values_gets_them_later() -> None:
    bench = Bench()
    known = row(controls=LEFT, control_seq=1)
    assert bench.run_from(older(known)).values == {}
    bench.renew(older(known))
    bench.none(commands.SetConditions)
    bench.renew(known)
    later = bench.last(commands.SetConditions)
    assert (later.control_seq, later.values) == (1, LEFT)
    bench.renew(known)
    bench.none(commands.SetConditions)
