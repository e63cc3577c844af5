"""REST resources for webhooks and their deliveries."""
