"""Many viewers of one session at one gateway."""
