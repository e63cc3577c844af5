"""Chunks that other workers decode: a pool of decode workers, and the workers that use it."""
