"""The kinds of attention of an engine: which rows one call takes, and which kernel computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from turboserve.worker.engine.errors import AttentionUnavailableError
from turboserve.worker.engine.rows import Row, RowsMemory
from turboserve.worker.engine.varlen import VarlenMemory, require_varlen
from turboserve.worker.model.block import AttentionMemory
from turboserve.worker.model.config import ModelConfig


@dataclass(frozen=True)
class AttentionKind:
    """How the rows of a forward attend."""

    memory: Callable[[Sequence[Row]], AttentionMemory]
    kernel: SDPBackend | None = None
    """The only kernel allowed. None: PyTorch chooses."""

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Compute attention by this kernel while the body runs."""
        if self.kernel is None:
            yield
            return
        with sdpa_kernel(self.kernel):
            yield


KINDS = {
    "rows": AttentionKind(RowsMemory),
    "flash": AttentionKind(RowsMemory, SDPBackend.FLASH_ATTENTION),
    "cudnn": AttentionKind(RowsMemory, SDPBackend.CUDNN_ATTENTION),
    "varlen": AttentionKind(VarlenMemory),
}
"""Kinds by name. `varlen` computes all rows in one call; the others compute each row in its own call, by the
kernel that PyTorch chooses or by the named one."""


@torch.inference_mode()
def attention_kind(name: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> AttentionKind:
    """The attention kind of this name. Raises `AttentionUnavailableError` if the device lacks it for such
    heads."""
    if name not in KINDS:
        raise AttentionUnavailableError(name, f"is not one of {', '.join(KINDS)}")
    kind = KINDS[name]
    if name == "varlen":
        require_varlen(device, dtype)
    elif kind.kernel is not None:
        tokens = torch.zeros(1, config.num_heads, 8, config.head_dim, device=device, dtype=dtype)
        try:
            with kind.chosen():
                F.scaled_dot_product_attention(tokens, tokens, tokens)
        except RuntimeError as error:
            raise AttentionUnavailableError(
                name, f"{dtype} on {device}: {str(error).splitlines()[0]}"
            ) from error
    return kind
