"""All messages that cross a process boundary: frozen, typed, versioned."""
