"""The scheduler: which node a sandbox runs on."""
