"""The engine: sessions' state, the ring of keys and values, gather policies and the stages that use them."""
