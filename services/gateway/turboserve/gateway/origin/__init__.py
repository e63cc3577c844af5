"""Which pages of which sites may call: checks of Host and Origin."""
