"""Create an engine from settings: the device, the models, and memory for the sessions."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from turboserve import logs
from turboserve.worker.engine.budget import affordable_decodes, plan
from turboserve.worker.engine.engine import Engine
from turboserve.worker.engine.errors import HostMemoryUnavailableError
from turboserve.worker.engine.fidelity_ladder import FidelityLadder
from turboserve.worker.engine.fidelity_profile import FidelityProfile
from turboserve.worker.engine.interface import EngineOptions
from turboserve.worker.engine.models import Models
from turboserve.worker.engine.profile_file import ForeignProfileError, ProfileFile
from turboserve.worker.engine.sequence_parallel_sizes import lent_bytes
from turboserve.worker.engine.snapshot import fingerprint
from turboserve.worker.model.presets import SHIPPED
from turboserve.worker.model.weight_manifest import WeightManifest
from turboserve.worker.replicas.models import ModelOptions, load_model
from turboserve.worker.replicas.weight_filler import WeightFiller, WeightsUnavailableError
from turboserve.worker.service.host_memory import (
    check_host_sessions,
    default_host_bytes,
    free_host_bytes,
    halves,
    offloaded_host_bytes,
    state_host_bytes,
)
from turboserve.worker.settings import AUTO_SESSIONS, BEST, Settings, addresses_of

CPU_BYTES = 2 << 30
_FREE_SHARE = 0.9
"""Share of the free memory that is used. The rest is for what no formula covers: fragmentation, and
workspaces of the device's libraries."""

SHIPPED_FIDELITY = {name: SHIPPED[name].with_name(f"{name}-fidelity-cpu.json") for name in SHIPPED}
"""Measured configurations of models that ship, on a CPU, by name."""

log = logs.get("worker")


def choose_device(settings: Settings) -> torch.device:
    """The configured device, or a GPU if there is one."""
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(settings.device)


def choose_dtype(settings: Settings, device: torch.device) -> torch.dtype:
    """Type of a public model's weights."""
    half = settings.dtype == "bfloat16" or (settings.dtype == "auto" and device.type == "cuda")
    return torch.bfloat16 if half else torch.float32


def load_models(settings: Settings) -> Models:
    """Load the configured model on the chosen device: seconds for toyworld, minutes for a public model.

    Raises the errors of `load_model`. toyworld and public models raise `CheckpointError` or
    `UnreadableCheckpointError` for bad files, and `TextEncoderUnavailableError` where the worker's extra
    `models` is not installed.
    """
    device = choose_device(settings)
    if device.type == "cpu":
        torch.set_num_threads(settings.torch_threads)
    return load_model(settings.model, model_options(settings, device))


class UsedFiller:
    """A filler that keeps whether it has brought the weights: a model's function may ignore it."""

    def __init__(self, filler: WeightFiller) -> None:
        self._filler = filler
        self.filled = False

    def fill(self, networks: Mapping[str, nn.Module], details: str) -> WeightManifest:
        """See `WeightFiller.fill`."""
        manifest = self._filler.fill(networks, details)
        self.filled = True
        return manifest


def load_filled(settings: Settings, filler: WeightFiller) -> Models | None:
    """As `load_models`, with the weights that `filler` brings. None: it has failed, and the memory of the
    networks is free again."""
    device = choose_device(settings)
    if device.type == "cpu":
        torch.set_num_threads(settings.torch_threads)
    options = replace(model_options(settings, device), filler=filler)
    try:
        return load_model(settings.model, options)
    except WeightsUnavailableError as error:
        log.warning("no weights from other workers: the files are read", reason=str(error))
    # The error's frames hold the networks, and are parts of cycles: without a collection the model would be
    # in memory twice.
    gc.collect()
    return None


def model_options(settings: Settings, device: torch.device) -> ModelOptions:
    """What the settings state about the model's files, on `device`."""
    return ModelOptions(
        device,
        choose_dtype(settings, device),
        model_weights=settings.model_weights,
        checkpoint=settings.checkpoint,
        checkpoint_container=settings.checkpoint_container,
        lora=settings.lora,
        vae=settings.vae,
        fast_vae=settings.fast_vae,
        text_encoder=settings.text_encoder,
        rotation=settings.rotation,
    )


@dataclass(frozen=True)
class MemoryPart:
    """The part of a worker's memory that the engine of one of its classes gets."""

    device_bytes: int
    """Device memory beside the weights: for workspace and sessions. Below 0: the weights alone exceed what is
    configured."""
    number: int = 0
    """Number of the engines that were made before it."""
    classes: int = 1


