"""What workers of unlike kinds can serve, and linear programs over it.

The scheduler decides shares by it, and the autoscaler the composition of a pool.
"""
