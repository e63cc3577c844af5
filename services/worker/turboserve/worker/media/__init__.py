"""Encode frames to closed fMP4 fragments: every chunk decodes by itself and joins any other."""

from turboserve.worker.media.encoder import EncodedChunk, EncoderSettings, FragmentEncoder
from turboserve.worker.media.errors import FrameFormatError

__all__ = ["EncodedChunk", "EncoderSettings", "FragmentEncoder", "FrameFormatError"]
