"""The agent registry: versions, instances, policies, and rolling updates."""
