"""HTTP requests with retries. A repeated request has the same `Idempotency-Key`, so it takes effect once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import httpx
import tenacity

from turboserve.client.errors import GatewayUnreachableError, ProblemError, ProtocolError, problem_error
from turboserve.client.gateways import ANSWER_S, Gateways

LONGEST_WAIT_S = 30.0
"""Longest time between two attempts. A gateway that asks for more is not tried again."""
_BACKOFF = tenacity.wait_random_exponential(multiplier=0.25, max=4.0)
AWAY = frozenset({503, 504})
"""Statuses of a gateway that does not reach its servers. Another gateway may."""


class Transport:
    """Sends requests to a gateway, to another one if it is silent, and has what a stream needs to connect."""

    def __init__(
        self,
        base_url: str | Sequence[str],
        headers: dict[str, str],
        timeout_s: float,
        attempts: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """See `AsyncClient`."""
        self.gateways = Gateways([base_url] if isinstance(base_url, str) else base_url)
        self.headers, self.timeout_s, self.attempts = headers, timeout_s, attempts
        self.http = httpx.AsyncClient(headers=headers, timeout=timeout_s, transport=transport)

    @property
    def base_url(self) -> str:
        """Address of the gateway in use."""
        return self.gateways.current

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        idempotent: bool = True,
    ) -> Any:
        """Return the JSON of a successful answer.

        Repeats a request that got no answer, or a problem with a time to wait. `idempotent`: whether a repeat
        is harmless without a key.

        Raises ProblemError, GatewayUnreachableError.
        """
        headers = {} if idempotent else {"Idempotency-Key": uuid4().hex}
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.attempts),
            wait=wait_s,
            retry=tenacity.retry_if_exception(worth_repeating),
            reraise=True,
        )
        try:
            return await retrying(self._once, method, path, json, params, headers)
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise GatewayUnreachableError(f"{self.base_url}: {reason}") from error

    async def _once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str],
    ) -> Any:
        gateway = self.base_url
        timeout_s = min(ANSWER_S, self.timeout_s) if self.gateways.several else self.timeout_s
        try:
            answer = await self.http.request(
                method, f"{gateway}{path}", json=body, params=params, headers=headers, timeout=timeout_s
            )
        except httpx.TransportError:
            self.gateways.leave(gateway)
            raise
        if answer.status_code in AWAY:
            self.gateways.leave(gateway)
        raise_for_problem(answer)
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise ProtocolError(f"{method} {path}: the answer is not JSON: {error}") from error


def raise_for_problem(answer: httpx.Response) -> None:
    """Raise ProblemError unless the answer is a success. Its body must have been read."""
    if answer.is_success:
        return
    # The answer may be that of a proxy before the gateway.
    problem = problem_in(answer.content) or {"title": f"{answer.status_code} {answer.reason_phrase}"}
    raise problem_error(answer.status_code, with_retry_after(problem, answer.headers.get("Retry-After")))


def problem_in(body: bytes) -> dict[str, Any]:
    """Return the problem in an answer's body. Empty: it has none."""
    try:
        problem = json.loads(body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def with_retry_after(problem: Mapping[str, Any], header: str | None) -> Mapping[str, Any]:
    """Return the problem with the time of the header `Retry-After`, if it has none of its own."""
    if problem.get("retry_after_s") is None and header is not None and header.strip().isdecimal():
        return {**problem, "retry_after_s": float(header)}
    return problem


def worth_repeating(error: BaseException) -> bool:
    """Whether the same request may succeed soon."""
    if isinstance(error, ProblemError):
        wait_s = error.retry_after_s
        # 504: it is not known whether the request took effect, and the key makes a repeat harmless.
        return error.status == 504 or (wait_s is not None and wait_s <= LONGEST_WAIT_S)
    return isinstance(error, httpx.TransportError)


def asked_wait_s(error: BaseException | None) -> float:
    """Time that the gateway asks to wait, seconds; 0: it asks for none."""
    return (error.retry_after_s or 0.0) if isinstance(error, ProblemError) else 0.0


def wait_s(state: tenacity.RetryCallState) -> float:
    """Time before the next attempt, seconds: a growing random time, and at least what the gateway asks."""
    error = state.outcome.exception() if state.outcome is not None else None
    return max(asked_wait_s(error), _BACKOFF(state))
