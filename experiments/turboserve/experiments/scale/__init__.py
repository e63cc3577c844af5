"""The size of deployment that one control plane carries."""
