"""Reference files: results of public implementations, reproduced with this engine's ring and recache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from turboserve.wording import counted
from turboserve.worker.engine.context_forwards import RecacheWork
from turboserve.worker.engine.kv_ring import KVRing
from turboserve.worker.engine.memory import SlabLayout, SlabPool
from turboserve.worker.engine.state import SessionState
from turboserve.worker.engine.work import ChunkWork, Row, RowsForward, RowsMemory, Work
from turboserve.worker.model.block import AttentionMemory
from turboserve.worker.model.config import ModelConfig
from turboserve.worker.model.load import load_state
from turboserve.worker.model.schedule import Schedule
from turboserve.worker.model.transformer import CausalWanTransformer

_WEIGHTS = "weights."


class GoldenError(ValueError):
    """A reference file is malformed. The message names what is missing or wrong."""


@dataclass(frozen=True)
class GoldenReport:
    """Differences between this engine and a reference."""

    per_chunk: tuple[float, ...]
    """Largest absolute error of each chunk's latents; infinite where one is not a number."""
    tolerance: float

    @property
    def max_abs_error(self) -> float:
        """Largest error of all chunks."""
        return max(self.per_chunk)

    @property
    def passed(self) -> bool:
        """Whether every chunk is within the tolerance."""
        return self.max_abs_error <= self.tolerance


@dataclass(frozen=True, eq=False)
class _File:
    config: ModelConfig
    switches: tuple[int, ...]
    weights: dict[str, Tensor]
    text: Tensor
    noise: Tensor
    latents: Tensor


def check_file(
    path: Path, tolerance: float = 1e-4, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> GoldenReport:
    """Generate every chunk of a reference file with its noise and prompts, and compare.

    Raises `GoldenError` or `ModelConfigError` for a malformed file, and the errors of `load_state` for its
    weights.
    """
    file = _read(path)
    made = _generate(file, device, dtype)
    return GoldenReport(_errors(made, file.latents), tolerance)


def check_type(
    path: Path,
    dtype: torch.dtype,
    tolerance: float,
    device: str = "cpu",
    memory: Callable[[Sequence[Row]], AttentionMemory] = RowsMemory,
) -> GoldenReport:
    """Generate a reference file in `dtype`, attending by `memory`, and compare with this engine's float32."""
    file = _read(path)
    exact = _generate(file, device, torch.float32)
    return GoldenReport(_errors(_generate(file, device, dtype, memory), exact), tolerance)


def _errors(made: Sequence[Tensor], wanted: Sequence[Tensor] | Tensor) -> tuple[float, ...]:
    errors = [(ours - theirs).abs().max() for ours, theirs in zip(made, wanted, strict=True)]
    return tuple(float(error) if bool(error.isfinite()) else float("inf") for error in errors)


@torch.inference_mode()
def _generate(
    file: _File,
    device: str,
    dtype: torch.dtype,
    memory: Callable[[Sequence[Row]], AttentionMemory] = RowsMemory,
) -> list[Tensor]:
    """Clean latents of every chunk, float32 on the host."""
    config = file.config
    with torch.device("meta"):
        model = CausalWanTransformer(config)
    load_state(model, {name: weight.clone() for name, weight in file.weights.items()})
    model.to(device, dtype)
    forward = RowsForward(model, memory)
    schedule = Schedule(config)
    layout = SlabLayout.of(config, dtype)
    slab = SlabPool(layout, layout.total_bytes, torch.device(device)).acquire()
    ring = KVRing(slab, config, model.rotation)
    state = SessionState("golden", slab, ring, torch.Generator(device), seed=0, prompt="")

    made = []
    prompt = 0
    for chunk in range(file.latents.shape[0]):
        if chunk == 0 or chunk in file.switches:
            prompt += chunk in file.switches
            text = file.text[prompt : prompt + 1].to(device, dtype)
            ring.set_text(model.project_text(text), row=0)
            if chunk:
                _run(forward, RecacheWork(state, config, schedule))
        noise = file.noise[chunk].to(device)
        work = ChunkWork(state, config, schedule, noise.__getitem__)
        _run(forward, work)
        assert work.clean is not None
        state.remember(work.clean, config)
        state.next_chunk += 1
        made.append(work.clean.float().cpu())
    return made


def _run(forward: RowsForward, work: Work) -> None:
    while work.done < work.total:
        work.advance(forward([work.row()])[0])


def _read(path: Path) -> _File:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(metadata.get("config", "null"))
    except (OSError, SafetensorError, ValueError) as error:
        raise GoldenError(f"{path}: {error}") from error
    if not isinstance(header, dict):
        raise GoldenError(f"{path}: no config in the header's metadata")
    for name, dimensions in (("text", 3), ("noise", 6), ("latents", 5)):
        if name not in tensors:
            raise GoldenError(f"{path}: tensor {name} is missing")
        _require(path, f"dimensions of {name}", tensors[name].dim(), dimensions)
    weights = {n.removeprefix(_WEIGHTS): t for n, t in tensors.items() if n.startswith(_WEIGHTS)}
    chunks, frames = tensors["latents"].shape[:2]
    if not chunks:
        raise GoldenError(f"{path}: no chunk in latents")
    fields = ModelConfig.field_names()
    # A file without a window does not limit a session's length: the limit is its number of frames.
    values = {"max_frames": chunks * frames} | {n: v for n, v in header.items() if n in fields}
    config = ModelConfig.from_mapping(values)
    if config.session_frames is not None and chunks * frames > config.session_frames:
        raise GoldenError(
            f"{path}: {counted(chunks * frames, 'frame')}, the model's limit is {config.session_frames}"
        )
    switches = _switches(path, header.get("switches", []))
    shape = (chunks, len(config.denoising_steps), *config.latent_shape)
    _require(path, "shape of noise", tuple(tensors["noise"].shape), shape)
    _require(path, "shape of latents", tuple(tensors["latents"].shape), (chunks, *config.latent_shape))
    _require(path, "width of text", tensors["text"].shape[2], config.text_dim)
    if not 0 < tensors["text"].shape[1] <= config.text_len:
        raise GoldenError(f"{path}: {tensors['text'].shape[1]} tokens of text, need 1 to {config.text_len}")
    if tensors["text"].shape[0] < 1 + len(switches):
        need = counted(len(switches), "switch needs", "switches need")
        raise GoldenError(f"{path}: {need} {counted(1 + len(switches), 'prompt')}")
    return _File(config, switches, weights, tensors["text"], tensors["noise"], tensors["latents"])


def _switches(path: Path, value: object) -> tuple[int, ...]:
    """Chunks at which a prompt takes over, increasing, at least 0."""
    whole = isinstance(value, list) and all(type(chunk) is int and chunk >= 0 for chunk in value)
    if not isinstance(value, list) or not whole or sorted(set(value)) != value:
        raise GoldenError(f"{path}: switches are {value!r}, need rising numbers of chunks")
    return tuple(value)


def _require(path: Path, name: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise GoldenError(f"{path}: {name} is {found}, need {wanted}")
