"""The cost of traces: `turboserve bench tracing`."""
