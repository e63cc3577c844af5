"""A deterministic runtime: several processes' asyncio code on one virtual clock, reproducible by seed."""
