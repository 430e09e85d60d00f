"""What a model sampled for an agent, token by token, made into what trainers train on.

``stitch`` joins the calls of a rollout into sequences, ``trl_rows``, ``verl_rows`` and
``prime_rl_rows`` give them the shapes that those trainers take. Nothing is ever tokenised here:
ids and log-probabilities are the engine's own.
"""

from dsec.model_trace.records import ModelCall
from dsec.model_trace.rows import (
    PrimeRlRow,
    TrlRows,
    VerlRow,
    prime_rl_rows,
    trl_rows,
    verl_rows,
)
from dsec.model_trace.stitching import Sequence, Trace, Turn, stitch

__all__ = [
    "ModelCall",
    "PrimeRlRow",
    "Sequence",
    "Trace",
    "TrlRows",
    "Turn",
    "VerlRow",
    "prime_rl_rows",
    "stitch",
    "trl_rows",
    "verl_rows",
]
