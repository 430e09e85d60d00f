"""Measures the numbers that the project holds itself to, each beside a peer in the same run.

``python -m benchmarks NAME…`` runs the module ``benchmarks/NAME.py``; see ``benchmarks.report``.
"""
