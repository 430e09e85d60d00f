"""Wire types, bus, log and life cycle shared by every DSec service and the SDK."""
