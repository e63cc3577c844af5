"""The data folder belongs to one user alone: what is open is closed, what cannot be trusted is refused."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

PRIVATE = 0o700
MARKS = ("up.lock", "secrets.json", "ports.json")
"""One of these lies in every folder of a stack."""


class UnsafeFolderError(OSError):
    """The folder cannot be made private; the message names what is wrong and what to do."""


def secure(path: Path) -> list[str]:
    """Make `path` a folder that only this user may enter, creating it if it is missing.

    Returns what was changed and what is worth a warning, one sentence each. Raises UnsafeFolderError.
    """
    remarks = list(check_way(path))
    try:
        path.mkdir(parents=True, mode=PRIVATE)
        return remarks
    except FileExistsError:
        pass
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolderError(f"{path} is not a folder: use another one with --data")
    if found.st_uid != os.geteuid():
        raise UnsafeFolderError(
            f"{path} belongs to {user_name(found.st_uid)}, not to {user_name(os.geteuid())}: "
            "use a folder of your own with --data"
        )
    mode = stat.S_IMODE(found.st_mode)
    others = mode & 0o077
    if not others:
        return remarks
    entries = {entry.name for entry in path.iterdir()}
    if entries and not any(mark in entries for mark in MARKS):
        # Closing somebody's home or a shared folder would do harm.
        raise UnsafeFolderError(
            f"{path} is open to other users (mode {mode:04o}) and holds files that are "
            "no stack's: use a new folder with --data"
        )
    if entries and others & 0o022:
        raise UnsafeFolderError(
            f"other users may write to {path} (mode {mode:04o}), so nothing in it can "
            "be trusted: use a new folder with --data, or close this one with `chmod 700` if it is as it was"
        )
    path.chmod(PRIVATE)
    return [*remarks, f"{path} was open to other users (mode {mode:04o}); now 0700"]


def check_way(path: Path) -> Iterator[str]:
    """Look at every folder and link on the way to `path`, where others might put something else.

    Yields what is worth a warning. Raises UnsafeFolderError.
    """
    for step in steps(path):
        found = os.lstat(step)
        if found.st_uid not in (0, os.geteuid()):
            what = "a link" if stat.S_ISLNK(found.st_mode) else "a folder"
            trouble = f"{step} is {what} of {user_name(found.st_uid)}, who may replace what lies behind it"
            if stat.S_ISLNK(found.st_mode) or os.geteuid() != 0:
                raise UnsafeFolderError(f"{trouble}: use another folder with --data")
            yield trouble
        if not stat.S_ISDIR(found.st_mode) or found.st_mode & stat.S_ISVTX:
            # In a folder such as /tmp nobody moves what is not theirs.
            continue
        shared = found.st_mode & stat.S_IWGRP and not is_own_group(found.st_gid)
        if found.st_mode & stat.S_IWOTH or shared:
            raise UnsafeFolderError(
                f"other users may write to {step} (mode {stat.S_IMODE(found.st_mode):04o}) and replace what "
                f"lies in it: close it with `chmod go-w {step}`, or use another folder with --data"
            )


def steps(path: Path) -> Iterator[Path]:
    """Every folder above `path` that is there, every link on the way, and the folders that links lead to."""
    seen: set[Path] = set()
    end = path.absolute()
    waiting = [end]
    while waiting:
        way = waiting.pop()
        for step in (*reversed(way.parents), way):
            if step in seen:
                continue
            if step.is_symlink():
                seen.add(step)
                yield step
                waiting.append((step.parent / step.readlink()).absolute())
            elif step != end and step.is_dir():
                seen.add(step)
                yield step


def is_own_group(gid: int) -> bool:
    """Whether nobody but this user (and root) is in the group: many systems give each user one."""
    if gid == 0:
        return True
    me = user_name(os.geteuid())
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return gid == os.getegid()
    return group.gr_name == me and set(group.gr_mem) <= {me}


def user_name(uid: int) -> str:
    """The user's name, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def close_files(folder: Path, patterns: Sequence[str], mode: int) -> None:
    """Take from files that earlier versions left open whatever exceeds `mode`."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) & ~mode:
                path.chmod(stat.S_IMODE(found.st_mode) & mode)