def memory_parts(models: Sequence[Models], settings: Settings) -> tuple[MemoryPart, ...]:
    """Divide the device memory that the weights of all classes leave equally among the classes.

    The models are on the device, and no engine is made yet. `settings`: of all classes or of any.
    """
    left = settings.memory_bytes - sum(one.weight_bytes for one in models)
    if not settings.memory_bytes:
        left = free_bytes(models[0].transformer.patch_embedding.weight.device)
    count = len(models)
    return tuple(MemoryPart(left // count, number, count) for number in range(count))


def make_engine(models: Models, settings: Settings, part: MemoryPart | None = None) -> Engine:
    """Create an engine with as many slabs as are wanted and fit. `part`: of the memory. None: all of it.

    Raises `BudgetTooSmallError` if no slab fits, `HostMemoryUnavailableError`, `AttentionUnavailableError`,
    `SequenceParallelUnavailableError`, `HostSessionsError` and `InvalidProfileError`.
    """
    weight = models.transformer.patch_embedding.weight
    part = part or memory_parts((models,), settings)[0]
    total_bytes = part.device_bytes + models.weight_bytes
    decode_batch = decodes_at_once(models, settings, total_bytes)
    lent = 0
    if settings.sequence_parallel_directory is not None:
        lent = lent_bytes(models.transformer.config, weight.dtype)
    apart = settings.roles == "denoise"
    budget = plan(models, total_bytes - lent, 1 if apart else decode_batch, decode_apart=apart)
    slabs = min(settings.worker_max_sessions or AUTO_SESSIONS, budget.sessions())
    options = EngineOptions(
        slab_bytes=slabs * budget.slab_bytes,
        host_bytes=settings.host_memory_bytes or 0,
        host_sessions=settings.host_sessions,
        max_lead_s=settings.max_lead_s,
        max_batch=slabs,
        decode_batch=decode_batch,
        policy=settings.gather_policy,
        tier_alpha=settings.tier_alpha,
        fidelity=settings.fidelity,
        attention=settings.attention,
        compile=settings.compile,
        decode_apart=apart,
        overlap=overlaps(settings, weight.device),
    )
    profiles = _profiles(models, settings, weight.device)
    ladder = fidelity_ladder(models, settings, weight.device)
    state_bytes = state_host_bytes(models, decode_apart=apart)
    check_host_sessions(
        settings.host_sessions, state_bytes, free_host_bytes(), settings.host_memory_bytes or 0
    )
    if settings.host_memory_bytes is not None:
        return _warn_without_host_memory(
            Engine(models, options, profiles=profiles, ladder=ladder), state_bytes
        )
    offloaded_bytes = offloaded_host_bytes(settings.host_sessions, state_bytes)
    free_bytes = (free_host_bytes() - offloaded_bytes) // (part.classes - part.number)
    wanted = default_host_bytes(state_bytes, slabs, free_bytes)
    for host_bytes in halves(wanted, state_bytes):
        try:
            return _warn_without_host_memory(
                Engine(models, replace(options, host_bytes=host_bytes), profiles=profiles, ladder=ladder),
                state_bytes,
            )
        except HostMemoryUnavailableError as error:
            log.warning("less host memory than was free", error=str(error))
            # The traceback's frames would keep the slabs of the failed engine.
            refused = error.with_traceback(None)
    raise refused


def _warn_without_host_memory(engine: Engine, state_bytes: int) -> Engine:
    if engine.options.host_bytes < state_bytes:
        log.warning(
            "no host memory for sessions: suspended sessions keep their slabs, none can arrive suspended",
            host_bytes=engine.options.host_bytes,
            state_bytes=state_bytes,
            setting="TURBOSERVE_HOST_MEMORY_BYTES",
        )
    return engine


def overlaps(settings: Settings, device: torch.device) -> bool:
    """Whether stream executors get threads. On one core they would only take turns with the engine's."""
    if settings.overlap == "auto":
        waits = settings.roles == "denoise"
        return waits or device.type == "cuda" or len(os.sched_getaffinity(0)) > 1
    return settings.overlap == "on"


def decodes_at_once(models: Models, settings: Settings, total_bytes: int) -> int:
    """Largest number of rows of a decode.

    On a CPU the default is one: several rows take about as long as one after the other, and round
    differently.
    """
    limit = settings.worker_max_sessions or AUTO_SESSIONS
    if settings.roles == "denoise":
        # Each of them decodes another chunk at the same time.
        return min(limit, len(addresses_of(settings.decode_workers)))
    if settings.decode_batch is not None:
        return min(limit, settings.decode_batch)
    if models.transformer.patch_embedding.weight.device.type == "cpu":
        return 1
    return affordable_decodes(models, total_bytes, limit)


def _profiles(
    models: Models, settings: Settings, device: torch.device
) -> Mapping[str, Mapping[int, float]] | None:
    if settings.profile is None:
        return None
    model = fingerprint(models.transformer.config)
    return ProfileFile.read(settings.profile, model=model, device=device.type).stages


def fidelity_ladder(models: Models, settings: Settings, device: torch.device) -> FidelityLadder | None:
    """The configurations that the worker may choose. None: the best alone.

    Raises `InvalidProfileError` if the file is not a profile. A profile of another model, device or kind of
    attention is ignored. The log says why nothing is lowered, unless both settings have their defaults.
    """
    path = settings.fidelity_profile
    warns = settings.sets_fidelity or path is not None
    if path is None and settings.model_weights is None:
        path = SHIPPED_FIDELITY.get(settings.model)
    if settings.fidelity == BEST:
        return None
    if path is None:
        if warns:
            log.warning("no fidelity profile: no quality is lowered", setting="TURBOSERVE_FIDELITY_PROFILE")
        return None
    config = models.transformer.config
    try:
        model, attention = fingerprint(config), settings.attention
        profile = FidelityProfile.read(path, config, model=model, device=device.type, attention=attention)
    except ForeignProfileError as error:
        if warns:
            log.warning("fidelity profile ignored: no quality is lowered", error=str(error))
        return None
    if models.fast_decoder is None or settings.roles != "denoise,decode":
        # Decode workers have one decoder.
        profile = profile.without_fast_decoder()
    return FidelityLadder.of_profile(profile, config, settings.fidelity_floor)


def free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return round(_FREE_SHARE * free)
