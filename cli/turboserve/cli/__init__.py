"""The `turboserve` command."""
