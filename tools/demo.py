"""`make demo`: starts a stack, plays a scripted session, and leaves its video as an MP4 file.

The session changes its prompt twice and migrates to another worker while it plays. The video has no gap.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from turboserve.cli.stack.background import BackgroundStack, StackStartError
from turboserve.client import Client, ProblemError, Session, TurboServeError
from turboserve.client.models import Chunk

PROMPTS = ("a red circle moving left", "a blue square moving up", "a green triangle moving right")
ACT_S = 4.0
"""Video between two changes, seconds."""
Step = tuple[float, Callable[[Session], str]]
"""Media time, and what happens then. Returns a line about it."""


def steps(prompts: tuple[str, ...] = PROMPTS, act_s: float = ACT_S) -> list[Step]:
    """The script: each prompt for one act, and a migration in the middle of the second."""
    turns: list[Step] = [((n + 1) * act_s, _prompt(text)) for n, text in enumerate(prompts[1:])]
    return sorted([*turns, (1.5 * act_s, _migrate)], key=lambda step: step[0])


def play(url: str, output: Path, script: list[Step], seconds: float, say: Callable[[str], None]) -> int:
    """Play a session by the script and write its video. Returns the number of chunks."""
    with Client(url) as client, output.open("wb") as file:
        session = client.create(PROMPTS[0], seed=7)
        say(f"{'0.00':>7} s  {PROMPTS[0]!r} begins as {session.id}")
        coming, chunks, workers = list(script), 0, []
        with session.watch(after=-1) as stream:
            for chunk in stream:
                _write(file.write, chunk, first=not chunks)
                chunks += 1
                if chunk.worker not in workers:
                    workers.append(chunk.worker)
                    say(f"{chunk.start_s:7.2f} s  chunk {chunk.index} comes from {chunk.worker}")
                while coming and chunk.end_s >= coming[0][0]:
                    say(f"{chunk.end_s:7.2f} s  {coming.pop(0)[1](session)}")
                if chunk.end_s >= seconds:
                    break
        session.end()
    return chunks


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("demo.mp4"), help="MP4 file to write.")
    parser.add_argument("--url", help="Gateway to use. The default is a stack of the demo's own.")
    options = parser.parse_args()
    script, seconds = steps(), (len(PROMPTS) + 1) * ACT_S
    try:
        if options.url:
            chunks = play(options.url, options.output, script, seconds, print)
        else:
            with tempfile.TemporaryDirectory(prefix="turboserve-demo-") as folder:
                print("demo: starting a stack with two workers")
                with BackgroundStack(Path(folder) / "data", "--workers", "2") as stack:
                    chunks = play(stack.url, options.output, script, seconds, print)
    except (TurboServeError, StackStartError, OSError) as error:
        sys.exit(f"demo: {error}")
    print(f"demo: {options.output}: {chunks} chunks, {options.output.stat().st_size:,} bytes")


def _prompt(text: str) -> Callable[[Session], str]:
    def change(session: Session) -> str:
        session.prompt(text)
        return f"prompt: {text!r}"

    return change


def _migrate(session: Session) -> str:
    try:
        migration = session.migrate()
    except ProblemError as error:
        if error.code != "transition_not_allowed":
            raise
        # The scheduler balances the load by itself as soon as the second worker is ready.
        return "the session migrates already"
    return f"migration from {migration.worker} to {migration.target or migration.worker} begins"


def _write(write: Callable[[bytes], object], chunk: Chunk, first: bool) -> None:
    write(chunk.mp4 if first else chunk.fragment)


if __name__ == "__main__":
    main()
