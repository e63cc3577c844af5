"""Policies that the services' own are compared with. Services load them by entry point, never by import."""
