"""Model calls of unmodified harnesses: three interfaces in, one kind of call out, and back.

:func:`~dsec.model_relay.interfaces.parse_call` reads a request of any of them,
:func:`~dsec.model_relay.interfaces.render_answer` writes the answer in the words of the one that
was called, as a stream of events too.
"""
