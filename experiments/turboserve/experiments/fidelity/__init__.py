"""Latency and quality of the configurations in which a model can generate a chunk."""
