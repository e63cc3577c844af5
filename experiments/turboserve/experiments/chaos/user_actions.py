"""What clients do with their sessions, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class UserActionKind(StrEnum):
    """A client's action on its session."""

    PROMPT = "prompt"
    PAUSE = "pause"
    """Pause, and resume after `UserAction.seconds`."""
    MIGRATE = "move"
    CUT = "cut"
    """The viewer's connection breaks."""
    DROP = "drop"
    """A prompt with which the viewer discards what it has not shown."""
    CHANGE = "change"
    """Change the limits of quality and lead."""


WATCHING_ACTIONS = {UserActionKind.PROMPT: 4, UserActionKind.CUT: 1}
"""Kind → how often it is chosen where stalls are measured. After a pause, a session waits for a slot."""
SHIPPED_ACTIONS = {
    UserActionKind.PROMPT: 4,
    UserActionKind.PAUSE: 2,
    UserActionKind.MIGRATE: 2,
    UserActionKind.CUT: 1,
}
"""Kind → how often it is chosen."""
LIMIT_ACTIONS = {UserActionKind.DROP: 2, UserActionKind.CHANGE: 1}
"""The same for what clients do besides, if they use all mechanisms."""


@dataclass(frozen=True)
class UserAction:
    at_s: float
    session: int
    kind: UserActionKind
    seconds: float = 0.0


def actions_of(
    chance: random.Random, session: int, seconds: float, kinds: Mapping[UserActionKind, int]
) -> list[UserAction]:
    """Draw what the client of a session does within `seconds`. `kinds`: how often each is chosen."""
    actions: list[UserAction] = []
    at = 1.0
    while (at := at + chance.uniform(4.0, 12.0)) < seconds:
        kind = chance.choices(list(kinds), weights=list(kinds.values()))[0]
        pause_s = round(chance.uniform(1.0, 5.0), 2) if kind is UserActionKind.PAUSE else 0.0
        actions.append(UserAction(round(at, 2), session, kind, pause_s))
        at += pause_s
    return actions
