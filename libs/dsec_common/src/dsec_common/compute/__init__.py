"""Arithmetic of Compute Units that all services share: pure, no I/O."""
