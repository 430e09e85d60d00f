"""Work that may hang for ever, on threads that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def apart(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Begin ``work`` on a thread of its own; what it returns or raises is the future's.

    Unlike a thread of the loop's pool it holds up neither other work nor the end of the process: a
    call into a driver that hangs cannot be taken back.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(deliver: Callable[[], None]) -> None:
        if not future.done():  # nobody wants it any more
            deliver()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  it is for who waits for the future
            tell(partial(future.set_exception, error))
        else:
            tell(partial(future.set_result, result))

    def tell(deliver: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is over
            loop.call_soon_threadsafe(settle, deliver)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
