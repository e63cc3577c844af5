"""Settings of a stack whose tests make requests on a busy machine: what is slow there has not failed."""

from __future__ import annotations

from typing import Final

DEADLINES: Final = {
    "TURBOSERVE_REQUEST_DEADLINE_S": "12",
    "TURBOSERVE_TRANSACTION_DEADLINE_S": "10",
    "TURBOSERVE_MIGRATION_TIMEOUT_S": "120",
}
"""A request that a service does not answer in 3 s, the default, is refused with 503."""
WORKERS: Final = {"TURBOSERVE_LEASE_S": "30", "TURBOSERVE_WORKER_TIMEOUT_S": "40"}
"""A worker that does not renew for 12 s, the default, is taken for dead. The end of a process is seen at
once."""
LEADERS: Final = {
    "TURBOSERVE_LEADER_RENEW_S": "2",
    "TURBOSERVE_LEADER_LEASE_S": "8",
    "TURBOSERVE_LEADER_TIMEOUT_S": "10",
}
"""By default, the scheduler and the autoscaler renew every half second: half of what an idle stack costs."""
PATIENT: Final = {**DEADLINES, **WORKERS, **LEADERS}
