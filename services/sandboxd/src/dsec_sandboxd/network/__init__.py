"""What a sandbox may reach: policies, their enforcement by the node, and names."""
