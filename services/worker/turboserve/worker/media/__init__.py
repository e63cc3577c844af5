"""Frames in, closed fMP4 fragments out: every chunk can be decoded by itself and joined to any other."""

from turboserve.worker.media.encoder import EncoderSettings, FragmentEncoder, Packaged
from turboserve.worker.media.errors import FrameFormatError

__all__ = ["EncoderSettings", "FragmentEncoder", "FrameFormatError", "Packaged"]
