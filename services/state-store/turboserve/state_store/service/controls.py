"""Prompts and typed controls: each request is one transaction on one session's row."""

from __future__ import annotations

from collections.abc import Iterable

from turboserve.clock import Clock
from turboserve.contracts.control_declarations import ControlDeclaration
from turboserve.contracts.errors import ConflictError, InvalidInputError
from turboserve.contracts.requests import SetControl, SubmitPrompt
from turboserve.contracts.sessions import ControlReceipt, PromptReceipt, RateLeft, SessionRecord
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.served_classes import served_class
from turboserve.state_store.core import controls as rules
from turboserve.state_store.core.change import Change, traced
from turboserve.state_store.core.receipts import Receipt, receipt_text
from turboserve.state_store.ports.database import Database, UnitOfWork
from turboserve.state_store.publish.canaries import LogStatus
from turboserve.state_store.service.admission import Admission
from turboserve.state_store.service.transactions import PostCommit, locked
from turboserve.state_store.settings import Settings
from turboserve.telemetry import traceparent


class Controls:
    """The endpoints of prompts and controls, without their transport. All may raise UnavailableError."""

    def __init__(
        self, database: Database, post_commit: PostCommit, log: LogStatus, clock: Clock, settings: Settings
    ) -> None:
        self._database, self._post_commit, self._clock = database, post_commit, clock
        self._admission = Admission(log, clock, settings)

    async def submit_prompt(self, request: SubmitPrompt) -> PromptReceipt:
        async with self._database.transaction() as db:
            record = (await locked(db, request)).record
            first = await db.controls.receipt(request.prompt_id)
            if first is not None:
                return _repeated(first, record, request)
            change, receipt = rules.submit_prompt(record, request, self._clock.wall())
            change, rates = await self._accept(db, record, change, receipt)
        await self._post_commit.changed(change.record)
        return receipt.model_copy(update={"rates": rates})

    async def set_control(self, request: SetControl) -> ControlReceipt:
        async with self._database.transaction() as db:
            record = (await locked(db, request)).record
            first = await db.controls.receipt(request.control_id)
            if first is not None:
                return _repeated_control(first, record, request)
            declared = await declared_controls(db, record) or ()
            change, receipt = rules.set_control(record, request, declared, self._clock.wall())
            change, rates = await self._accept(db, record, change, receipt)
        await self._post_commit.changed(change.record)
        return receipt.model_copy(update={"rates": rates})

    async def _accept(
        self, db: UnitOfWork, record: SessionRecord, change: Change, receipt: Receipt
    ) -> tuple[Change, tuple[RateLeft, ...]]:
        """Charge the tenant and the key, and write the change."""
        change = traced(change, "prompt_traceparent", traceparent())
        tenant, rates = await self._admission.prompt(db, record, receipt_text(receipt))
        await db.changes.write(change, tenant=tenant)
        await db.controls.insert(receipt)
        return change, rates


async def declared_controls(db: UnitOfWork, record: SessionRecord) -> tuple[ControlDeclaration, ...] | None:
    """Return the controls of the session's model: by its owner, or else by the newest worker that has any.

    If no worker has loaded the model, those that are gone count: a pool may have shrunk to zero. None: not
    known, since there were none.
    """
    owner = None if record.worker is None else await db.workers.get(record.worker)
    if owner is not None and (served := served_class(owner, record.model)) is not None:
        return served.controls
    found = _newest(record.model, await db.workers.page(include_gone=False))
    if found is not None:
        return found
    gone = [each for each in await db.workers.page(include_gone=True) if each.phase is WorkerPhase.GONE]
    return _newest(record.model, gone)


def _newest(model: str, workers: Iterable[WorkerRecord]) -> tuple[ControlDeclaration, ...] | None:
    """Return the controls of the newest worker that declares some for the model; None: none has loaded it."""
    serving = [
        (bool(served.controls), each.started_at, served.controls)
        for each in workers
        if (served := served_class(each, model)) is not None
        # A worker that still loads declares none.
        and (served.controls or each.phase is not WorkerPhase.STARTING)
    ]
    return max(serving, key=lambda one: one[:2])[2] if serving else None


def _repeated(first: Receipt, record: SessionRecord, request: SubmitPrompt) -> PromptReceipt:
    if first.session != record.id:
        raise ConflictError(f"the prompt id {request.prompt_id} is taken", field="prompt_id")
    if not isinstance(first, PromptReceipt) or first.prompt != request.prompt:
        # A client that numbers its messages from 1 again: a receipt would lose the new prompt.
        raise InvalidInputError(
            f"the prompt id {request.prompt_id} was used for another prompt", field="prompt_id"
        )
    return first


def _repeated_control(first: Receipt, record: SessionRecord, request: SetControl) -> ControlReceipt:
    if first.session != record.id:
        raise ConflictError(f"the control id {request.control_id} is taken", field="control_id")
    same = isinstance(first, ControlReceipt) and first.name == request.name and first.value == request.value
    if not isinstance(first, ControlReceipt) or not same:
        raise InvalidInputError(
            f"the control id {request.control_id} was used for another value", field="control_id"
        )
    return first
