"""A weight manifest as JSON, between two workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from turboserve.wording import counted
from turboserve.worker.model.weight_manifest import WeightManifest, WeightManifestError, WeightTensor

PIECES_LIMIT = 65_536
DIGEST_BYTES = 32

TensorText = tuple[
    Annotated[str, Field(max_length=512)],
    Annotated[str, Field(max_length=32)],
    Annotated[tuple[Annotated[int, Field(ge=0, le=1 << 40)], ...], Field(max_length=16)],
    Annotated[str, Field(pattern=r"^([0-9a-f]{64})*$")],
]
"""Name, type and shape of a tensor, and the digests of its pieces in hexadecimal."""


class ManifestText(BaseModel):
    """The JSON of a manifest."""

    model_config = ConfigDict(frozen=True)

    details: Annotated[str, Field(max_length=1 << 20)]
    piece_bytes: Annotated[int, Field(ge=1, le=1 << 30)]
    tensors: Annotated[tuple[TensorText, ...], Field(max_length=PIECES_LIMIT)]


_TEXT: TypeAdapter[ManifestText] = TypeAdapter(ManifestText)


def to_text(manifest: WeightManifest) -> str:
    """The manifest as JSON, for `from_text`."""
    tensors = tuple((one.name, one.dtype, one.shape, b"".join(one.pieces).hex()) for one in manifest.tensors)
    text = ManifestText(details=manifest.details, piece_bytes=manifest.piece_bytes, tensors=tensors)
    return text.model_dump_json()


def from_text(text: str | bytes, digest: str) -> WeightManifest:
    """Parse a manifest from elsewhere, and check that its digest is `digest`.

    Raises `WeightManifestError`, which names the field or the tensor.
    """
    try:
        parsed = _TEXT.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise WeightManifestError(f"manifest: {where or 'text'}: {first['msg']}") from None
    tensors = tuple(
        WeightTensor(name, dtype, shape, _digests(bytes.fromhex(pieces)))
        for name, dtype, shape, pieces in parsed.tensors
    )
    manifest = WeightManifest(tensors, parsed.details, parsed.piece_bytes)
    for tensor in tensors:
        if len(tensor.pieces) != -(-tensor.size // manifest.piece_bytes):
            digests = counted(len(tensor.pieces), "digest")
            raise WeightManifestError(f"tensor {tensor.name}: {digests} for {tensor.size} bytes")
    if sum(len(tensor.pieces) for tensor in tensors) > PIECES_LIMIT:
        raise WeightManifestError(f"manifest: more than {PIECES_LIMIT} pieces")
    if manifest.digest != digest:
        raise WeightManifestError(f"manifest: digest {manifest.digest}, need {digest}")
    return manifest


def _digests(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES))
