"""A pool that grows and shrinks under real sessions."""
