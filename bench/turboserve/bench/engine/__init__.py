"""Measuring the engine. Everything but `command` needs torch, numpy and safetensors alone."""
