"""Checks the problem in an answer."""

from __future__ import annotations

from typing import Any

import httpx


def problem(answer: httpx.Response, status: int, code: str, field: str | None = None) -> dict[str, Any]:
    """Assert that the answer is this problem. Returns its body."""
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    assert (body["code"], body.get("field")) == (code, field)
    return body
