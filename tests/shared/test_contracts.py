"""Every message survives serialization with any contents; a reader ignores what it does not know."""

from __future__ import annotations

import math
import types
import typing
from enum import StrEnum
from operator import attrgetter
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, JsonValue, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from turboserve import subjects
from turboserve.contracts import chunks, errors, events, requests
from turboserve.contracts.autoscale import LevelParameters, ProfileTable, Provenance
from turboserve.contracts.base import ID_PATTERN, NUMBER_LIMIT, Contract, Text, is_id
from turboserve.contracts.pool import LoadFeedback
from turboserve.contracts.sessions import PROMPT_LIMIT, TRANSITIONS, Phase
from turboserve.contracts.versions import stamped


def every(root: type[Contract]) -> list[type[Contract]]:
    found = [] if root.__name__.startswith("_") or root is Contract else [root]
    for child in root.__subclasses__():
        found += every(child)
    return found


CONTRACTS = sorted(set(every(Contract)), key=lambda kind: kind.__qualname__)
IDS = st.from_regex(ID_PATTERN.rstrip("$") + r"\Z", fullmatch=True)
Kind = TypeVar("Kind", bound=BaseModel)
TEXT_CHECKS = typing.get_args(Text)[1:]
"""What validates `Text`."""
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-NUMBER_LIMIT, NUMBER_LIMIT) | st.floats(-1e9, 1e9) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
"""Values of any type."""


def values(kind: Any, metadata: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Generate any value that the annotation allows."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return values(arguments[0], (*arguments[1:], *metadata))
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(argument, metadata) for argument in arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    limits = dict(bound for item in metadata for bound in bounds(item))
    least = limits.get("min_length", 0)
    if origin is tuple:
        if arguments[-1:] == (Ellipsis,):
            most = min(limits.get("max_length", 3), 3)
            return st.lists(values(arguments[0]), min_size=least, max_size=most).map(tuple)
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), min_size=least, max_size=3)
    if kind is type(None):
        return st.none()
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return built(kind)
    if kind is JsonValue or kind is Any:
        return JSON
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return st.sampled_from(list(kind))
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(limits.get("ge", -(2**62)), limits.get("le", 2**62))
    if kind is float:
        low = limits.get("ge", limits.get("gt", -1e9))
        high = limits.get("le", limits.get("lt", 1e9))
        return st.floats(low, high, exclude_min="gt" in limits, exclude_max="lt" in limits, allow_nan=False)
    if kind is SecretStr:
        # The only such string is a migration's key.
        return st.binary(min_size=32, max_size=32).map(bytes.hex)
    assert kind is str, kind
    for item in metadata:
        if pattern := dict(bounds(item)).get("pattern"):
            return (
                IDS if pattern == ID_PATTERN else st.from_regex(pattern.rstrip("$") + r"\Z", fullmatch=True)
            )
    text = TEXT.filter(lambda text: len(text) >= limits.get("min_length", 0))
    refused = any(isinstance(item, AfterValidator) and item in TEXT_CHECKS for item in metadata)
    return text.filter(lambda text: "\0" not in text) if refused else text


def bounds(item: Any) -> list[tuple[str, Any]]:
    if isinstance(item, FieldInfo):
        return [bound for inner in item.metadata for bound in bounds(inner)]
    names = ("ge", "le", "gt", "lt", "min_length", "max_length", "pattern")
    return [(name, getattr(item, name)) for name in names if getattr(item, name, None) is not None]


@st.composite
def tables(draw: st.DrawFn) -> ProfileTable:
    """Generate tables without gaps, the only valid ones."""
    ends = sorted(draw(st.lists(st.floats(0.1, 1e6), max_size=3, unique=True)))
    levels = [
        draw(built(LevelParameters)).model_copy(
            update={"level": n + 1, "volatility_from": start, "volatility_to": end}
        )
        for n, (start, end) in enumerate(zip([0.0, *ends], [*ends, None], strict=True))
    ]
    return ProfileTable(levels=tuple(levels), provenance=draw(built(Provenance)))


_built: dict[type[BaseModel], st.SearchStrategy[Any]] = {}
"""Many contracts have the same parts."""


def built(kind: type[Kind]) -> st.SearchStrategy[Kind]:
    if kind is ProfileTable:
        return cast("st.SearchStrategy[Kind]", tables())
    if kind not in _built:
        fields = {
            name: values(field.annotation, tuple(field.metadata)) for name, field in kind.model_fields.items()
        }
        _built[kind] = st.builds(kind, **fields)
    return _built[kind]


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", CONTRACTS, ids=lambda kind: kind.__name__)
def test_it_is_read_as_it_was_written(kind: type[Contract]) -> None:
    @given(built(kind))
    @settings(max_examples=4 if settings().derandomize else 60)
    def round_trip(message: Contract) -> None:
        assert kind.from_bytes(message.to_bytes()) == message

    round_trip()


