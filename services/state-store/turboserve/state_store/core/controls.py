"""The rules of prompts and typed controls: they are accepted, and a chunk settles them. No I/O, no clock.

Prompts and controls of a session share one number, `control_seq`, so that they are applied in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from turboserve.contracts import events
from turboserve.contracts.control_declarations import VALUE_LIMIT, ControlDeclaration, within
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.requests import SetControl, SubmitPrompt
from turboserve.contracts.sessions import ControlReceipt, PromptReceipt, SessionRecord
from turboserve.control_values import InvalidControlError, check_value
from turboserve.state_store.core.change import Change, change_id, event_id, step
from turboserve.state_store.core.receipts import SettledControl, refused_as_input
from turboserve.state_store.core.sessions import storable


def submit_prompt(record: SessionRecord, request: SubmitPrompt, now: float) -> tuple[Change, PromptReceipt]:
    """Set the prompt, which a worker applies at a chunk boundary. Also allowed while suspended."""
    storable("prompt", request.prompt)
    after = _accepted(record, request.drop_buffer, now, prompt=request.prompt)
    receipt = PromptReceipt(
        session=record.id,
        prompt_id=request.prompt_id,
        control_seq=after.control_seq,
        prompt=request.prompt,
        accepted_at=now,
    )
    event = events.PromptAccepted(
        id=change_id(after, "prompt"),
        at=now,
        record=after,
        prompt_id=request.prompt_id,
        control_seq=after.control_seq,
        prompt=request.prompt,
    )
    return Change(after, (event,)), receipt


def set_control(
    record: SessionRecord, request: SetControl, declared: Sequence[ControlDeclaration], now: float
) -> tuple[Change, ControlReceipt]:
    """Set a control's value, which a worker applies at a chunk boundary. Also allowed while suspended.

    `declared`: the controls of the session's model. Raises InvalidInputError for another control or value, or
    a fixed control, and TransitionError if the session has ended.
    """
    values = {name: value for name, value in record.controls.items() if name != request.name}
    if request.value is not None:
        values[request.name] = request.value
    after = _accepted(record, request.drop_buffer, now, controls=values)
    with refused_as_input():
        check_value(declared, request.name, request.value, record.model)
    if any(each.fixed for each in declared if each.name == request.name):
        detail = f"name: {request.name} is fixed: it is set when a session is created, in `controls`"
        raise InvalidInputError(detail, field="name", limit="fixed")
    receipt = ControlReceipt(
        session=record.id,
        control_id=request.control_id,
        control_seq=after.control_seq,
        name=request.name,
        value=request.value,
        accepted_at=now,
    )
    event = events.ControlAccepted(
        id=change_id(after, "control"),
        at=now,
        record=after,
        control_id=request.control_id,
        control_seq=after.control_seq,
        name=request.name,
        value=request.value,
    )
    return Change(after, (event,)), receipt


def check_initial(
    values: Mapping[str, JsonValue], declared: Sequence[ControlDeclaration], model: str
) -> None:
    """Check the values with which a session begins. Raises InvalidInputError, with the field `controls.NAME`.

    `declared`: the controls of the session's model.
    """
    fixed = {each.name for each in declared if each.fixed}
    for name, value in values.items():
        try:
            check_value(declared, name, value, model)
            if name not in fixed:
                within(value, VALUE_LIMIT)
        except InvalidControlError as error:
            part = error.field.removeprefix("value") if error.field != "name" else ""
            field, reason = f"controls.{name}{part}", error.detail.partition(": ")[2]
            raise InvalidInputError(f"{field}: {reason}", field=field, limit=error.limit) from None
        except ValueError as error:
            field = f"controls.{name}"
            raise InvalidInputError(f"{field}: {error}", field=field, limit=VALUE_LIMIT) from None


def _accepted(record: SessionRecord, drop_buffer: bool, now: float, **conditions: Any) -> SessionRecord:
    """Return the row with new conditions, under the next number."""
    seq = record.control_seq + 1
    return step(
        record,
        now,
        **conditions,
        control_seq=seq,
        drop_buffer_seq=seq if drop_buffer else record.drop_buffer_seq,
        requested_at=now if drop_buffer else record.requested_at,
    )


def settle(record: SessionRecord, settled: Sequence[SettledControl], chunk_index: int, now: float) -> Change:
    """Report what became of prompts and controls, which one chunk settles. Does not raise the version.

    `settled` is not empty, and in the order of `control_seq`.
    """
    found: list[events.SessionEvent] = []
    for each in settled:
        record = record.model_copy(update={"event_sequence": record.event_sequence + 1})
        found.append(_settled_event(record, each, chunk_index, now))
    return Change(record, tuple(found))


def _settled_event(
    record: SessionRecord, settled: SettledControl, chunk_index: int, now: float
) -> events.SessionEvent:
    receipt, winner = settled.receipt, settled.superseded_by
    name = event_id(record.id, "applied" if winner is None else "superseded", receipt.control_seq)
    common: dict[str, Any] = {"id": name, "at": now, "record": record} | receipt.model_dump(
        exclude={"session", "accepted_at", "rates"}
    )
    is_prompt = isinstance(receipt, PromptReceipt)
    if winner is None:
        applied = events.PromptApplied if is_prompt else events.ControlApplied
        return applied(**common, chunk_index=chunk_index)
    superseded = events.PromptSuperseded if is_prompt else events.ControlSuperseded
    return superseded(**common, superseded_by=winner)
