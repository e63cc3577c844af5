"""The pool file: what kinds of workers a pool may have, with which models, and at which price (TOML)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from turboserve.allocation.classes import CLASSES_LIMIT
from turboserve.autoscaler.control.composition import Terms
from turboserve.autoscaler.control.pool_offers import PoolOffer
from turboserve.autoscaler.model_memory import ModelMemory, OfferMemoryError, within_memory
from turboserve.autoscaler.pool_members import LARGEST, RESERVED_OFFER
from turboserve.contracts.base import Id
from turboserve.environment import WORKER_SETTINGS

Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,15}$")]
ENTRIES_LIMIT = 64
"""Most models of all offers together. A model counts once for each offer that has it."""
OWN_SETTINGS = frozenset({"TURBOSERVE_MODEL", "TURBOSERVE_WORKER_ID", "TURBOSERVE_POOL_MEMBER"})
"""Settings of a worker that its offer and its member decide."""
MEMORY = "TURBOSERVE_MEMORY_BYTES"


def _of_workers(settings: dict[str, str]) -> dict[str, str]:
    for name in settings:
        if name not in WORKER_SETTINGS or name in OWN_SETTINGS:
            raise ValueError(f"{name} is no setting of a kind of worker or of an offer")
    return settings


Settings = Annotated[dict[str, str], AfterValidator(_of_workers)]


Sessions = Annotated[int, Field(ge=1, le=10_000)]


class WorkerKind(BaseModel):
    """A kind of worker."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    price: float = Field(ge=0, le=1e6)
    """Price of one worker for an hour, in any unit that all kinds share. 0: no more run than are needed."""
    most: int = Field(ge=1, le=LARGEST)
    """Maximum number of workers of the kind."""
    threads: int = Field(default=1, ge=1, le=1_024)
    """Threads of a worker's matrix library (its OMP_NUM_THREADS): its share of the machine's CPUs."""
    gpus: float = Field(default=1.0, ge=0, le=1_024)
    """Number of GPUs that one worker occupies and that are paid for. A Ray actor takes as many."""
    cpus: float | None = Field(default=None, ge=0, le=1_024)
    """CPUs that a Ray actor takes. None: TURBOSERVE_RAY_CPUS."""
    resources: dict[str, Annotated[float, Field(gt=0, le=1e6)]] = {}
    """Custom resources that a Ray actor takes, beside TURBOSERVE_RAY_RESOURCES."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes on which the kind's pods run, beside those of the pod template."""
    limits: dict[str, str] = {}
    """Limits of the worker's container in a pod, beside those of the pod template. Requests are the same."""
    start_s: float = Field(default=30.0, gt=0, le=3_600)
    """Time from the order of a worker until it serves, seconds."""
    switch_s: float | None = Field(default=None, gt=0, le=3_600)
    """Time from the end of a worker until one with another model serves in its place, seconds. It is what a
    switch costs: less than `start_s` if the machine is kept, or weights come from other workers. None:
    `start_s`."""
    memory_bytes: int | None = Field(default=None, ge=1)
    """Device memory of one worker for its models and all sessions: its TURBOSERVE_MEMORY_BYTES. With it, an
    offer whose models do not fit is refused, if the file has their sizes. None: the worker finds it out."""
    settings: Settings = {}
    """Settings of the kind's workers, such as TURBOSERVE_WORKER_MAX_SESSIONS."""


class OfferEntry(BaseModel):
    """Workers of one kind with one model (`model`), or with several that each of them serves (`models`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Name
    """Part of the names of the offer's pool members."""
    kind: Name
    model: Id | None = None
    models: Annotated[tuple[Id, ...], Field(min_length=1, max_length=CLASSES_LIMIT)] | None = None
    """Models that each worker of the offer serves at once, in place of `model`. They divide its memory."""
    sessions: Sessions | dict[Id, Sessions] = 1
    """Sessions of one such worker, of any of its models alone, or by model. It counts until a worker of the
    offer has reported its own."""
    least: int = Field(default=0, ge=0, le=LARGEST)
    """Minimum number of workers of the offer."""
    settings: Settings = {}
    """Settings of the offer's workers, such as TURBOSERVE_WEIGHTS_DIGEST. They come before the kind's."""

    @model_validator(mode="after")
    def _has_models(self) -> Self:
        if (self.model is None) == (self.models is None):
            raise ValueError(f"{self.name} needs either model or models")
        if len(set(self.served)) < len(self.served):
            raise ValueError(f"{self.name}: a model appears twice")
        if isinstance(self.sessions, dict) and self.sessions.keys() != set(self.served):
            raise ValueError(f"{self.name}: sessions has other models than the offer")
        return self

    @property
    def served(self) -> tuple[str, ...]:
        """The models that each worker serves."""
        return self.models or (self.model or "",)

    @property
    def declared(self) -> dict[str, int]:
        """Sessions of each model alone, before what memory allows."""
        sessions = self.sessions
        return {model: sessions[model] if isinstance(sessions, dict) else sessions for model in self.served}


