"""The causal Wan transformer, its noise schedule, and how checkpoints become one."""
