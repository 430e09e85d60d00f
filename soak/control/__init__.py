"""Random kills of brokers and schedulers under load, held against what the documents promise.

``python -m soak.control [--seed N] [--seconds N]``; see ``soak.control.__main__``.
"""

import sys
from pathlib import Path

# The nodes are peers that speak a node's side of the protocol: those of the component tests.
_FRAMEWORK = str(Path(__file__).parents[2] / "tests" / "framework")
if _FRAMEWORK not in sys.path:
    sys.path.append(_FRAMEWORK)
