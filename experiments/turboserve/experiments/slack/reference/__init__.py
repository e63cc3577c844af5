"""The policy `in-time`, chunk by chunk: what its faster form is compared with."""
