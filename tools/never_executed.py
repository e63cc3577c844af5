"""Fails if a module of the tree was not executed by any test: `make coverage` runs it after the tests.

Reads the combined data of coverage.py in the current folder.
"""

from __future__ import annotations

import sys

from coverage import Coverage


def main() -> int:
    measured = Coverage()
    measured.load()
    data = measured.get_data()
    missed = []
    for file in sorted(data.measured_files()):
        _, statements, _, missing, _ = measured.analysis2(file)
        if statements and len(missing) == len(statements):
            missed.append(file)
    for file in missed:
        print(f"no test executes {file}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
