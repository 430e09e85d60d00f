"""Sandboxes behind the interfaces that training frameworks have.

Each framework has a module of its own, which alone imports it, and an extra of the same name.
"""
