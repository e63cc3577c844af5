"""Processor time of the state store by request."""
