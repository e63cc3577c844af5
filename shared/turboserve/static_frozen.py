"""Dataclasses whose fields only a type checker protects, for objects of which each chunk needs some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def statically_frozen(*, eq: bool = True) -> Callable[[type[T]], type[T]]:
    """Make a class a dataclass that mypy takes for frozen: to assign a field is a type error.

    At runtime nothing refuses it. The constructor of `dataclass(frozen=True)` takes five times as long, 0.3
    µs for each field, and a chunk causes about 250 such assignments on its way to the viewer.

    Objects have slots: one piece of memory instead of two.

    `eq`: whether objects with equal fields are equal and hashable, as with `dataclass(frozen=True)`.
    """
    return dataclass(eq=eq, unsafe_hash=eq, slots=True)


def with_fields(one: T, **changes: object) -> T:
    """As `dataclasses.replace` of an object of `statically_frozen`, in a third of the time.

    `changes`: fields by name. Their types are not checked. Raises AttributeError for an unknown name.
    """
    kind = type(one)
    other = object.__new__(kind)
    for name in kind.__slots__:  # type: ignore[attr-defined]
        setattr(other, name, getattr(one, name))
    for name, value in changes.items():
        setattr(other, name, value)
    return other
