"""The worker: one model replica, a session table, and an engine that makes chunks.

`model` and `engine` need torch, numpy and safetensors only, so that they run on a bare GPU machine.
"""
