"""Load checkpoints under public names, strictly: tensors that do not fit are listed, never skipped."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

_PREFIXES = ("model.", "_fsdp_wrapped_module.")
_CONTAINERS = ("generator_ema", "generator", "model")
_INDEX = ".safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint does not fit. Lists every missing, extra and mis-shaped tensor. Do not retry."""

    def __init__(
        self,
        missing: list[str],
        extra: list[str],
        misshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]],
    ) -> None:
        self.missing = missing
        self.extra = extra
        self.misshaped = misshaped
        """Name, shape found, shape needed."""
        shapes = [f"{name} {found} instead of {needed}" for name, found, needed in misshaped]
        parts = [
            f"{len(names)} {what}: {', '.join(names)}"
            for what, names in (("missing", missing), ("extra", extra), ("mis-shaped", shapes))
            if names
        ]
        super().__init__("checkpoint: " + "; ".join(parts))


class UnreadableCheckpointError(ValueError):
    """A checkpoint file cannot be read, or holds no known state dict."""


def read_checkpoint(
    path: Path, container: str | None = None, known: tuple[str, ...] = _CONTAINERS
) -> dict[str, Tensor]:
    """Tensors of a checkpoint, with the prefixes of public checkpoints stripped, mapped and not yet read.

    `path`: a `.safetensors` file, a `….safetensors.index.json` of several, a `.pt` or `.pth` file, or a
    folder that holds exactly one of them. `container`: the dictionary of a `.pt` file to load. By default it
    is the first of `known` in the file, else the file itself. Raises `UnreadableCheckpointError`, and
    `CheckpointError` if an index and its files disagree.
    """
    if path.is_dir():
        path = _only_file(path)
    if path.name.endswith(_INDEX):
        return strip_prefixes(_read_shards(path))
    if path.suffix == ".safetensors":
        return strip_prefixes(_read_safetensors(path))
    return strip_prefixes(_read_pickled(path, container, known))


def _only_file(folder: Path) -> Path:
    for pattern in (f"*{_INDEX}", "*.safetensors", "*.pt", "*.pth"):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise UnreadableCheckpointError(
                f"{folder}: {len(found)} files {pattern}, which of them is not said by an index"
            )
    raise UnreadableCheckpointError(f"{folder}: no checkpoint in it")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UnreadableCheckpointError(f"{path}: {error}") from error


def _read_shards(index: Path) -> dict[str, Tensor]:
    try:
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = sorted(set(where.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableCheckpointError(f"{index}: {error!r}") from error
    state: dict[str, Tensor] = {}
    extra: list[str] = []
    for file in files:
        for name, tensor in _read_safetensors(index.parent / file).items():
            if where.get(name) != file:
                extra.append(f"{name} in {file}")
            state[name] = tensor
    missing = sorted(where.keys() - state.keys())
    if missing or extra:
        raise CheckpointError(missing, sorted(extra), [])
    return state


def _read_pickled(path: Path, container: str | None, known: tuple[str, ...]) -> Mapping[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise UnreadableCheckpointError(f"{path}: {error}") from error
    if not isinstance(loaded, dict):
        raise UnreadableCheckpointError(f"{path}: not a dictionary")
    if container is not None and container not in loaded:
        raise UnreadableCheckpointError(f"{path}: no {container}, but {', '.join(map(str, loaded))}")
    found: Any = loaded
    for name in (container,) if container else known:
        if name in loaded:
            found = loaded[name]
            break
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UnreadableCheckpointError(f"{path}: no state dict in it")
    return found


def without_values(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same shapes and types whose values are undefined. Nothing is read from a file.

    Names that share a tensor share the new one.
    """
    new = {id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in state.values()}
    return {name: new[id(tensor)] for name, tensor in state.items()}


def strip_prefixes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove `model.` and `_fsdp_wrapped_module.` wherever wrappers put them in a name."""
    stripped = {}
    for name, tensor in state.items():
        bare = name.replace(_PREFIXES[1], "")
        while bare.startswith(_PREFIXES[0]):
            bare = bare.removeprefix(_PREFIXES[0])
        stripped[bare] = tensor
    return stripped


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the weights of a module, even on the meta device. Raises `CheckpointError` and changes nothing."""
    needed = module.state_dict()
    missing = sorted(needed.keys() - state.keys())
    extra = sorted(state.keys() - needed.keys())
    misshaped = [
        (name, tuple(state[name].shape), tuple(needed[name].shape))
        for name in sorted(needed.keys() & state.keys())
        if state[name].shape != needed[name].shape
    ]
    if missing or extra or misshaped:
        raise CheckpointError(missing, extra, misshaped)
    module.load_state_dict(dict(state), assign=True)
    module.requires_grad_(False).eval()
