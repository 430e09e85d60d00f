"""Real servers and deterministic doubles for tests."""
