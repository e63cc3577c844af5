"""Runs one server and ensures that the server never outlives the supervisor.

The guard is started as a file with `python -I -S`: it needs only the standard library and starts in tens of
milliseconds.

- When the lifeline closes or on SIGTERM, the guard sends the stop signal to the server, and later SIGKILL.
- When the guard itself is killed, the kernel signals the server (PR_SET_PDEATHSIG).
- When the server ends, the guard ends with the server's status.

The server has no privileges: if the guard runs as root, the server runs as an unprivileged user. Postgres
refuses root. The guard keeps its own privileges.

Guard *and* server hold a lock file, because they share the open file. A successor therefore starts only when
all processes of its predecessor have ended, whichever of them was killed.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import os
import select
import signal
import stat
import sys
import time
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
FOLDER_FD = 100
UMASK = 0o077
LOCK_TIMEOUT_S = 5.0
LOCK_LIMIT_S = 15.0
STATUS_BUSY = 75
PID_DIGITS = 10
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)

_libc = ctypes.CDLL(None, use_errno=True)


def enter(folder: str) -> None:
    """Open `folder` as descriptor FOLDER_FD. The server accesses it as /proc/self/fd/FOLDER_FD.

    The server's user therefore needs no access to the folders above it: a path that begins at a descriptor
    does not pass through them.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    os.dup2(descriptor, FOLDER_FD, inheritable=True)


def give_up_privileges(uid: int | None, gid: int | None) -> None:
    """Change to user `uid`, if it is given. The program that runs next has no capability, for good.

    A program of an ordinary user has only the ambient capabilities, and `no_new_privs` prevents any gain.
    """
    if uid is not None and gid is not None:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def take_lock(path: str, pid_file: str | None, program: str) -> int:
    """Take the lock, which waits for all processes of an earlier run to end.

    After LOCK_TIMEOUT_S, kill the process that `pid_file` names. After LOCK_LIMIT_S, exit with STATUS_BUSY.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    started = time.monotonic()
    killed = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            waited = time.monotonic() - started
        if waited > LOCK_TIMEOUT_S and not killed and pid_file:
            killed = True
            kill_leftover(pid_file, program)
        if waited > LOCK_LIMIT_S:
            print(f"guard: {path} is still held by another process after {LOCK_LIMIT_S:.0f} s", flush=True)
            sys.exit(STATUS_BUSY)
        time.sleep(0.02)


def kill_leftover(pid_file: str, program: str) -> None:
    """Kill the process that `pid_file` names if it runs `program`: another process may have the id now."""
    try:
        with open(pid_file, encoding="ascii") as file:
            pid = int(file.read())
        if os.path.realpath(f"/proc/{pid}/exe") == os.path.realpath(program):
            print(f"guard: killing process {pid}, left over from an earlier run", flush=True)
            os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError):
        return


class Guard:
    """One server process and the reasons to end it."""

    def __init__(self, options: argparse.Namespace, lifeline: int | None) -> None:
        self.options = options
        self.lifeline = lifeline
        self.kill_at: float | None = None
        self.wake_read, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.child = 0

    def run(self) -> int:
        for number in HANDLED:
            signal.signal(number, self._note)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        lock = None
        if self.options.lock:
            lock = take_lock(self.options.lock, self.options.pid_file, self.options.command[0])
        for stale in self.options.remove:
            try:
                os.unlink(stale)
            except FileNotFoundError:
                pass
        self.child = self._spawn(lock)
        if self.options.pid_file:
            write_pid(self.options.pid_file, self.child)
        return self._watch()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._stop()

    def _stop(self) -> None:
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.options.grace
            if self.child:
                self._signal(self.options.stop_signal)

    def _signal(self, number: int) -> None:
        try:
            os.kill(self.child, number)
        except ProcessLookupError:
            pass

    def _spawn(self, lock: int | None) -> int:
        guard = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            # Reset more than the guard's own handlers: a shell makes its background processes ignore SIGINT
            # and SIGQUIT, and a server without its own handlers yet would not end with the guard.
            for number in (*HANDLED, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            if lock is not None:
                os.set_inheritable(lock, True)
            if self.lifeline is not None:
                os.close(self.lifeline)
            if self.options.folder is not None:
                enter(self.options.folder)
            os.umask(UMASK)
            give_up_privileges(self.options.uid, self.options.gid)
            # After the change of user, which would clear this setting.
            _libc.prctl(PR_SET_PDEATHSIG, self.options.death_signal, 0, 0, 0)
            if os.getppid() != guard:
                os._exit(1)
            os.execv(self.options.command[0], self.options.command)
        except BaseException as error:  # The child must never continue with its parent's code.
            print(f"guard: {self.options.command[0]}: {error}", flush=True)
        os._exit(127)

    def _watch(self) -> int:
        if self.kill_at is not None:
            self._signal(self.options.stop_signal)
        while True:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            wait_s = None
            if self.kill_at is not None:
                wait_s = max(0.0, self.kill_at - time.monotonic())
                if wait_s == 0.0:
                    self._signal(signal.SIGKILL)
                    wait_s = 0.1
            watched = [self.wake_read] + ([self.lifeline] if self.lifeline is not None else [])
            readable, _, _ = select.select(watched, [], [], wait_s)
            if self.wake_read in readable:
                os.read(self.wake_read, 4096)
            if self.lifeline in readable and not os.read(self.lifeline, 1):
                self.lifeline = None
                self._stop()


def write_pid(path: str, pid: int) -> None:
    """Replace the pid file atomically: a reader sees the old contents or the new ones."""
    new = f"{path}.new"
    try:
        os.unlink(new)
    except FileNotFoundError:
        pass
    # The text always has the same length, so that it can overwrite an earlier one in place.
    text = f"{pid:<{PID_DIGITS}}\n"
    try:
        # The server owns the folder, and could have put a link here.
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o640)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        os.replace(new, path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # On a full disk, overwrite the file of an earlier start in place, which needs no space.
        try:
            os.unlink(new)
        except FileNotFoundError:
            pass
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "w", encoding="ascii") as file:
            file.write(text)


def lifeline() -> int | None:
    """Return the lifeline's reading end. None if no descriptor was inherited, also if the variable is set."""
    value = os.environ.get("TURBOSERVE_LIFELINE_FD", "")
    try:
        return int(value) if stat.S_ISFIFO(os.fstat(int(value)).st_mode) else None
    except (OSError, ValueError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="guard", description="Run a server that ends with its supervisor.")
    parser.add_argument("--lock", help="file that is locked while any process of this server is alive")
    parser.add_argument("--pid-file", help="file for the server's process id")
    parser.add_argument("--remove", action="append", default=[], help="file to remove once the lock is held")
    parser.add_argument("--stop-signal", type=int, default=int(signal.SIGTERM))
    parser.add_argument("--death-signal", type=int, default=int(signal.SIGKILL))
    parser.add_argument(
        "--grace", type=float, default=5.0, help="seconds between the stop signal and SIGKILL"
    )
    parser.add_argument("--folder", help="the server's folder, given to it as an open descriptor")
    parser.add_argument("--uid", type=int)
    parser.add_argument("--gid", type=int)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if os.environ.get("TURBOSERVE_LIFELINE_PARENT") == str(os.getppid()):
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return Guard(options, lifeline()).run()


if __name__ == "__main__":
    sys.exit(main())
