"""REST resources for links to one session, and for tickets that open its streams."""
