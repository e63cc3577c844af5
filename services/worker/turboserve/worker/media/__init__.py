"""Frames in, closed fMP4 fragments out: every chunk can be decoded by itself and joined to any other."""

from turboserve.worker.media.encoder import EncodedChunk, EncoderSettings, FragmentEncoder
from turboserve.worker.media.errors import FrameFormatError

__all__ = ["EncodedChunk", "EncoderSettings", "FragmentEncoder", "FrameFormatError"]
