"""A deterministic runtime: several processes' asyncio code on one virtual clock, reproducible from a seed."""
