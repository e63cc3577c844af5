"""Protocols for what a worker's service layer needs of the machine. `host_platform` has the real ones.

All methods are called on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from turboserve.contracts.decoding import DecodeCapacity
from turboserve.worker.engine.engine import Engine
from turboserve.worker.model.weight_manifest import WeightManifest
from turboserve.worker.remote_decoding.ports import RolePorts
from turboserve.worker.replicas.weight_filler import WeightFiller
from turboserve.worker.sequence_parallel.peers import PeerNetwork
from turboserve.worker.service.engine_commands import EngineCommand
from turboserve.worker.service.packager import ToLoop
from turboserve.worker.transfer.network import TransferNetwork

T = TypeVar("T")


class EngineRunner(Protocol):
    """Steps the engine beside the event loop, and carries out commands between two steps
    (`host_platform.EngineThread`)."""

    engine: Engine
    """The engine, read-only here. Changes go through `submit` and `call`."""
    turns: int
    """Increases with every round, several times a second also when there is nothing to do."""
    failure: BaseException | None
    """The exception that ended the runner, if `end` did not."""
    device_error_sessions: tuple[str, ...]
    """Sessions of the step in which the device failed; empty if it did not fail."""

    @property
    def alive(self) -> bool:
        """Whether the runner runs: from `start` until `end` or a failure."""
        ...

    def start(self) -> None:
        """Begin. Nothing is generated before a `GenerateUntil`."""
        ...

    def submit(self, command: EngineCommand) -> None:
        """Carry out a command, in the order of submission."""
        ...

    def call(self, function: Callable[[Engine], T], model: str = "") -> Future[T]:
        """Call `function` between two steps, in its turn. Returns a future for its result or error.

        `model`: class whose engine it is called with, where the worker has several.
        """
        ...

    def adopt(self, session: str, run: int, adopt: Callable[[Engine], None], model: str = "") -> Future[None]:
        """Call `adopt`, which imports a session into the engine, and register `run` as the session's run.

        `model`: see `call`.
        """
        ...

    async def end(self, timeout_s: float) -> None:
        """Begin no further step, and wait at most `timeout_s` for the current one."""
        ...


class Packager(Protocol):
    """Packages what the engine delivers for publication, in order (`packager.QueuedPackager`)."""

    @property
    def alive(self) -> bool:
        """Whether the packager runs: from `start` until `end` or a failure."""
        ...

    def start(self) -> None: ...

    async def end(self, timeout_s: float) -> None:
        """End after what the engine has delivered so far, and wait for that at most `timeout_s`."""
        ...


@dataclass(frozen=True)
class Device:
    """The engine runner and the packager of a worker. Neither is started."""

    engine: EngineRunner
    packager: Packager


@dataclass(frozen=True, eq=False)
class StoredWeights:
    """Weights that other workers may have."""

    manifest: WeightManifest
    tensors: Mapping[str, Tensor]
    """By the manifest's names."""


@dataclass(frozen=True)
class StartTimes:
    """The parts of a worker's start, seconds."""

    import_s: float = 0.0
    """From the start of the process to the first statement of the worker."""
    weights_s: float = 0.0
    """From there to the last weight on the device."""
    warm_up_s: float = 0.0
    """Memory for the sessions, and the first chunks."""
    weights_digest: str = ""
    """Digest of the weights, as the setting of that name has it."""
    from_peers: bool = False
    """Whether other workers have sent the weights."""


@dataclass(frozen=True)
class LoadedClass:
    """One of several classes of a worker: its engine, and its measured chunk latencies."""

    engine: Engine
    seconds: dict[int, float]
    """L(b): seconds in which b sessions of the class get one chunk each."""


NO_CLASSES: Mapping[str, LoadedClass] = {}


@dataclass(frozen=True)
class Loaded:
    """An engine that is ready, and its measured chunk latencies."""

    engine: Engine
    seconds: dict[int, float]
    """L(b): seconds in which b sessions get one chunk each."""
    start: StartTimes = field(default_factory=StartTimes)
    weights: StoredWeights | None = None
    """None: other workers cannot have the weights from this one."""
    classes: Mapping[str, LoadedClass] = field(default_factory=dict)
    """All classes by name, the first one with `engine` and `seconds`. Empty: the worker serves one."""


class Platform(Protocol):
    """The machine that a worker runs on."""

    device: str
    """Kind of the device, such as `cuda`."""
    pid: int

    async def load(self, filler: WeightFiller | None = None) -> Loaded:
        """Load the models and warm them up. Raises an error that names the reason if it cannot.

        `filler`: brings the weights from other workers. Where it fails, the model's files are read.
        """
        ...

    def run(
        self,
        engine: Engine,
        deliver: Callable[[ToLoop], None],
        classes: Mapping[str, LoadedClass] = NO_CLASSES,
    ) -> Device:
        """Create this engine's device. `deliver` receives the packager's items on the event loop, in
        order. `classes`: see `Loaded.classes`."""
        ...

    def network(self, engine: Engine) -> TransferNetwork:
        """Create the network over which states of this engine's sessions are transferred."""
        ...

    def weight_network(self) -> TransferNetwork:
        """Create the network over which this worker gets weights before it has an engine."""
        ...

    def role_ports(self) -> RolePorts:
        """Return how this worker reaches its decode workers and text workers."""
        ...

    def peers(self, directory: Path, worker: str) -> PeerNetwork:
        """Create this worker's end of the network of the workers of its host, which share `directory`.

        Raises `InvalidInputError` and `OSError`.
        """
        ...

    def leave(self, reason: str) -> None:
        """End the process at once: the state store has declared this worker gone."""
        ...


class DecodeLimit(Protocol):
    """How many sessions the worker's decode workers carry (`remote_decoding.client`)."""

    def limited(self, capacity: int) -> int:
        """Return K, or fewer sessions if the decode workers carry no more."""
        ...

    def capacity(self, denoised: int) -> DecodeCapacity | None:
        """Return what a load report says of the decode workers. `denoised`: K without their limit.

        None: the worker has none, or they are not known yet.
        """
        ...


class NoDecodeLimit:
    """The `DecodeLimit` of a worker that decodes."""

    def limited(self, capacity: int) -> int:
        return capacity

    def capacity(self, denoised: int) -> DecodeCapacity | None:
        return None
