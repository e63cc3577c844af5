"""Messages about viewers that gateways send to each other."""

from __future__ import annotations

from turboserve.contracts.base import Contract, Id


class LeaveViewer(Contract):
    """gateway → gateway: a viewer over WebRTC wants to leave, and its request reached another gateway.

    A lost message changes little: a viewer that closes its connection is noticed within seconds.
    """

    tenant: Id
    """Tenant of the request, which may read `session`."""
    session: Id
    peer: Id
    """Id of the viewer, which names the gateway that serves it."""