@pytest.mark.parametrize("kind", CONTRACTS, ids=lambda kind: kind.__name__)
def test_it_is_frozen_and_ignores_what_a_newer_sender_adds(kind: type[Contract]) -> None:
    # What a newer sender adds does not depend on the rest.
    @given(built(kind))
    @settings(max_examples=1, deadline=None, derandomize=True)
    def check(message: Contract) -> None:
        newer = message.to_bytes()[:-1] + b',"from_the_future":[1]}'
        assert kind.from_bytes(newer) == message
        for name in list(kind.model_fields)[:1]:
            with pytest.raises(ValidationError):
                setattr(message, name, None)

    check()


def test_a_message_of_valid_fields_has_the_defaults_of_all_others() -> None:
    fields: dict[str, Any] = {
        "model": "m",
        "rho_max": 0.5,
        "required": 3,
        "waiting": 1,
        "capacity": 2,
        "workers": 1,
    }
    fast, valid = LoadFeedback.of_valid_fields({**fields, "at": 7.0}), LoadFeedback(**fields, at=7.0)
    assert fast == valid
    assert LoadFeedback.from_bytes(fast.to_bytes()) == valid


@pytest.mark.parametrize("kind", typing.get_args(events.SessionEvent) + typing.get_args(events.WorkerEvent))
def test_events_are_distinguished_by_their_type(kind: type[Contract]) -> None:
    @given(built(kind))
    @settings(max_examples=3, deadline=None, derandomize=True)
    def check(event: Contract) -> None:
        assert events.event_from_bytes(event.to_bytes()) == event

    check()


def test_an_unknown_type_of_event_is_refused() -> None:
    with pytest.raises(ValidationError):
        events.event_from_bytes(stamped('{"type":"session.teleported","id":"e","at":1}').encode())


def test_everything_on_a_subject_is_a_contract() -> None:
    kinds = {endpoint.request for endpoint in subjects.ENDPOINTS}
    kinds |= {endpoint.response for endpoint in subjects.ENDPOINTS}
    kinds |= {topic.message for topic in subjects.TOPICS}
    assert kinds <= set(CONTRACTS)


@pytest.mark.parametrize(
    "kind", sorted(set(errors._subclasses(errors.TurboServeError).values()), key=attrgetter("code"))
)
def test_an_error_comes_out_as_what_it_went_in(kind: type[errors.TurboServeError]) -> None:
    error = kind("what happened", field="prompt", limit=2_000, retry_after_s=1.5)
    body = errors.ErrorBody.from_bytes(error.body().to_bytes())
    again = errors.error_from(body)
    assert type(again) is kind
    assert (again.detail, again.field, again.limit, again.retry_after_s) == (
        "what happened",
        "prompt",
        2_000,
        1.5,
    )
    assert again.retryable
    assert 400 <= kind.status < 600


@pytest.mark.parametrize("limit", [5, 0.2, "5", "suspended", None])
def test_the_limit_of_an_error_keeps_its_type(limit: str | int | float | None) -> None:
    body = errors.ErrorBody.from_bytes(errors.InvalidInputError("x", limit=limit).body().to_bytes())
    again = errors.error_from(body).limit
    assert (again, type(again)) == (limit, type(limit))


def test_an_infinite_limit_is_sent_as_text() -> None:
    body = errors.InvalidInputError("x", limit=math.inf).body()
    assert errors.ErrorBody.from_bytes(body.to_bytes()).limit == "inf"


def test_an_error_of_a_newer_service_is_an_error_still() -> None:
    error = errors.error_from(errors.ErrorBody(code="not_known_here", detail="new"))
    assert type(error) is errors.TurboServeError
    assert not error.retryable


def test_codes_are_unique() -> None:
    kinds: list[type[errors.TurboServeError]] = [errors.TurboServeError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    codes = [kind.code for kind in kinds]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("text", ["", "a.b", "a b", "*", ">", "a" * 65, "é", "a\n", "../x"])
def test_what_cannot_be_a_token_of_a_subject_is_no_id(text: str) -> None:
    assert not is_id(text)
    with pytest.raises(ValidationError):
        requests.SessionRef(session=text)


def test_prompts_have_their_limit() -> None:
    fields: dict[str, Any] = {"session": "s", "prompt_id": "e"}
    requests.SubmitPrompt(**fields, prompt="x" * PROMPT_LIMIT)
    for prompt in ("", "x" * (PROMPT_LIMIT + 1)):
        with pytest.raises(ValidationError):
            requests.SubmitPrompt(**fields, prompt=prompt)


def test_every_phase_has_its_transitions_and_the_ended_ones_none() -> None:
    assert set(TRANSITIONS) == set(Phase)
    assert all(not TRANSITIONS[phase] for phase in Phase if phase.ended)
    assert all(TRANSITIONS[phase] for phase in Phase if not phase.ended)


@given(built(chunks.ChunkHeader))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_chunk_header_travels_in_headers(header: Contract) -> None:
    assert isinstance(header, chunks.ChunkHeader)
    assert chunks.ChunkHeader.from_headers(header.to_headers()) == header
    assert all("\n" not in value and "\r" not in value for value in header.to_headers().values())
