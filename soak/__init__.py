"""Random use of a whole platform while its parts are killed, against a model of what must be true.

``python -m soak [--seed N] [--seconds N]``; see ``soak.__main__``.
"""
