"""Settings of the recorder, read from `TURBOSERVE_…` variables."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from turboserve.config import Seconds
from turboserve.config import Settings as Shared
from turboserve.recorder.core.batching import SegmentLimits

SCHEMES = ("file", "s3")


class Settings(Shared):
    """Where recordings are stored, and in which pieces."""

    recordings_url: str = "file:.turboserve/recordings"
    """Where recordings are stored: `file:FOLDER`, or `s3://BUCKET/PREFIX` for any S3-compatible storage."""
    recordings_s3_endpoint: str | None = None
    """Address of the S3-compatible storage. None: Amazon's, of the region."""
    recordings_s3_region: str = "us-east-1"
    """Region of the bucket."""
    recordings_s3_access_key_id: SecretStr | None = None
    """Access key of the storage. None: the machine's own role."""
    recordings_s3_secret_access_key: SecretStr | None = None
    """Secret of the access key."""
    recording_segment_s: Seconds = 6.0
    """Longest segment, seconds of video. Each is one object."""
    recording_segment_bytes: int = Field(default=16 * 2**20, ge=2**16)
    """A segment is also stored when it has this many bytes."""
    recording_flush_s: Seconds = 10.0
    """An unfinished segment is stored when its first chunk is this old, as when a session pauses."""
    recording_poll_s: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """Interval at which the recorder asks which sessions are recorded, seconds."""
    recording_storage_timeout_s: Seconds = 30.0
    """Time that object storage has for one request. The recorder then repeats it."""
    recording_cache_bytes: int = Field(default=64 * 2**20, ge=2**20)
    """Memory for segments that clients read."""

    @field_validator("recordings_url")
    @classmethod
    def _known(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in SCHEMES:
            raise ValueError("must be file:FOLDER or s3://BUCKET/PREFIX")
        if parts.scheme == "file" and (parts.netloc or not parts.path):
            raise ValueError("file: needs a folder, as in file:/var/lib/turboserve/recordings")
        if parts.scheme == "s3" and not parts.netloc:
            raise ValueError("s3: needs a bucket, as in s3://BUCKET/PREFIX")
        return value

    @property
    def segment_limits(self) -> SegmentLimits:
        return SegmentLimits(self.recording_segment_s, self.recording_segment_bytes, self.recording_flush_s)
