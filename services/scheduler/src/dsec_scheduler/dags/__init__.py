"""DAGs of agents: checked when they are registered, run step by step, resumed after failures."""
