"""Who asks: API keys and their tenants."""
