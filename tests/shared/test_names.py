"""Names of the tree: one class of a name per distribution, exceptions that end in Error, no retired name."""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {
    path.parent.name: path.parent / "turboserve"
    for pattern in ("*/pyproject.toml", "services/*/pyproject.toml", "sdk/*/pyproject.toml")
    for path in ROOT.glob(pattern)
}
BUILTIN_EXCEPTIONS = {
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException)
}
_RETIRED = """
    Aftermath Arrivals Bell Blow Blows Conductor Deed Departures Desk Filling Gift Hearing Landing Lane Led
    Lives
    NotReady Obituaries Patience Person Picture Pictured Pulse Question Rents Together Troubles Word
    EndGift GiftBroken GiftSealed GiveRest GiveSeal Halt Thaw Unhalt NobodyRenews
    PATIENCE_S abreast aftermath adoption asleep conductor deposed filling give_way halted happened
    landing obituaries own_anew owned_anew parked play rents shelve shelved thaw told
    in_lane lane_depth land pool_slot pulse told_at
    Life Same Stay
"""
RETIRED = frozenset(_RETIRED.split())
"""Names that docs/glossary.md replaces: of modules, classes, functions, constants and attributes."""
RETIRED_MODULES = RETIRED | {"asked", "gift", "known"}
RETIRED_FUNCTIONS = RETIRED | {"cut", "frozen"}
"""These words are usual names of attributes and variables, and retired only for modules, or for functions."""
STOPPED_PROCESSES = ("simulation/injector", "simulation/service")
"""Modules in which `frozen` is a process that is stopped, and not a session."""
_MOVE = re.compile(r"(?:(?<![A-Za-z])m|M)ov(?:e|es|ed|er|ers|ing)(?=_|[A-Z]|$)")
OTHER_MOVES = {
    "MovedToHost": "a state, within its worker",
    "MovingAverage": "of weights",
    "PlayheadMoved": "",
    "_move_playhead": "",
    "move_to_end": "of a dictionary",
    "_move_ends": "of a ring",
    "bench/engine/traffic": "a playhead",
    "bench/engine/whole": "a state, within its worker",
    "experiments/toyworld/judge": "figures",
    "experiments/toyworld/world": "figures",
    "gateway/timeline/timeline": "a playhead",
    "worker/engine/session": "a playhead",
    "simulation/runtime/rows/progress": "a position in a log",
    "state_store/accounting": "a position in a log",
    "state_store/ports/sessions": "a position in a log",
    "state_store/repository/progress": "a position in a log",
    "state_store/repository/cost": "time, from one row to another",
}
"""Names with the word move, and modules with such names, which do not mean that a session changes its worker:
that is a migration. With what moves."""


@dataclass
class Module:
    """The names of a module, with the lines of its classes and functions."""

    classes: list[ast.ClassDef] = field(default_factory=list)
    """Nested ones too."""
    functions: list[tuple[str, int]] = field(default_factory=list)
    defined: set[str] = field(default_factory=set)
    """Names of its classes, functions, constants, fields and attributes."""
    mentioned: set[str] = field(default_factory=set)
    """Every name: defined, used, of an argument, an attribute or a keyword."""

    @classmethod
    def of(cls, tree: ast.Module) -> Module:
        """Read the whole tree once: this takes longer than all that the tests do with the names."""
        found = cls()
        found.defined.update(_assigned(tree.body))
        for node in ast.walk(tree):
            found._add(node)
        return found

    def _add(self, node: ast.AST) -> None:
        match node:
            case ast.ClassDef(name=name):
                self.classes.append(node)
                self.defined |= {name, *_assigned(node.body)}
                self.mentioned.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self.functions.append((name, node.lineno))
                self.defined.add(name)
                self.mentioned.add(name)
            case ast.Attribute(attr=name):
                self.mentioned.add(name)
                if isinstance(node.ctx, ast.Store):
                    self.defined.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                self.mentioned.add(name)
            case ast.ImportFrom(names=names):
                self.mentioned.update(alias.name for alias in names)


