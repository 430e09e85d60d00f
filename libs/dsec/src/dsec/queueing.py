"""Waiting for what came of a queued request."""

from __future__ import annotations

import asyncio

from dsec.channel import Channel
from dsec.events import EventHub
from dsec_common import subjects
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.base import Message
from dsec_common.wire.sandbox import CreateSandbox, SandboxRefused, SandboxRunning


async def queued(channel: Channel, events: EventHub, request: CreateSandbox) -> SandboxRunning:
    """Put a request into the durable queue and return the event of its sandbox.

    Raises:
        DsecError: as the scheduler refused it; ``timeout`` when no outcome came in time.
    """
    outcome: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def settle(message: Message) -> None:
        if not outcome.done():
            outcome.set_result(message)

    created, refused = (
        subjects.request_event(channel.project, request.message_id, what)
        for what in ("created", "refused")
    )
    async with events.listening(created, settle), events.listening(refused, settle):
        await channel.bus.js_publish(subjects.queue_sandbox_create(channel.project), request)
        try:
            async with asyncio.timeout(request.timeout_s):
                message = await outcome
        except TimeoutError:
            raise DsecError(
                ErrorCode.TIMEOUT,
                f"no outcome of queued request {request.message_id} within "
                f"{request.timeout_s:g} s; it stays queued, and the sandbox may still come",
                details={"request_id": request.message_id},
            ) from None
    if isinstance(message, SandboxRunning):
        return message
    if isinstance(message, SandboxRefused):
        raise refusal_of(message)
    raise DsecError(ErrorCode.INTERNAL, f"an unexpected event: {type(message).__name__}")


def refusal_of(event: SandboxRefused) -> DsecError:
    """Return why a queued request was refused."""
    try:
        code = ErrorCode(event.code)
    except ValueError:
        code = ErrorCode.INTERNAL
    return DsecError(code, event.reason, details={"request_id": event.request_id})
