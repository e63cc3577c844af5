"""The engine: sessions' state, the KV frame-slot ring, gather policies and the stages that use them."""
