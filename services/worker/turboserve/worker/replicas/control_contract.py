"""The check of a model's typed controls: valid declarations, and embeddings that the engine can rely on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from pydantic import JsonValue
from torch import Tensor

from turboserve.contracts.control_declarations import ControlDeclaration
from turboserve.control_values import InvalidControlError, allowed_values, check_declarations
from turboserve.worker.engine.control_encoder import ControlEncoder
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.interface import ChunkReady, Control, ControlApplied, SessionSpec
from turboserve.worker.engine.models import Models
from turboserve.worker.replicas.comparison import same_chunks
from turboserve.worker.replicas.contract_steps import SESSION, chunks, migrate, require

CHECK = "controls"


def check_controls(
    models: Models,
    again: ControlEncoder | None,
    prompts: Sequence[str],
    engine: Callable[[], Engine],
    spec: SessionSpec,
    count: int,
) -> None:
    """Raise ModelContractError unless the model's controls keep the engine's rules. Without controls, pass.

    `again`: the controls of a second load. `spec`: a session, of which `count` chunks are compared. A schema
    has an `enum` or `examples`, whose first value changes the picture of the session. Fixed controls are set
    with the session, others after its first chunk.
    """
    if models.controls is None:
        require(CHECK, again is None, "a second load declares controls")
        return
    declared = models.controls.declarations
    require(CHECK, bool(declared), "Models.controls declares no control; use None")
    try:
        check_declarations(declared)
    except InvalidControlError as error:
        require(CHECK, False, error.detail)
    require(CHECK, again is not None and again.declarations == declared, "two loads declare different ones")
    samples = {each.name: _sample(each) for each in declared}
    for name, value in samples.items():
        refused = f"the first value of {name}, {value!r}, is not one that its schema allows"
        require(CHECK, name in allowed_values(declared, {name: value}), refused)
    _check_embeddings(models, models.controls, prompts, samples)
    for each in declared:
        check = _check_fixed if each.fixed else _check_session
        check(each.name, {each.name: samples[each.name]}, engine, spec, count)


def _sample(declared: ControlDeclaration) -> JsonValue:
    found = declared.value_schema.get("enum") or declared.value_schema.get("examples")
    require(CHECK, isinstance(found, list), f"the schema of {declared.name} has neither enum nor examples")
    first: JsonValue = found[0] if isinstance(found, list) else None
    return first


@torch.inference_mode()
def _check_embeddings(
    models: Models, controls: ControlEncoder, prompts: Sequence[str], samples: dict[str, JsonValue]
) -> None:
    plain = models.text.encode(prompts)
    free = controls.encode(prompts, [{} for _ in prompts])
    require(CHECK, _same(free, plain), "without values, an embedding is not the prompt's own")
    mixed = controls.encode(prompts, [{}, *(samples for _ in prompts[1:])])
    require(CHECK, _same(mixed[:1], plain[:1]), "the values of one session change the embedding of another")
    require(CHECK, mixed.shape == plain.shape, f"embeddings have the shape {tuple(mixed.shape)}")
    require(CHECK, bool(mixed.isfinite().all()), "an embedding is not finite")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _check_session(
    name: str, values: dict[str, JsonValue], engine: Callable[[], Engine], spec: SessionSpec, count: int
) -> None:
    """Compare a session with one under the control, with its replay, and with one that migrates under it."""
    stayed = _played(engine(), spec, count)
    made, switch = _controlled(engine(), spec, values, count)
    before = same_chunks(made[:switch], stayed[:switch])
    require(CHECK, before, f"{name} changed a chunk before the boundary at which it was applied")
    require(CHECK, not same_chunks(made[switch:], stayed[switch:]), f"the value of {name} changed nothing")
    replayed, _ = _controlled(engine(), spec, values, count)
    require(CHECK, same_chunks(replayed, made), f"a replay with the same value of {name} differs")
    source, target = engine(), engine()
    source.admit(spec, time.monotonic())
    migrated = chunks(source, 1)
    source.control(SESSION, Control(1, values=values))
    migrated += migrate(source, target)
    migrated += chunks(target, count - len(migrated))
    require(CHECK, same_chunks(migrated, made), f"a session that was migrated under {name} differs")


def _check_fixed(
    name: str, values: dict[str, JsonValue], engine: Callable[[], Engine], spec: SessionSpec, count: int
) -> None:
    """Compare a session with one that begins with the value, with its replay, and with one that migrates."""
    begun = replace(spec, values=values)
    made = _played(engine(), begun, count)
    differs = not same_chunks(made, _played(engine(), spec, count))
    require(CHECK, differs, f"the value of {name} changed nothing")
    replayed = _played(engine(), begun, count)
    require(CHECK, same_chunks(replayed, made), f"a replay with the same value of {name} differs")
    source, target = engine(), engine()
    source.admit(begun, time.monotonic())
    migrated = migrate(source, target)
    migrated += chunks(target, count - len(migrated))
    require(CHECK, same_chunks(migrated, made), f"a session that was migrated under {name} differs")


def _played(engine: Engine, spec: SessionSpec, count: int) -> list[ChunkReady]:
    engine.admit(spec, time.monotonic())
    return chunks(engine, count)


def _controlled(
    engine: Engine, spec: SessionSpec, values: dict[str, JsonValue], count: int
) -> tuple[list[ChunkReady], int]:
    """Set the values after one chunk. Returns all chunks, and the first under the values."""
    engine.admit(spec, time.monotonic())
    made = chunks(engine, 1)
    engine.control(SESSION, Control(1, values=values))
    applied: list[ControlApplied] = []
    made += chunks(engine, count - 1, applied)
    require(CHECK, bool(applied), "no chunk showed the value")
    return made, applied[-1].chunk
