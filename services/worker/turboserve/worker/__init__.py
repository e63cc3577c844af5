"""The worker: one model replica, a session table, and an engine that generates chunks.

`model` and `engine` need only torch, numpy and safetensors, so that they run on a bare GPU machine.
"""
