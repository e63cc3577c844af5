"""The scheduler's endpoint under mutated requests, from the permitted service: typed errors only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.helpers.attack_target import Target
from tests.helpers.hostile import NOT_DOCUMENTS, Hostile, attacks
from tests.helpers.service_process import connected
from turboserve.bus import Bus
from turboserve.bus.requests import ERROR_HEADER
from turboserve.contracts.errors import ErrorBody
from turboserve.subjects import MIGRATE_SESSION

PATIENCE_S = 120.0
REFUSALS = {
    "incompatible_version",
    "invalid_input",
    "session_not_found",
    "not_found",
    "no_capacity",
    "transition_not_allowed",
}
"""There is one worker, so a session cannot migrate."""


class Gateway:
    """Calls the scheduler as the gateway does; `session` is one of alice's, `worker` the only worker."""

    def __init__(self, runner: asyncio.Runner, target: Target, bus: Bus, session: str) -> None:
        self.runner, self.target, self.session = runner, target, session
        self._bus = bus
        with target.client("alice") as client:
            self.worker: str = client.get(f"/v1/sessions/{session}").json()["worker"]

    def migrations(self) -> list[str]:
        """Return the decisions that gave the session another worker, and its current target."""
        with self.target.client("alice") as client:
            row = client.get(f"/v1/sessions/{self.session}").json()
            decisions = client.get(f"/v1/sessions/{self.session}/decisions").json()["decisions"]
        begun = [one["kind"] for one in decisions if one["kind"] in ("migrate", "migrated")]
        return begun if row["target"] is None else [*begun, row["target"]]

    def ask(self, data: bytes) -> str:
        """Send `data`. Returns the code of the refusal."""
        reply = self.runner.run(
            self._bus.client.request(
                MIGRATE_SESSION.request_subject(self._bus.user), data, timeout=PATIENCE_S
            )
        )
        problem = (reply.headers or {}).get(ERROR_HEADER)
        assert problem is not None, data
        refusal = ErrorBody.from_bytes(problem.encode())
        assert len(refusal.detail) < 2_000
        return refusal.code


@pytest.fixture(scope="module")
def gateway(target: Target) -> Iterator[Gateway]:
    session = target.session()
    with asyncio.Runner() as runner:
        bus = runner.run(connected(target.pool.nats, "gateway", PATIENCE_S))
        yield Gateway(runner, target, bus, session)
        runner.run(bus.close())
    target.end(session)


def attack(gateway: Gateway, examples: int) -> None:
    schema = MIGRATE_SESSION.request.model_json_schema()
    pids, seen = gateway.target.pids(), set[str]()
    names: dict[str, list[str | None]] = {
        "session": [gateway.session, "ses_other"],
        "worker": [gateway.worker, "wrk_other", None],
    }

    @attacks(examples)
    def each(hostile: Hostile) -> None:
        data = hostile.encoded(hostile.versioned(hostile.mutated(hostile.document(schema, names))))
        code = gateway.ask(data)
        assert code in REFUSALS, (code, data)
        seen.add(code)

    assert {"invalid_input", "session_not_found"} < seen
    assert not gateway.migrations()
    assert gateway.target.pids() == pids


def test_mutated_requests_are_refused(gateway: Gateway) -> None:
    attack(gateway, 150)


@pytest.mark.soak
def test_mutated_requests_at_length(gateway: Gateway) -> None:
    attack(gateway, 10_000)


def test_what_is_no_document_is_refused(gateway: Gateway) -> None:
    for data in NOT_DOCUMENTS:
        # Where it is an object, it has no version.
        assert gateway.ask(data) in ("invalid_input", "incompatible_version"), data[:80]
    assert not gateway.migrations()
