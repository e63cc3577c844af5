"""In-memory ports of a worker: a device with declared latencies and no tensors in its chunks, and a network.

The production engine, its driver, its packager and both roles of a migration run on them unmodified.
"""
