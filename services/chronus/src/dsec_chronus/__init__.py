"""Chronus: the durable mailbox between a sandbox and its trainer."""
