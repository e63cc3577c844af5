"""UMT5: equal to transformers' full padded forward; Wan's own names against Wan's own encoder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional as F

from turboserve.worker.model.load import CheckpointError, UnreadableCheckpointError
from turboserve.worker.model.naming import WAN_T5, renamed
from turboserve.worker.model.umt5 import clean_prompt, load_text_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

WORDS = ["a", "red", "circle", "moves", "left", "on", "black", "over", "and", "the", "blue", "square"]
TEXT_LEN = 40
PROMPTS = ["a red circle moves left", "the blue  square\n", "a " * 60]
HEADS = 4


@pytest.fixture(scope="module")
def library() -> UMT5EncoderModel:
    # Takes seconds, so that only the process that runs this test imports it.
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(6)
    config = UMT5Config(
        vocab_size=32,
        d_model=24,
        d_kv=8,
        d_ff=40,
        num_layers=2,
        num_heads=HEADS,
        feed_forward_proj="gated-gelu",
    )
    made = UMT5EncoderModel(config).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.mul_(3.0)
    return made


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -5.0), *((f"▁{word}", -2.0) for word in WORDS)]
    made = Tokenizer(models.Unigram(words, unk_id=2))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="right"
    )


@pytest.fixture
def folders(tmp_path: Path, library: UMT5EncoderModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, Path]:
    library.save_pretrained(tmp_path / "diffusers" / "text_encoder")
    tokenizer.save_pretrained(tmp_path / "diffusers" / "tokenizer")
    library.save_pretrained(tmp_path / "sharded", max_shard_size="5KB")
    tokenizer.save_pretrained(tmp_path / "sharded")
    tokenizer.save_pretrained(tmp_path / "wan" / "google" / "umt5-xxl")
    torch.save(original(library), tmp_path / "wan" / "models_t5_umt5-xxl-enc-bf16.pth")
    return {name: tmp_path / name for name in ("diffusers", "sharded", "wan")}


def original(library: UMT5EncoderModel) -> dict[str, Tensor]:
    state = dict(library.state_dict())
    del state["encoder.embed_tokens.weight"]
    return renamed(state, WAN_T5.back)


def full_forward(library: UMT5EncoderModel, tokenizer: Any) -> Tensor:
    """Encode as diffusers' Wan pipeline: all padded to the full length, padding zeroed afterwards."""
    tokens = tokenizer(
        [" ".join(prompt.split()) for prompt in PROMPTS],
        padding="max_length",
        max_length=TEXT_LEN,
        truncation=True,
        return_tensors="pt",
    )
    hidden: Tensor = library(tokens.input_ids, tokens.attention_mask).last_hidden_state
    mask: Tensor = tokens.attention_mask
    return hidden * mask.unsqueeze(-1)


