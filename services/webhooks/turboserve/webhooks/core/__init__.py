"""Signatures, addresses and payloads. No I/O, no clock."""
