"""Actions: steps of an agent's run that have resources of their own for as long as they last."""
