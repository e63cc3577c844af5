"""What a worker's service layer needs of the machine, as protocols. `machine` has the real ones.

Everything here is called on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from turboserve.worker.engine.engine import Engine
from turboserve.worker.service.engine_driver import EngineCommand
from turboserve.worker.service.packaged_chunks import ToLoop
from turboserve.worker.transfer.network import TransferNetwork

T = TypeVar("T")


class EngineRunner(Protocol):
    """Steps the engine beside the event loop, and carries out commands between two steps
    (`engine_thread.EngineThread`)."""

    engine: Engine
    """Read-only here: what is done to it goes through `submit` and `call`."""
    turns: int
    """Rises with every round, several times a second also when there is nothing to do."""
    failure: BaseException | None
    """What ended it, if that was not `end`."""
    device_error_sessions: tuple[str, ...]
    """Sessions of the step in which the device failed, if that was it."""

    @property
    def alive(self) -> bool:
        """Whether it runs: from `start` until `end` or a failure."""
        ...

    def start(self) -> None:
        """Begin. Nothing is generated before a `GenerateUntil`."""
        ...

    def submit(self, command: EngineCommand) -> None:
        """Have it carried out, in the order of submission."""
        ...

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Have it called where the engine is stepped, in its turn; its result or error."""
        ...

    def adopt(self, session: str, run: int, adopt: Callable[[Engine], None]) -> Future[None]:
        """The same for a call that brings the engine a session, whose run this is from then on."""
        ...

    async def end(self, timeout_s: float) -> None:
        """Begin no further step; wait for the one in work, for so long at most."""
        ...


class Packager(Protocol):
    """Makes what the engine delivers fit for publication, in order (`packager.QueuedPackager`)."""

    @property
    def alive(self) -> bool:
        """Whether it runs: from `start` until `end` or a failure."""
        ...

    def start(self) -> None: ...

    async def end(self, timeout_s: float) -> None:
        """End after what the engine has delivered so far; wait for that, for so long at most."""
        ...


@dataclass(frozen=True)
class Device:
    """What a worker generates with. Neither has been started."""

    engine: EngineRunner
    packager: Packager


@dataclass(frozen=True)
class Loaded:
    """An engine that is ready, and what was measured with it."""

    engine: Engine
    seconds: dict[int, float]
    """L(b): so many seconds make one chunk each for b sessions."""


class Platform(Protocol):
    """The machine that a worker runs on."""

    device: str
    """Kind of the device, such as `cuda`."""
    pid: int

    async def load(self) -> Loaded:
        """Load the models and warm them up. Raises what says why that cannot be."""
        ...

    def run(self, engine: Engine, deliver: Callable[[ToLoop], None]) -> Device:
        """What runs this engine. `deliver` gets on the event loop what the packager makes, in order."""
        ...

    def network(self, engine: Engine) -> TransferNetwork:
        """How the states of this engine's sessions travel."""
        ...

    def leave(self, reason: str) -> None:
        """The state store has given this worker's sessions away: end the process at once."""
        ...
