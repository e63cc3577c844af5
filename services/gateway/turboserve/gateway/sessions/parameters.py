"""Parameters that several resources of a session have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

SessionId = Annotated[str, Path(description="Id of the session.", examples=["ses_5f3a9c"])]
