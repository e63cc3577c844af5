"""Names of public checkpoints: the same tensors under other names, mapped both ways.

The worker's own names are those of Self-Forcing and LongLive for the transformer, and those of diffusers'
`AutoencoderKLWan` for the VAE. A name that is in no table passes unchanged; the strict loading afterwards
lists it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

State = dict[str, Tensor]

_SUFFIX = r"((?:\.(?:weight|bias|gamma))?)"


class Renaming:
    """A bijection between two vocabularies, given as pairs of module names; `N` stands for any number."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        table = list(pairs)
        self._there = [_rule(theirs, ours) for theirs, ours in table]
        self._back = [_rule(ours, theirs) for theirs, ours in table]

    def there(self, name: str) -> str:
        """Map a name of the first vocabulary to the second."""
        return _apply(self._there, name)

    def back(self, name: str) -> str:
        """Map a name of the second vocabulary to the first."""
        return _apply(self._back, name)


def _rule(source: str, target: str) -> tuple[re.Pattern[str], str]:
    pattern = r"(\d+)".join(re.escape(part) for part in source.split("N"))
    numbers = iter(range(1, 10))
    replaced = re.sub("N", lambda _: rf"\g<{next(numbers)}>", target)
    return re.compile(pattern + _SUFFIX), replaced + rf"\g<{source.count('N') + 1}>"


def _apply(rules: list[tuple[re.Pattern[str], str]], name: str) -> str:
    for pattern, target in rules:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(target)
    return name


def renamed(state: Mapping[str, Tensor], rename: Callable[[str], str]) -> State:
    """The same tensors under other names."""
    return {rename(name): tensor for name, tensor in state.items()}


def _attention(theirs: str, ours: str) -> list[tuple[str, str]]:
    parts = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q", "norm_k": "norm_k"}
    return [(f"blocks.N.{theirs}.{a}", f"blocks.N.{ours}.{b}") for a, b in parts.items()]


DIFFUSERS_TRANSFORMER = Renaming(
    [
        *_attention("attn1", "self_attn"),
        *_attention("attn2", "cross_attn"),
        # diffusers counts the norms in the order in which they are applied; Wan's third is applied second.
        ("blocks.N.norm2", "blocks.N.norm3"),
        ("blocks.N.ffn.net.0.proj", "blocks.N.ffn.0"),
        ("blocks.N.ffn.net.2", "blocks.N.ffn.2"),
        ("blocks.N.scale_shift_table", "blocks.N.modulation"),
        ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
        ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
        ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
        ("condition_embedder.time_proj", "time_projection.1"),
        ("scale_shift_table", "head.modulation"),
        ("proj_out", "head.head"),
    ]
)
"""diffusers' `WanTransformer3DModel` ↔ Wan, Self-Forcing and LongLive."""


def transformer_names(state: Mapping[str, Tensor]) -> State:
    """A transformer's tensors under the worker's names, from any public naming."""
    if any(name.startswith(("condition_embedder.", "proj_out.")) for name in state):
        return renamed(state, DIFFUSERS_TRANSFORMER.there)
    return dict(state)


WAN_T5 = Renaming(
    [
        ("token_embedding", "shared"),
        ("blocks.N.norm1", "encoder.block.N.layer.0.layer_norm"),
        *(
            (f"blocks.N.attn.{part}", f"encoder.block.N.layer.0.SelfAttention.{part}")
            for part in ("q", "k", "v", "o")
        ),
        (
            "blocks.N.pos_embedding.embedding",
            "encoder.block.N.layer.0.SelfAttention.relative_attention_bias",
        ),
        ("blocks.N.norm2", "encoder.block.N.layer.1.layer_norm"),
        ("blocks.N.ffn.gate.0", "encoder.block.N.layer.1.DenseReluDense.wi_0"),
        ("blocks.N.ffn.fc1", "encoder.block.N.layer.1.DenseReluDense.wi_1"),
        ("blocks.N.ffn.fc2", "encoder.block.N.layer.1.DenseReluDense.wo"),
        ("norm", "encoder.final_layer_norm"),
    ]
)
"""`models_t5_umt5-xxl-enc-bf16.pth` ↔ transformers' `UMT5EncoderModel`."""


def wan_vae(levels: int, res_blocks: int) -> Renaming:
    """Decoder of `Wan2.1_VAE.pth` ↔ diffusers' `AutoencoderKLWan`.

    The original numbers all blocks of all `levels` in one list. Each level has `res_blocks` + 1 residual
    blocks and, except for the last level, an upsampling block.
    """
    pairs = [
        ("conv2", "post_quant_conv"),
        ("decoder.conv1", "decoder.conv_in"),
        ("decoder.head.0", "decoder.norm_out"),
        ("decoder.head.2", "decoder.conv_out"),
        *_residual("decoder.middle.0", "decoder.mid_block.resnets.0"),
        *_residual("decoder.middle.2", "decoder.mid_block.resnets.1"),
    ]
    pairs += [
        (f"decoder.middle.1.{part}", f"decoder.mid_block.attentions.0.{part}")
        for part in ("norm", "to_qkv", "proj")
    ]
    for level in range(levels):
        first = level * (res_blocks + 2)
        for block in range(res_blocks + 1):
            pairs += _residual(
                f"decoder.upsamples.{first + block}", f"decoder.up_blocks.{level}.resnets.{block}"
            )
        pairs += [
            (
                f"decoder.upsamples.{first + res_blocks + 1}.{part}",
                f"decoder.up_blocks.{level}.upsamplers.0.{part}",
            )
            for part in ("resample.1", "time_conv")
        ]
    return Renaming(pairs)


def _residual(theirs: str, ours: str) -> list[tuple[str, str]]:
    parts = {
        "residual.0": "norm1",
        "residual.2": "conv1",
        "residual.3": "norm2",
        "residual.6": "conv2",
        "shortcut": "conv_shortcut",
    }
    return [(f"{theirs}.{a}", f"{ours}.{b}") for a, b in parts.items()]
