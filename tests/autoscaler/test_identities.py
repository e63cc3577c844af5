"""The broker identity of a launched worker."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

from turboserve.autoscaler.identities import WorkerNames, credentials
from turboserve.autoscaler.settings import AutoscalerSettings
from turboserve.broker_accounts import worker_user
from turboserve.subject_types import identity_of


def test_no_two_workers_have_one_identity_while_there_is_another() -> None:
    workers: list[str] = []
    names = WorkerNames(["wk0", "wk1", "wk2"], lambda: workers)
    for _ in range(3):
        workers.append(names.new())
    assert sorted(map(identity_of, workers)) == ["wk0", "wk1", "wk2"]
    assert len(set(workers)) == 3
    gone = workers.pop(1)
    again = names.new()
    assert identity_of(again) == identity_of(gone)
    assert again != gone
    workers.append(again)
    assert identity_of(names.new()) in ("wk0", "wk1", "wk2")


def test_the_identity_that_was_given_longest_ago_comes_first() -> None:
    names = WorkerNames(["wk0", "wk1", "wk2"], list)
    assert [identity_of(names.new()) for _ in range(6)] == ["wk0", "wk1", "wk2"] * 2


def test_without_identities_all_workers_share_a_prefix() -> None:
    assert identity_of(WorkerNames((), list).new()) == "wrk"


def test_a_worker_gets_the_password_of_its_identity_alone() -> None:
    passwords = {"wk0": SecretStr("a"), "wk1": SecretStr("b")}
    assert credentials("wk1_x", passwords) == {
        "TURBOSERVE_NATS_USER": "worker.wk1",
        "TURBOSERVE_NATS_PASSWORD": "b",
    }
    for other in ("wrk_x", "wk10_x", "wk"):
        assert credentials(other, passwords) == {}


@pytest.mark.parametrize("identity", ["", "a.b", "a_b", "a b", "*", "A", "x" * 33])
def test_what_is_no_identity_is_refused(identity: str) -> None:
    with pytest.raises(ValueError, match="identity"):
        worker_user(identity)
    with pytest.raises(ValidationError, match="worker_identities"):
        AutoscalerSettings.model_validate({"worker_identities": {identity: "secret"}})
