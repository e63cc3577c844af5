"""The options of the browser that all tests share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.browser import DISABLED_FEATURES


def test_no_feature_that_the_driver_disables_is_enabled() -> None:
    """Of the option `--disable-features` the last one counts, and that is the one of the tests."""
    driver = Path(pytest.importorskip("playwright").__file__).parent / "driver/package/lib/coreBundle.js"
    found = re.search(r"disabledFeatures = \[(.*?)\]\.filter", driver.read_text(), re.DOTALL)
    assert found is not None
    named = set(re.findall(r'^\s*"(\w+)",?$', found[1], re.MULTILINE))
    # Of Microsoft's Edge.
    names = {name for name in named if not name.startswith("ms")}
    assert "NetworkTimeServiceQuerying" in names
    assert not names - set(DISABLED_FEATURES.split(","))
