"""NATS with JetStream in memory: deterministic, for the virtual loop and for tests on an ordinary one.

    broker = MemoryBroker(random.Random(seed), FaultyNetwork(random.Random(seed), Rates(...)), loop=loop)
    bus = await Bus.connect("gateway", settings, broker.connect)    # in the process that the bus is for

`broker.connect` accepts the arguments of `nats.connect` and returns a `MemoryClient`: nats-py's client, with
a `Link` in place of its socket. The client belongs to the process (`runtime.process.current()`) that
connects. Messages are read in that process's context, so a frozen process reads them later and a killed
process never. The broker itself belongs to no process.

`Network` determines the delay and the faults of each message. `Network(latency_s)` has no faults.
`FaultyNetwork(generator, rates)` delays, loses, doubles and holds back messages, and can mute a client.
Messages of one connection and direction keep their order, as in TCP.

Faults of the broker are methods and fields of `MemoryBroker`:

- `stop` and `start` (also on an empty disk), `freeze`, `slow_down`
- `cut_off` (a client or all clients of a process), `disconnect_client`
- `set_storage` (`Storage.FULL` refuses appends, `SILENT` does not answer them, `OFF` is a broker without
  JetStream)
- `repair`, which ends all of them

`broker.jetstream.on_append` is called with each accepted message. `broker.jetstream.streams` holds the stored
messages.

Not modelled: accounts and permissions, limits on connections, push consumers and consumers with
acknowledgements, mirrors and sources, key-value and object stores.
"""

from turboserve.simulation.runtime.broker.client import MemoryClient
from turboserve.simulation.runtime.broker.jetstream import Storage
from turboserve.simulation.runtime.broker.messages import Kind, Message
from turboserve.simulation.runtime.broker.network import (
    DOUBLED,
    LOST,
    FaultyNetwork,
    MessageOutcome,
    Network,
    Rates,
)
from turboserve.simulation.runtime.broker.server import MemoryBroker
from turboserve.simulation.runtime.broker.stream import Stored, Stream

__all__ = [
    "DOUBLED",
    "LOST",
    "FaultyNetwork",
    "Kind",
    "MemoryBroker",
    "MemoryClient",
    "Message",
    "MessageOutcome",
    "Network",
    "Rates",
    "Storage",
    "Stored",
    "Stream",
]
