"""The engine: sessions' state, the ring of KV frame slots, gather policies and the stages that use them."""
