"""Everything that crosses a process boundary: frozen, typed, versioned."""
