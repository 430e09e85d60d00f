"""What the bus's tests say to each other over a real server."""

from __future__ import annotations

import asyncio

from dsec_common import subjects
from dsec_common.bus import Bus, Request
from dsec_common.errors import DsecError
from dsec_common.wire.base import Message

LIST = subjects.sandbox_list("default")
ANY_LIST = subjects.any_project("sandbox.list")


class Question(Message, frozen=True, kw_only=True):
    number: int = 0
    text: str = ""


class Answer(Message, frozen=True, kw_only=True):
    number: int = 0
    text: str = ""


async def echo(request: Request[Question]) -> Answer:
    return Answer(number=request.message.number, text=request.project)


async def ask_until_answered(bus: Bus, number: int) -> Answer:
    """Ask as a patient caller does: again after each retryable error."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await bus.request(LIST, Question(number=number), Answer, timeout_s=5)
            except DsecError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.01)
