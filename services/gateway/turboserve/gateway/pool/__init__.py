"""Models and workers, as the pool has them now."""
