"""RFC 9457 problems: the one form that every error takes."""
