"""The autoscaler on a virtual clock: the real placement and control cores over modeled workers."""
