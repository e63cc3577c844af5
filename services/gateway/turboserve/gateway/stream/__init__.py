"""Video to viewers, over WebSocket and plain HTTP."""
