"""The tracer: behaviour logs read back as ordered steps."""
