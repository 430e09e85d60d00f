"""Model calls of unmodified harnesses: three interfaces in, one kind of call out, and back.

:func:`~dsec.model_relay.interfaces.parse_call` reads a request of any of them,
:func:`~dsec.model_relay.interfaces.render_answer` writes the answer in the words of the one that
was called, as a stream of events too.

:class:`ModelRelay` answers the calls of a rollout with an engine: an inference server
(:class:`HttpEngine`), or any coroutine function of a training loop.
"""

from dsec.model_relay.calls import ModelAnswer, ModelBegun, ModelDelta, ModelRequest, ToolCall
from dsec.model_relay.engine import Sampled
from dsec.model_relay.http_engine import HttpEngine
from dsec.model_relay.relay import Budget, Engine, ModelRelay, StreamingEngine

__all__ = [
    "Budget",
    "Engine",
    "HttpEngine",
    "ModelAnswer",
    "ModelBegun",
    "ModelDelta",
    "ModelRelay",
    "ModelRequest",
    "Sampled",
    "StreamingEngine",
    "ToolCall",
]
