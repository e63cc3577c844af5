"""Where the measurements of a GPU are recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Notes:
    """The results, saved after every measurement.

    A call that is cut short, or a later measurement that runs out of memory, loses nothing.
    """

    def __init__(self, path: Path, deadline_s: float) -> None:
        """`deadline_s` is the monotonic time after which no measurement begins."""
        self.found: dict[str, Any] = {}
        self._path, self._deadline_s = path, deadline_s

    def take(self, into: dict[str, Any], name: str, measure: Callable[[], Any]) -> bool:
        """Measure and record the result, or the reason why it could not be measured.

        Returns whether it could.
        """
        if time.monotonic() > self._deadline_s:
            into[name] = {"not_measured": "out of time"}
            return False
        try:
            into[name] = measure()
            return True
        except torch.OutOfMemoryError as error:
            into[name] = {"out_of_memory": str(error).splitlines()[0]}
        except Exception as error:
            # Devices and versions of torch lack features in many ways; none of these errors may cost the
            # other numbers.
            into[name] = {"unavailable": reason(error)}
        finally:
            self.save()
        return False

    def save(self) -> None:
        """Write the results so far."""
        self._path.write_text(json.dumps(self.found, indent=2) + "\n")


def reason(error: Exception) -> str:
    """Return the kind and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
