"""A weight manifest: what its digest covers, its shards, and its text between two workers."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from tests.worker.copied_weights import Copied
from turboserve.worker.model import weights
from turboserve.worker.model.weight_manifest import WeightManifest, WeightManifestError
from turboserve.worker.model.weights import manifest_of, named_weights, piece_digest, weight_memory
from turboserve.worker.replicas.toyworld import load_toyworld
from turboserve.worker.weight_transfer.manifest_text import from_text, to_text


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> dict[str, nn.Module]:
    monkeypatch.setattr(weights, "PIECE_BYTES", 64)
    torch.manual_seed(0)
    large = nn.Linear(7, 9)
    large.register_buffer("empty", torch.empty(0, dtype=torch.bfloat16))
    large.register_buffer("flag", torch.tensor(True))
    return {"large": large, "small": nn.Linear(2, 1).bfloat16()}


def test_every_byte_is_in_one_piece_of_one_shard_and_has_its_digest(networks: dict[str, nn.Module]) -> None:
    manifest, named = manifest_of(networks, "details"), named_weights(networks)
    assert {tensor.name: tensor.size for tensor in manifest.tensors} == {
        name: tensor.numel() * tensor.element_size() for name, tensor in named.items()
    }
    for shard_bytes in (1, 100, 10**6):
        shards = manifest.shards(shard_bytes)
        assert [shard.number for shard in shards] == [*range(len(shards))]
        assert sum(shard.size for shard in shards) == manifest.size
        assert all(shard_bytes <= shard.size < shard_bytes + 64 for shard in shards[:-1])
        at = dict.fromkeys(named, 0)
        for piece in (piece for shard in shards for piece in shard.pieces):
            assert piece.offset == at[piece.tensor]
            at[piece.tensor] += piece.size
            memory = weight_memory(named[piece.tensor])[piece.offset : piece.offset + piece.size]
            assert piece_digest(memory) == piece.digest
        assert at == {tensor.name: tensor.size for tensor in manifest.tensors}


def test_the_text_of_a_manifest_is_the_manifest(networks: dict[str, nn.Module]) -> None:
    manifest = manifest_of(networks, "détails")
    assert from_text(to_text(manifest), manifest.digest) == manifest


def test_a_changed_text_is_refused(networks: dict[str, nn.Module]) -> None:
    manifest = manifest_of(networks, "details")
    text = json.loads(to_text(manifest))

    def changed(**fields: object) -> str:
        return json.dumps(text | fields)

    first = text["tensors"][0]
    assert first[0] == "large.bias"
    other_digest = "0" * 64
    for wrong, reason in (
        (changed(details="other"), "digest"),
        (changed(tensors=text["tensors"][1:]), "digest"),
        (changed(tensors=[[*first[:3], other_digest], *text["tensors"][1:]]), "digest"),
        (changed(tensors=[[first[0], "torch.int32", *first[2:]], *text["tensors"][1:]]), "digest"),
        (changed(tensors=[[first[0], "torch.what", *first[2:]]]), "large.bias: type torch.what"),
        (changed(tensors=[[*first[:2], [900], first[3]]]), "large.bias: 1 digest for 3600 bytes"),
        (changed(tensors=[[*first[:3], "0g"]]), "tensors.0.3"),
        (changed(piece_bytes=0), "piece_bytes"),
        (changed(piece_bytes=7), "large.bias: 1 digest for 36 bytes"),
        ("[", "manifest: text"),
    ):
        with pytest.raises(WeightManifestError, match=reason):
            from_text(wrong, manifest.digest)
    with pytest.raises(WeightManifestError, match="digest"):
        from_text(to_text(manifest), "0" * 32)


def test_a_loaded_model_has_the_manifest_of_its_digest() -> None:
    models = load_toyworld()
    assert isinstance(models.manifest, WeightManifest)
    assert models.weights == models.manifest.digest
    assert models.manifest.size == models.weight_bytes


def test_a_filled_model_is_the_loaded_one() -> None:
    loaded = load_toyworld()
    filled = load_toyworld(filler=Copied(loaded))
    assert manifest_of(filled.networks, loaded.manifest.details) == loaded.manifest  # type: ignore[union-attr]
    prompts = ["a red circle moving left on black"]
    assert torch.equal(filled.text.encode(prompts), loaded.text.encode(prompts))
