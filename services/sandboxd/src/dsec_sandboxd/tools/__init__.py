"""The tools of agents that the node runs for them, outside of their sandboxes."""
