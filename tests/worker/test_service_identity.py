"""A worker's id belongs to its identity at the broker."""

from __future__ import annotations

import pytest

from turboserve.contracts.errors import InvalidInputError
from turboserve.subject_types import identity_of
from turboserve.worker.service.app import worker_id
from turboserve.worker.settings import Settings


def test_a_worker_without_an_id_takes_one_of_its_identity() -> None:
    names = {worker_id(Settings(), "worker.wk3") for _ in range(2)}
    assert len(names) == 2
    assert {identity_of(name) for name in names} == {"wk3"}
    assert identity_of(worker_id(Settings(), "worker")) == "wrk"


def test_an_id_of_another_identity_is_refused_before_the_model_is_loaded() -> None:
    assert worker_id(Settings(worker_id="wk3_a"), "worker.wk3") == "wk3_a"
    assert worker_id(Settings(worker_id="any"), "worker") == "any"
    for other in ("wk30_a", "wk", "any", "wrk_a"):
        with pytest.raises(InvalidInputError) as refused:
            worker_id(Settings(worker_id=other), "worker.wk3")
        assert (refused.value.field, refused.value.limit) == ("worker_id", "wk3")
