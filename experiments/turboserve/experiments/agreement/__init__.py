"""The simulator against the real stack: the same trace on both sides, and recorded decisions again."""
