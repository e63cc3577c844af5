"""Measurements of the engine. Every module but `command` needs only torch, numpy and safetensors."""
