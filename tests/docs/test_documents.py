"""What documents name is in the tree. `make lint-docs` checks the links between the site's pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = [*ROOT.glob("services/*/turboserve"), *ROOT.glob("*/turboserve"), *ROOT.glob("sdk/*/turboserve")]
BUILT = {"build", "dist", "site", "__pycache__", "node_modules"}
SOURCES = [path for path in sorted(ROOT.iterdir()) if path.is_dir() and not path.name.startswith(".")]
FILES = [
    file
    for folder in (ROOT, *SOURCES)
    for file in sorted(folder.glob("*") if folder == ROOT else folder.rglob("*"))
    if file.is_file() and not BUILT & set(file.relative_to(ROOT).parts)
]
DOCUMENTS = [str(file.relative_to(ROOT)) for file in FILES if file.suffix == ".md"]
CODE = {".py", ".js", ".ts", ".toml", ".yaml", ".yml", ".conf", ".sh", ".mk", ""}

LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")
SOURCE_FILE = re.compile(
    r"(?<![\w/.:$~{}<-])(?:[\w.-]+/)+[\w.-]+\.(?:py|js|ts|md|conf|ya?ml|toml|sh|mk|txt)\b"
)
"""A path with a folder, outside of an address: files of a running stack have no such endings."""
FOLDER = re.compile(
    r"`((?:baselines|bench|cli|deploy|docs|experiments|sdk|services|shared|simulation|tests|training)/[\w./-]*)`"
)
TEST_FILE = re.compile(r"(?<![\w/])test_\w+\.py\b")
CODE_SPAN = re.compile(r"`([^`\n]+)`")
TEST_PATH = re.compile(r"^(?:[\w.-]+/)*test_\w+\.py$")
TESTS = {file.name for file in FILES if file.name.startswith("test_")}
DOCUMENT = re.compile(r"(?<![\w/.-])docs/[\w/.-]*\.(?:md|png)\b")


def found(path: str) -> bool:
    """Whether a path exists from the repository's root, or from a distribution's package."""
    return any((folder / path).exists() for folder in (ROOT, *PACKAGES, ROOT / "tests" / "security"))


def test_there_are_documents() -> None:
    assert {"README.md", "docs/index.md", "docs/reference/settings.md"} <= set(DOCUMENTS)


def test_relative_links_lead_to_files_of_the_tree() -> None:
    broken = [
        (name, link)
        for name in DOCUMENTS
        for link in LINK.findall((ROOT / name).read_text())
        if not (ROOT / name).parent.joinpath(link).exists()
    ]
    assert not broken


def test_source_files_and_folders_that_a_document_names_exist() -> None:
    missing = [
        (name, path)
        for name in DOCUMENTS
        for text in [LINK.sub("", (ROOT / name).read_text())]
        for path in {*SOURCE_FILE.findall(text), *FOLDER.findall(text)}
        if not found(path)
    ]
    assert not missing


def test_test_files_that_a_document_names_exist() -> None:
    missing = [
        (name, test)
        for name in DOCUMENTS
        for test in TEST_FILE.findall((ROOT / name).read_text())
        if test not in TESTS
    ]
    assert not missing


def test_the_threat_table_names_tests_relative_to_the_folder_of_security_tests() -> None:
    text = (ROOT / "docs" / "reference" / "security.md").read_text()
    named = {path for path in CODE_SPAN.findall(text) if TEST_PATH.search(path)}
    folders = (ROOT, ROOT / "tests" / "security")
    assert "access/test_security_keys.py" in named
    assert not {path for path in named if not any((folder / path).is_file() for folder in folders)}


def test_documents_that_code_names_exist() -> None:
    missing = [
        (str(file.relative_to(ROOT)), path)
        for file in FILES
        if file.suffix in CODE and not file.name.startswith(".")
        for path in DOCUMENT.findall(file.read_text(errors="replace"))
        if not (ROOT / path).exists()
    ]
    assert not missing
