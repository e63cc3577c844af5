"""What tenants have used, by day."""
