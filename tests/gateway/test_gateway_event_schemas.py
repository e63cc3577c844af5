"""What clients get of each event in the log."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.chunk_headers import chunk_header
from tests.helpers.stream_protocol import check_sent
from turboserve.contracts import events
from turboserve.contracts.fidelity import ChunkFidelity
from turboserve.contracts.public_events import SCHEMAS, public_event
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.gateway.stream.protocol import ChunkMessage

RECORD = SessionRecord(
    id="ses_a",
    tenant="secret",
    model="m",
    prompt="the newest prompt",
    seed=1,
    phase=Phase.MIGRATING,
    version=9,
    epoch=2,
    worker="wk_a",
    target="wk_b",
    control_seq=5,
    event_sequence=7,
    reason="of the row",
    created_at=1.0,
    updated_at=1.0,
)
PROMPT: dict[str, Any] = {"prompt_id": "prm_a", "control_seq": 4, "prompt": "a blue square"}
CONTROL: dict[str, Any] = {"control_id": "ctl_a", "control_seq": 5, "name": "camera", "value": {"yaw": 1.5}}
OWN: dict[type[events.SessionEvent], dict[str, Any]] = {
    events.SessionCreated: {},
    events.SessionPlaced: {"kind": "rebuild", "previous_worker": "wk_c", "previous_weights": "b2a1c3"},
    events.SessionMigrating: {"reason": "wk_b is less loaded"},
    events.SessionMigrated: {"previous_worker": "wk_c"},
    events.SessionMigrationAbandoned: {"target": "wk_d", "reason": "wk_d is gone"},
    events.SessionSuspended: {},
    events.SessionResumeRequested: {},
    events.SessionChanged: {},
    events.SessionEnded: {},
    events.PromptAccepted: PROMPT,
    events.PromptApplied: {**PROMPT, "chunk_index": 3},
    events.PromptSuperseded: {**PROMPT, "superseded_by": "prm_b"},
    events.ControlAccepted: CONTROL,
    events.ControlApplied: {**CONTROL, "chunk_index": 3},
    events.ControlSuperseded: {**CONTROL, "superseded_by": "ctl_b"},
}
"""Event → its members besides those that all events have."""


def test_every_event_is_here() -> None:
    assert set(OWN) == set(SCHEMAS)


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_an_event_has_its_own_members_and_the_session_right_after_it(kind: Any) -> None:
    event = kind(id="ev_a", at=1.5, record=RECORD, **OWN[kind])
    sent = json.loads(public_event(event).text())
    check_sent(sent)
    reason = {"reason": "of the row"} if kind is events.SessionEnded else {}
    assert sent == {
        "type": event.type,
        "sequence": 7,
        "id": "ev_a",
        "at": "1970-01-01T00:00:01.500000Z",
        "phase": "migrating",
        "activity": "watching",
        "epoch": 2,
        "worker": "wk_a",
        "target": "wk_b",
        "control_seq": 5,
        **reason,
        **OWN[kind],
    }


def test_members_that_would_be_null_are_left_out() -> None:
    record = RECORD.model_copy(update={"worker": None, "target": None, "reason": None})
    for event in (
        events.SessionPlaced(id="ev_a", at=1.5, record=record, kind="place"),
        events.SessionEnded(id="ev_b", at=1.5, record=record),
    ):
        sent = json.loads(public_event(event).text())
        check_sent(sent)
        assert not {"worker", "target", "previous_worker", "previous_weights", "reason"} & set(sent)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "slack_s": -0.25,
            "credit_s": 1e-7,
            "tier": "urgent",
            "compute_s": 0.1,
            "published_at": 1.7e9 + 1 / 3,
        },
        {"fidelity": ChunkFidelity(steps=3, window_chunks=2, sparsity=0.5, quality=0.97)},
        {"fidelity": ChunkFidelity(steps=3, window_chunks=2, sparsity=0.0)},
    ],
)
def test_a_chunk_is_announced_with_the_text_of_its_schema(changes: dict[str, Any]) -> None:
    header = chunk_header("ses_a", 3, 2, "wk_a", control_seq=4).model_copy(update=changes)
    text = ChunkMessage.text_of(header, 1234)
    sent = json.loads(text)
    # Members that are null are left out of a message, and its class has no defaults for them.
    known = {**dict.fromkeys(("slack_s", "credit_s", "tier", "fidelity")), **sent}
    if header.fidelity is not None:
        known["fidelity"] = {"quality": None, **sent["fidelity"]}
    assert ChunkMessage.model_validate(known).text() == text
    given = ("index", "epoch", "worker", "start_s", "control_seq", "compute_s", "slack_s", "credit_s", "tier")
    assert sent["bytes"] == 1234
    assert sent["duration_s"] == 0.75
    assert [sent.get(name) for name in given] == [getattr(header, name) for name in given]
