"""A state store whose renewals share no transaction: `python -m …`. Everything else is that of production."""

from __future__ import annotations

from turboserve.state_store.__main__ import main
from turboserve.state_store.service import renewals

if __name__ == "__main__":
    renewals.GATHER_S = 0.0
    main()