def test_equals_the_library_s_full_forward(
    folders: dict[str, Path], library: UMT5EncoderModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = full_forward(library, tokenizer)
    assert expected.std() > 0.1
    for name, folder in folders.items():
        found = load_text_encoder(folder, text_len=TEXT_LEN).encode(PROMPTS)
        assert found.shape == (3, TEXT_LEN, 24), name
        assert (found - expected).abs().max() < 1e-5, name
        # Five words and the end mark; the rest is padding.
        assert found[0, 5].abs().max() > 0
        assert torch.equal(found[0, 6:], torch.zeros(TEXT_LEN - 6, 24))
        assert found[2, -1].abs().max() > 0


def test_a_prompt_s_embedding_does_not_depend_on_its_neighbours(folders: dict[str, Path]) -> None:
    encoder = load_text_encoder(folders["diffusers"], text_len=TEXT_LEN)
    together = encoder.encode(PROMPTS)
    for row, prompt in zip(together, PROMPTS, strict=True):
        assert (encoder.encode([prompt])[0] - row).abs().max() < 1e-5


def test_bfloat16_stays_near_float32(folders: dict[str, Path]) -> None:
    exact = load_text_encoder(folders["diffusers"], text_len=TEXT_LEN).encode(PROMPTS)
    half = load_text_encoder(folders["diffusers"], dtype=torch.bfloat16, text_len=TEXT_LEN).encode(PROMPTS)
    assert half.dtype is torch.bfloat16
    assert (half.float() - exact).abs().mean() < 0.05 * exact.std()


def wan_forward(state: dict[str, Tensor], ids: Tensor, mask: Tensor) -> Tensor:
    """Compute Wan's T5 encoder from its own file: no scaling of attention, a relative bias in every layer."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

    length = ids.shape[1]
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    large = 8 + (distance.abs().clamp(min=1) / 8).log() / math.log(128 / 8) * 8
    bucket = torch.where(distance.abs() < 8, distance.abs(), large.long().clamp(max=15)) + (distance > 0) * 16
    x = state["token_embedding.weight"][ids]
    for layer in range(2):
        own = {n.removeprefix(f"blocks.{layer}."): t for n, t in state.items() if f"blocks.{layer}." in n}
        h = norm(x, own["norm1.weight"])
        q, k, v = (
            F.linear(h, own[f"attn.{part}.weight"]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in "qkv"
        )
        scores = q @ k.transpose(-1, -2) + own["pos_embedding.embedding.weight"][bucket].permute(2, 0, 1)
        scores = scores.masked_fill(~mask.bool()[:, None, None, :], torch.finfo(torch.float32).min)
        x = x + F.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), own["attn.o.weight"])
        h = norm(x, own["norm2.weight"])
        gate = F.gelu(F.linear(h, own["ffn.gate.0.weight"]), approximate="tanh")
        x = x + F.linear(F.linear(h, own["ffn.fc1.weight"]) * gate, own["ffn.fc2.weight"])
    return norm(x, state["norm.weight"])


def test_wan_s_names_mean_what_wan_computes(
    library: UMT5EncoderModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    state = original(library)
    assert {
        "token_embedding.weight",
        "blocks.1.pos_embedding.embedding.weight",
        "norm.weight",
    } <= state.keys()
    assert len(state) == 2 + 2 * 10
    tokens = tokenizer(["a red circle moves left on black", "the"], padding=True, return_tensors="pt")
    expected = library(tokens.input_ids, tokens.attention_mask).last_hidden_state
    found = wan_forward(state, tokens.input_ids, tokens.attention_mask)
    kept = tokens.attention_mask.bool()
    assert (found - expected)[kept].abs().max() < 1e-4


def test_prompts_are_cleaned_as_wan_does() -> None:
    assert clean_prompt("  a cat &amp;amp; a\n\t dog  ") == "a cat & a dog"
    assert clean_prompt("itâ€™s &lt;b&gt;") == "it's <b>"


def test_a_missing_and_an_extra_tensor_are_listed(folders: dict[str, Path]) -> None:
    file = folders["wan"] / "models_t5_umt5-xxl-enc-bf16.pth"
    state = torch.load(file, weights_only=True)
    del state["blocks.1.ffn.fc1.weight"]
    state["decoder.norm.weight"] = torch.zeros(1)
    torch.save(state, file)
    with pytest.raises(CheckpointError) as caught:
        load_text_encoder(folders["wan"])
    assert caught.value.missing == ["encoder.block.1.layer.1.DenseReluDense.wi_1.weight"]
    assert caught.value.extra == ["decoder.norm.weight"]


def test_folders_that_hold_no_encoder(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(UnreadableCheckpointError, match="neither a folder nor in the hub's cache"):
        load_text_encoder("nobody/no-such-model-here")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableCheckpointError, match="no checkpoint in it"):
        load_text_encoder(tmp_path / "empty")
    for file in (folders["diffusers"] / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(UnreadableCheckpointError, match="no tokenizer in"):
        load_text_encoder(folders["diffusers"])
    (folders["sharded"] / "config.json").write_text(json.dumps([]))
    with pytest.raises(UnreadableCheckpointError, match=r"config\.json"):
        load_text_encoder(folders["sharded"])
