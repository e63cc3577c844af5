"""A thin layer over nats-py: typed messages, requests with deadlines, logs."""

from turboserve.bus.client import Bus
from turboserve.bus.follower import follow
from turboserve.bus.log import LAG_LIMIT_S, LAG_WARN_S, Ack, Entry, Lag, append, last_entry, next_entry
from turboserve.bus.owners import Owners
from turboserve.bus.reader import read, read_headers
from turboserve.bus.unreadable import UNREADABLE, skip

__all__ = [
    "LAG_LIMIT_S",
    "LAG_WARN_S",
    "UNREADABLE",
    "Ack",
    "Bus",
    "Entry",
    "Lag",
    "Owners",
    "append",
    "follow",
    "last_entry",
    "next_entry",
    "read",
    "read_headers",
    "skip",
]
