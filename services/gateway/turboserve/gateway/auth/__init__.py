"""Authentication: API keys and their tenants."""
