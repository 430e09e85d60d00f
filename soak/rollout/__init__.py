"""Random kills of trainers, Chronus, nodes and NATS while agents in sandboxes step.

``python -m soak.rollout [--seed N] [--seconds N]``; see ``soak.rollout.__main__``.
"""
