"""Checks of Host and Origin: which pages of which sites may call the gateway."""
