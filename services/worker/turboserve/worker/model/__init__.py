"""The causal Wan transformer, its schedule, text encoders and decoders, and the loading of checkpoints."""
