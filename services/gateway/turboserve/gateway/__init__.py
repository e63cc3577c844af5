"""Gateway: sessions over REST, video over WebSocket and HTTP, each viewer's timeline, the page."""
