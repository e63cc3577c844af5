"""How `make setup` installs: uv gets pip's settings, and unknown ones are left to pip."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import install


def test_uv_gets_the_settings_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = f"file://{tmp_path} file://{tmp_path}/missing https://example.com/simple"
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", places)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    found = install.settings()
    options = install.options_of({name: found[name] for name in ("extra-index-url", "find-links")})
    assert options is not None
    pairs = [*zip(options[::2], options[1::2], strict=True)]
    assert pairs == [
        ("--index-strategy", "unsafe-best-match"),
        ("--extra-index-url", f"file://{tmp_path}"),
        ("--extra-index-url", "https://example.com/simple"),
        ("--find-links", str(tmp_path)),
    ]


def test_what_is_unknown_is_left_to_pip() -> None:
    assert install.options_of({"cert": "x"}) is not None
    assert install.options_of({"cert": "x", "no-index": "1"}) is None
