"""The kinds of attention that an engine can be given: which rows go into one call, and by which kernel."""

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
    """The only kernel allowed; None: as PyTorch chooses."""

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """In it, attention is done by the kernel."""
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
"""By name: each row in a call of its own, by the kernel that PyTorch chooses or a certain one; or all rows in
one."""


@torch.inference_mode()
def attention_kind(name: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> AttentionKind:
    """The kind of this name. Raises `AttentionUnavailableError` where it does not do such heads on this
    device."""
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
