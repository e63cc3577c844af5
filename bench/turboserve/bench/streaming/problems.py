"""Problems with which a gateway refuses a test viewer's requests."""

from __future__ import annotations

import json
from typing import Any


class ProblemError(Exception):
    """The gateway refused a request; `problem` is its RFC 9457 body, which states what to change."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(f"{status}: {problem.get('detail') or problem.get('title') or problem}")
        self.status = status
        self.problem = problem


def json_of(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body or b"{}")
    except ValueError:
        return {"detail": body.decode(errors="replace")}
    return value if isinstance(value, dict) else {"detail": str(value)}
