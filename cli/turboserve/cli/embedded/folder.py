"""Makes the data folder private to one user, and refuses a folder that cannot be trusted."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

PRIVATE = 0o700
MARKS = ("up.lock", "secrets.json", "ports.json")
"""Every stack's folder has at least one of these files."""


class UnsafeFolderError(OSError):
    """The folder cannot be made private. The message names the problem and what to do."""


def secure(path: Path) -> list[str]:
    """Make `path` a folder that only this user may enter. Creates it if it is missing.

    Returns changes and warnings, one sentence each. Raises UnsafeFolderError.
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
        # Closing a home folder or a shared folder would do harm.
        raise UnsafeFolderError(
            f"{path} is open to other users (mode {mode:04o}) and holds files of "
            "other programs: use a new folder with --data"
        )
    if entries and others & 0o022:
        raise UnsafeFolderError(
            f"other users may write to {path} (mode {mode:04o}), so nothing in it can "
            "be trusted: use a new folder with --data, or run `chmod 700` on this one if its files are "
            "unchanged"
        )
    path.chmod(PRIVATE)
    return [*remarks, f"{path} was open to other users (mode {mode:04o}); now 0700"]


def check_way(path: Path) -> Iterator[str]:
    """Check every folder and link on the path to `path` for other users who could replace it.

    Yields warnings. Raises UnsafeFolderError.
    """
    for step in steps(path):
        found = os.lstat(step)
        if found.st_uid not in (0, os.geteuid()):
            what = "a link" if stat.S_ISLNK(found.st_mode) else "a folder"
            trouble = f"{step} is {what} of {user_name(found.st_uid)}, who may replace the folders below it"
            if stat.S_ISLNK(found.st_mode) or os.geteuid() != 0:
                raise UnsafeFolderError(f"{trouble}: use another folder with --data")
            yield trouble
        if not stat.S_ISDIR(found.st_mode) or found.st_mode & stat.S_ISVTX:
            # In a folder with the sticky bit, such as /tmp, users cannot move files of others.
            continue
        shared = found.st_mode & stat.S_IWGRP and not is_own_group(found.st_gid)
        if found.st_mode & stat.S_IWOTH or shared:
            raise UnsafeFolderError(
                f"other users may write to {step} (mode {stat.S_IMODE(found.st_mode):04o}) and replace its "
                f"content: run `chmod go-w {step}`, or use another folder with --data"
            )


def steps(path: Path) -> Iterator[Path]:
    """Yield the existing folders above `path`, the links on the path, and the folders that links lead to."""
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
    """Whether only this user (and root) is in the group. Many systems give each user such a group."""
    if gid == 0:
        return True
    me = user_name(os.geteuid())
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return gid == os.getegid()
    return group.gr_name == me and set(group.gr_mem) <= {me}


def user_name(uid: int) -> str:
    """Return the user's name, or `user` and the number if there is no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def close_files(folder: Path, patterns: Sequence[str], mode: int) -> None:
    """Remove permissions beyond `mode` from files that earlier versions created with more."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) & ~mode:
                path.chmod(stat.S_IMODE(found.st_mode) & mode)
