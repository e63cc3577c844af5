"""The use of playout slack: SlackServe's workloads, metrics and policies on the simulator."""
