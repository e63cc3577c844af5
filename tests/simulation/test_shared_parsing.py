"""Messages that calm mode hands over without parsing them."""

from __future__ import annotations

import pytest

from turboserve.contracts.base import Contract
from turboserve.contracts.chunks import ChunkHeader
from turboserve.contracts.requests import CreateSession
from turboserve.contracts.workers import LoadReport, Playhead
from turboserve.simulation.calm import run_calm
from turboserve.simulation.shared_parsing import _Sent


def test_a_message_that_is_handed_over_equals_what_its_bytes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    get = _Sent.get
    kinds: set[type[Contract]] = set()
    different: list[tuple[Contract, Contract]] = []

    def compared(self: _Sent, kind: type[Contract], text: str | bytes) -> Contract | None:
        found = get(self, kind, text)
        if found is not None:
            kinds.add(kind)
            parsed = kind.model_validate_json(text)
            if parsed != found:
                different.append((found, parsed))
        return found

    monkeypatch.setattr(_Sent, "get", compared)
    result = run_calm(seed=3, workers=3, slots=4, sessions=11, seconds=30.0)

    assert different == []
    assert {ChunkHeader, CreateSession, LoadReport, Playhead} <= kinds
    assert not any(result["violations"].values())
    monkeypatch.undo()
    assert run_calm(seed=3, workers=3, slots=4, sessions=11, seconds=30.0)["digest"] == result["digest"]
