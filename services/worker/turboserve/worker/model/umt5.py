"""Encode prompts by UMT5, as for Wan's transformer: 512 tokens, padding zeroed afterwards."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turboserve.worker.model.load import (
    UnreadableCheckpointError,
    load_state,
    read_checkpoint,
    without_values,
)
from turboserve.worker.model.naming import WAN_T5, renamed
from turboserve.worker.model.weights import weight_bytes

TEXT_LEN = 512
"""Tokens of a prompt in Wan 2.1."""

_ORIGINAL_MARK = "token_embedding.weight"
_EMBEDDING, _TIED = "shared.weight", "encoder.embed_tokens.weight"
_TOKENIZER_PLACES = ("tokenizer", "google/umt5-xxl", "../tokenizer", ".")
_TOKENIZER_FILES = ("tokenizer.json", "spiece.model")


class TextEncoderUnavailableError(RuntimeError):
    """The packages that UMT5 needs are not installed. The message names the extra that has them."""


def clean_prompt(prompt: str) -> str:
    """Repair broken characters, resolve HTML entities (twice, as Wan does), and collapse white space."""
    import ftfy

    text = html.unescape(html.unescape(ftfy.fix_text(prompt)))
    return re.sub(r"\s+", " ", text).strip()


class Umt5TextEncoder:
    """The engine's `TextEncoder` over transformers' `UMT5EncoderModel`."""

    def __init__(self, model: Any, tokenizer: Any, text_len: int = TEXT_LEN) -> None:
        """`model` on its device, in its dtype; `tokenizer` of transformers."""
        self._model = model
        self._tokenizer = tokenizer
        self._text_len = text_len
        self.width = int(model.config.d_model)
        """Width of one token's embedding."""
        self.weight_bytes = weight_bytes(model)
        """See `TextEncoder.weight_bytes`."""
        self.workspace_bytes = _workspace_bytes(model, text_len)
        """See `TextEncoder.workspace_bytes`."""

    @property
    def network(self) -> nn.Module:
        """The encoding network."""
        network: nn.Module = self._model
        return network

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings [prompts, text_len, d_model], zero where a prompt has no token.

        Only as many tokens are computed as the longest prompt has. Attention masks padding, and positions are
        relative, so that padding does not change the other tokens.
        """
        tokens = self._tokenizer(
            [clean_prompt(prompt) for prompt in prompts],
            padding="longest",
            truncation=True,
            max_length=self._text_len,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        device = self._model.shared.weight.device
        mask = tokens.attention_mask.to(device)
        hidden = self._model(input_ids=tokens.input_ids.to(device), attention_mask=mask).last_hidden_state
        kept = torch.where(mask.bool().unsqueeze(-1), hidden, torch.zeros_like(hidden))
        return F.pad(kept, (0, 0, 0, self._text_len - kept.shape[1]))


def _workspace_bytes(model: Any, tokens: int) -> int:
    """Memory of encoding one prompt: scores of all heads and their softmax in float32, and the wide tensors
    of the feed-forward."""
    sizes, size = model.config, model.shared.weight.element_size()
    scores = sizes.num_heads * tokens * tokens * (2 * 4 + 2 * size)
    return int(scores + tokens * size * (8 * sizes.d_model + 4 * sizes.d_ff))


def load_text_encoder(
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    text_len: int = TEXT_LEN,
    *,
    values: bool = True,
) -> Umt5TextEncoder:
    """Load UMT5 and its tokenizer from a folder, without network access. Without `values`, the weights are
    left undefined.

    `path`: a folder of diffusers (`text_encoder` and `tokenizer` in it), of transformers, or of Wan
    (`models_t5_umt5-xxl-enc-bf16.pth` and `google/umt5-xxl` in it); or the name of a hub model in the user's
    cache. Raises `TextEncoderUnavailableError`, `UnreadableCheckpointError` or `CheckpointError`.
    """
    try:
        import ftfy  # noqa: F401 - prompts need it
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TextEncoderUnavailableError(
            f"{error.name} is not installed: pip install 'turboserve-worker[models]'"
        ) from error
    folder = _local(path)
    weights = folder / "text_encoder" if (folder / "text_encoder").is_dir() else folder
    model = _load_model(weights, values=values).to(device, dtype)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(_tokenizer_folder(folder)), local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnreadableCheckpointError(f"{folder}: tokenizer: {error}") from error
    return Umt5TextEncoder(model, tokenizer, text_len)


def _load_model(folder: Path, *, values: bool) -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    state = read_checkpoint(folder)
    if not values:
        state = without_values(state)
    if _ORIGINAL_MARK in state:
        config = UMT5Config(**_sizes(state, folder))
        state = renamed(state, WAN_T5.there)
    else:
        file = folder / "config.json"
        try:
            config = UMT5Config(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UnreadableCheckpointError(f"{file}: {error}") from error
    # Files hold the embedding under one of its two names, or under both.
    for name, other in ((_EMBEDDING, _TIED), (_TIED, _EMBEDDING)):
        if name in state:
            state.setdefault(other, state[name])
    with torch.device("meta"):
        model = UMT5EncoderModel(config)
    load_state(model, state)
    model.set_input_embeddings(model.shared)
    return model


def _sizes(state: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    """Derive the sizes that Wan's own file does not state from the shapes of its tensors."""
    try:
        vocabulary, width = state[_ORIGINAL_MARK].shape
        buckets, heads = state["blocks.0.pos_embedding.embedding.weight"].shape
        inner = state["blocks.0.attn.q.weight"].shape[0]
        feed_forward = state["blocks.0.ffn.fc1.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise UnreadableCheckpointError(f"{folder}: not Wan's UMT5: {error}") from error
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": inner // heads,
        "d_ff": feed_forward,
        "num_layers": 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks.")),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu",
    }


def _tokenizer_folder(folder: Path) -> Path:
    for place in _TOKENIZER_PLACES:
        candidate = folder / place
        if any((candidate / file).is_file() for file in _TOKENIZER_FILES):
            return candidate
    raise UnreadableCheckpointError(f"{folder}: no tokenizer in {', '.join(_TOKENIZER_PLACES)}")


def _local(source: Path | str) -> Path:
    path = Path(source)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(source), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise UnreadableCheckpointError(f"{source}: neither a folder nor in the hub's cache") from error