class PoolFile(BaseModel):
    """Kinds and offers of one pool."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kinds: dict[Name, WorkerKind] = Field(min_length=1, max_length=16)
    offers: tuple[OfferEntry, ...] = Field(min_length=1, max_length=CLASSES_LIMIT)
    memory: dict[Id, ModelMemory] = {}
    """Memory that a model takes. Other models may need any."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse TOML. Raises ValueError with the first fault: one line that names the field.

        Raises OfferMemoryError, which is one, for an offer whose models do not fit into a worker.
        """
        try:
            return cls.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"no TOML: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            if isinstance(cause := first.get("ctx", {}).get("error"), OfferMemoryError):
                raise cause from None
            place = ".".join(str(part) for part in first["loc"])
            said = first["msg"].removeprefix("Value error, ")
            raise ValueError(f"{place}: {said}" if place else said) from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises ValueError that names the file and the first fault, as `parse`."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None
        try:
            return cls.parse(text)
        except OfferMemoryError as error:
            raise error.of_file(path) from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        names = [offer.name for offer in self.offers]
        if len(set(names)) < len(names) or RESERVED_OFFER in names:
            raise ValueError(f"offers: names differ, and none is {RESERVED_OFFER!r}")
        pairs = {(offer.kind, frozenset(offer.served)) for offer in self.offers}
        if len(pairs) < len(self.offers):
            raise ValueError("offers: two have the same kind and models")
        if sum(len(offer.served) for offer in self.offers) > ENTRIES_LIMIT:
            raise ValueError(f"offers: models of all offers are above the limit of {ENTRIES_LIMIT}")
        for offer in self.offers:
            if offer.kind not in self.kinds:
                raise ValueError(
                    f"offers: {offer.name} is of the kind {offer.kind}, which is not among the kinds"
                )
        for name, kind in self.kinds.items():
            least = sum(offer.least for offer in self.offers if offer.kind == name)
            if least > kind.most:
                raise ValueError(
                    f"offers: the minimum of the kind {name} is {least}, its maximum {kind.most}"
                )
        if self.limits[1] > LARGEST:
            raise ValueError(f"kinds: the maximum of all is {self.limits[1]}, above {LARGEST}")
        for offer in self.offers:
            kind = self.kinds[offer.kind]
            if kind.memory_bytes is not None and MEMORY in {**kind.settings, **offer.settings}:
                raise ValueError(f"offers: {offer.name} has memory_bytes of its kind and {MEMORY}")
            self._sessions_of(offer)
        return self

    def _sessions_of(self, offer: OfferEntry) -> dict[str, int]:
        """Return n_j of an offer's workers, as declared and as memory allows. Raises OfferMemoryError."""
        return within_memory(offer.name, offer.declared, self.kinds[offer.kind].memory_bytes, self.memory)

    @property
    def composed(self) -> bool:
        """Whether there is anything to compose: more than one offer."""
        return len(self.offers) > 1

    @property
    def limits(self) -> tuple[int, int]:
        """Minimum and maximum number of workers."""
        used = {offer.kind for offer in self.offers}
        least = sum(offer.least for offer in self.offers)
        return least, sum(kind.most for name, kind in self.kinds.items() if name in used)

    @property
    def models(self) -> tuple[str, ...]:
        """Models of the offers, in their order."""
        return tuple(dict.fromkeys(model for offer in self.offers for model in offer.served))

    @property
    def terms(self) -> Mapping[str, Terms]:
        """What each kind costs."""
        return {
            name: Terms(
                kind.price,
                kind.most,
                kind.start_s,
                switch_s=kind.start_s if kind.switch_s is None else min(kind.switch_s, kind.start_s),
            )
            for name, kind in self.kinds.items()
        }

    @property
    def pool_offers(self) -> tuple[PoolOffer, ...]:
        return tuple(
            PoolOffer(offer.name, offer.kind, self._sessions_of(offer), offer.least) for offer in self.offers
        )

    def usage_of(self, offer: str) -> tuple[str | None, float]:
        """Return the kind and the GPUs by which a worker of an offer is paid for."""
        found = self._entry(offer)
        return (None, 1.0) if found is None else (found.kind, self.kinds[found.kind].gpus)

    def kind_of(self, offer: str) -> WorkerKind | None:
        """Return the kind of an offer's workers. None: the file does not have the offer."""
        found = self._entry(offer)
        return None if found is None else self.kinds[found.kind]

    def models_of(self, offer: str) -> tuple[str, ...]:
        """Return the models of an offer; empty for an unknown one."""
        found = self._entry(offer)
        return () if found is None else found.served

    def environment_of(self, offer: str) -> dict[str, str]:
        """Return the variables of a worker of an offer; empty for an unknown one."""
        found = self._entry(offer)
        if found is None:
            return {}
        kind = self.kinds[found.kind]
        own = {"OMP_NUM_THREADS": str(kind.threads), "TURBOSERVE_MODEL": ",".join(found.served)}
        if kind.memory_bytes is not None:
            own[MEMORY] = str(kind.memory_bytes)
        return {**kind.settings, **found.settings, **own}

    def _entry(self, offer: str) -> OfferEntry | None:
        if not self.composed:
            return self.offers[0]
        return next((entry for entry in self.offers if entry.name == offer), None)
