"""A thin bus over nats-py: typed messages, requests with deadlines, logs, durable consumers."""

from turboserve.bus.client import Bus
from turboserve.bus.consumer import consume
from turboserve.bus.log import Ack, Entry, append, follow, last_entry, next_entry
from turboserve.bus.reader import read

__all__ = ["Ack", "Bus", "Entry", "append", "consume", "follow", "last_entry", "next_entry", "read"]
