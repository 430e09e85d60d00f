"""Servers that `dsec up` and the tests start by themselves, each behind one adapter."""
