"""Sessions suspected of breaking a device compute alone, so that another failure identifies the session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import ChunkReady, SessionSpec
from turboserve.worker.engine.streams import DEVICE_LOST

FAR = 1e9


@dataclass(frozen=True)
class Batch:
    stage: str
    names: tuple[str, ...]
    computing: frozenset[str]
    """Sessions with a computation at that moment."""
    isolated: frozenset[str]


class Watch:
    """Records the sessions of each computation, by stage, and the other work under way."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[Batch] = []
        self._engine = engine
        for name in ("text", "forward", "decode"):
            self._wrap(name, monkeypatch)

    def _wrap(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        stage: Any = getattr(self._engine, name)
        compute = stage.compute

        def watched(batch: list[Any]) -> Any:
            names = tuple(getattr(each, "session", each).name for each in batch)
            isolated = frozenset(s.name for s in self._engine.sessions.values() if s.isolated)
            self.batches.append(Batch(name, names, frozenset(self._engine.computing), isolated))
            return compute(batch)

        monkeypatch.setattr(stage, "compute", watched)

    def with_(self, session: str) -> list[Batch]:
        return [batch for batch in self.batches if session in batch.names]


def chunks(events: list[Any], session: str) -> list[ChunkReady]:
    return [e for e in events if isinstance(e, ChunkReady) and e.session == session]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_suspect_shares_no_step_until_it_has_made_its_chunks(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    driver = make_driver(max_lead_s=FAR, overlap=overlap, max_batch=4, decode_batch=2)
    watch = Watch(driver.engine, monkeypatch)
    for name in ("a", "b", "c"):
        spec = SessionSpec(name, "a red circle", isolated_chunks=3 if name == "a" else 0)
        driver.engine.admit(spec, driver.now)
    made: list[Any] = driver.run(lambda events: len(chunks(events, "a")) == 3, limit=100_000)
    alone = [batch for batch in watch.batches if batch.isolated]
    assert {name for batch in alone for name in batch.names} == {"a", "b", "c"}
    assert {batch.stage for batch in alone if batch.names == ("a",)} == {"text", "forward", "decode"}
    for batch in alone:
        assert batch.names == ("a",) or "a" not in batch.names
        assert batch.computing == {"a"} or "a" not in batch.computing
    # The others take turns meanwhile, together.
    assert {"b", "c"} in [set(batch.names) for batch in alone]
    assert chunks(made, "b")
    assert chunks(made, "c")
    del watch.batches[:]
    driver.run(lambda events: len(chunks(events, "a")) == 3, limit=100_000)
    assert any(len(batch.names) > 1 for batch in watch.with_("a"))


def test_it_makes_the_same_chunks_alone(make_driver: Callable[..., Any]) -> None:
    found = []
    for isolated in (0, 2):
        driver = make_driver(max_lead_s=FAR, overlap=True)
        for name in ("a", "b"):
            spec = SessionSpec(name, f"a red {name}", isolated_chunks=isolated if name == "a" else 0)
            driver.engine.admit(spec, driver.now)
        events = driver.run(lambda events: len(chunks(events, "a")) == 4, limit=100_000)
        found.append(chunks(events, "a"))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.frames, theirs.frames)


def test_a_session_that_is_ahead_delays_no_other(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(max_lead_s=1.0, overlap=True)
    driver.engine.admit(SessionSpec("a", "a red circle", isolated_chunks=100), driver.now)
    driver.run()
    watch = Watch(driver.engine, monkeypatch)
    for name in ("b", "c"):
        driver.engine.admit(SessionSpec(name, "a red circle"), driver.now)
    events = driver.run()
    assert chunks(events, "b")
    assert chunks(events, "c")
    assert not watch.with_("a")


@pytest.mark.parametrize(("stage", "overlap"), [("text", False), ("forward", False), ("decode", True)])
def test_after_a_lost_device_it_is_known_who_was_computed_for(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, stage: str, overlap: bool
) -> None:
    driver = make_driver(overlap=overlap, decode_batch=2)
    real, batches = getattr(driver.engine, stage).compute, []

    def lost(batch: list[Any]) -> Any:
        names = {getattr(each, "session", each).name for each in batch}
        if "b" not in names:
            return real(batch)
        batches.append(names)
        raise DEVICE_LOST[0]("an illegal memory access was encountered")

    monkeypatch.setattr(getattr(driver.engine, stage), "compute", lost)
    driver.engine.admit(SessionSpec("idle", "a red circle"), driver.now)
    driver.run()
    for name in ("a", "b"):
        driver.engine.admit(SessionSpec(name, "a red circle"), driver.now)
    with pytest.raises(RuntimeError) as caught:
        driver.run()
    # A stream executor raises an error of its own, from the device's.
    assert "illegal memory access" in f"{caught.value} {caught.value.__cause__}"
    assert batches[0] <= set(driver.engine.computing) <= {"a", "b"}


def test_at_a_boundary_it_is_the_session_that_crosses(
    make_driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver(max_lead_s=1.0)
    for name in ("a", "b", "c"):
        driver.engine.admit(SessionSpec(name, "a red circle"), driver.now)
    cross = driver.engine._boundary.cross

    def lost(session: Any, now: float) -> Any:
        if session.name == "b":
            raise DEVICE_LOST[0]("unspecified launch failure")
        return cross(session, now)

    monkeypatch.setattr(driver.engine._boundary, "cross", lost)
    with pytest.raises(DEVICE_LOST):
        driver.run()
    assert driver.engine.computing == ("b",)
