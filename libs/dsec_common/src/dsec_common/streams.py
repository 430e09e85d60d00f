"""The JetStream streams that several services share, specified once.

Each service that needs one ensures it from here, so that none changes it under another.
"""

from __future__ import annotations

from typing import Final

from dsec_common.bus_types import StreamSpec
from dsec_common.subjects import EVENT_PATTERN, ROOT

QUEUE_MESSAGES_MAX: Final = 100_000
"""How many requests of one kind a project may have waiting."""

EVENTS: Final = StreamSpec(
    name="DSEC_EVENTS",
    subjects=(EVENT_PATTERN,),
    max_age_s=24 * 3600.0,
    max_bytes=1024 * 1024 * 1024,
)
"""What happened in the last day, by project."""

QUEUE: Final = StreamSpec(
    name="DSEC_QUEUE",
    subjects=(f"{ROOT}.*.queue.>",),
    work_queue=True,
    # One project's flood is refused at its own limit and takes no room from another's.
    max_messages_per_subject=QUEUE_MESSAGES_MAX,
    refuse_when_full=True,
    # Projects choose message ids, and one must not be able to suppress another's request.
    duplicate_window_s=0.1,
)
"""Requests that wait until they can be carried out."""
