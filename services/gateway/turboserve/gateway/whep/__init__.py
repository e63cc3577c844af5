"""Video and messages over WebRTC, negotiated by WHEP."""
