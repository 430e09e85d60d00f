"""The whole platform on one machine: what ``dsec up`` starts, watches and stops."""
