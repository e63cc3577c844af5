"""How single chunks came about: `/v1/sessions/{session}/chunks/{index}`."""
