"""Sends events to the webhooks of tenants."""
