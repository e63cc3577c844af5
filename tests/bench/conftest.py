"""Makes the helpers beside this file importable."""

from __future__ import annotations

import sys
from pathlib import Path

# The tests are no package: shared modules are imported from this folder.
sys.path.insert(0, str(Path(__file__).parent))