def trees(distribution: str) -> Iterator[tuple[Path, ast.Module]]:
    """Yield every module of the distribution, parsed."""
    for path in sorted(DISTRIBUTIONS[distribution].rglob("*.py")):
        yield path, ast.parse(path.read_text())


@cache
def modules(distribution: str) -> dict[Path, Module]:
    """Return every module of the distribution."""
    return {path: Module.of(tree) for path, tree in trees(distribution)}


def classes(distribution: str) -> Iterator[tuple[Path, ast.ClassDef]]:
    """Yield every class with its file relative to the repository."""
    for path, module in modules(distribution).items():
        for node in module.classes:
            yield path.relative_to(ROOT), node


def _assigned(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_the_distributions_are_found() -> None:
    services = {"gateway", "scheduler", "autoscaler", "worker", "state-store"}
    others = {"shared", "cli", "bench", "experiments", "simulation", "baselines"}
    assert services | others <= set(DISTRIBUTIONS)
    assert all(len(modules(name)) > 2 for name in DISTRIBUTIONS)


@pytest.mark.parametrize("distribution", sorted(DISTRIBUTIONS))
def test_no_two_classes_of_a_distribution_have_one_name(distribution: str) -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, node in classes(distribution):
        places[node.name].append(f"{path}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_exceptions_end_in_error() -> None:
    found = [(path, node) for name in DISTRIBUTIONS for path, node in classes(name)]
    bases = {node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases} for _, node in found}
    exceptions, before = set(BUILTIN_EXCEPTIONS), 0
    while len(exceptions) != before:
        before = len(exceptions)
        exceptions |= {name for name, of in bases.items() if of & exceptions}
    own = [(path, node) for path, node in found if bases[node.name] & exceptions]
    assert len(own) > 50
    assert [f"{path}: {node.name}" for path, node in own if not node.name.endswith("Error")] == []


def spelled(name: str) -> str:
    """The name without the underscores that make it private."""
    return name.strip("_")


@pytest.mark.parametrize("distribution", sorted(DISTRIBUTIONS))
def test_no_retired_name_comes_back(distribution: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, module in modules(distribution).items()
        for name in module.defined
        if {spelled(name), spelled(name).lower() if name.isupper() else spelled(name)} & RETIRED
    }
    assert sorted(found) == []


@pytest.mark.parametrize("distribution", sorted(DISTRIBUTIONS))
def test_no_retired_module_or_function_comes_back(distribution: str) -> None:
    retired = {path for path in modules(distribution) if spelled(path.stem) in RETIRED_MODULES}
    assert retired == set()
    found = {
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, module in modules(distribution).items()
        if not str(path.with_suffix("")).endswith(STOPPED_PROCESSES)
        for name, line in module.functions
        if spelled(name) in RETIRED_FUNCTIONS
    }
    assert sorted(found) == []


@pytest.mark.parametrize("distribution", sorted(DISTRIBUTIONS))
def test_a_change_of_worker_is_called_a_migration(distribution: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, module in modules(distribution).items()
        if path.parent.name != "versions" and not str(path.with_suffix("")).endswith(tuple(OTHER_MOVES))
        for name in {path.stem, *module.mentioned}
        if _MOVE.search(name) and name not in OTHER_MOVES
    }
    assert sorted(found) == []


def test_names_with_the_word_move_are_recognized() -> None:
    moves = (
        "move",
        "moves",
        "_moved",
        "BeginMove",
        "move_limit_s",
        "MovesPerWorker",
        "session_moving",
        "Mover",
    )
    assert all(_MOVE.search(name) for name in moves)
    others = ("remove", "Remover", "_removed", "movement", "movedim", "AlarmOver", "unmoved")
    assert not any(_MOVE.search(name) for name in others)
