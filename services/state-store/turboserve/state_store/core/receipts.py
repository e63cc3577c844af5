"""Receipts of prompts and typed controls, and what a chunk makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from turboserve.contracts.control_declarations import value_text
from turboserve.contracts.errors import InvalidInputError
from turboserve.contracts.sessions import ControlReceipt, PromptReceipt
from turboserve.control_values import InvalidControlError

Receipt = PromptReceipt | ControlReceipt
"""What confirms a prompt or a control. Both have a number of one sequence."""


def receipt_id(receipt: Receipt) -> str:
    """Return the id that the gateway has chosen."""
    return receipt.prompt_id if isinstance(receipt, PromptReceipt) else receipt.control_id


def receipt_text(receipt: Receipt) -> str:
    """Return what is stored, and counted as the tenant's bytes: the prompt, or the value as JSON."""
    return receipt.prompt if isinstance(receipt, PromptReceipt) else value_text(receipt.value)


@dataclass(frozen=True)
class SettledControl:
    """What a chunk made of a prompt or a control."""

    receipt: Receipt
    superseded_by: str | None = None
    """Id of the prompt, or of the value of the same control, that took effect instead. None: this one did."""


@contextmanager
def refused_as_input() -> Iterator[None]:
    """Raise InvalidInputError instead of InvalidControlError."""
    try:
        yield
    except InvalidControlError as error:
        raise InvalidInputError(error.detail, field=error.field, limit=error.limit) from None
