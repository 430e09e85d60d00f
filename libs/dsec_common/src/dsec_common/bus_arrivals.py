"""The connection's incoming bytes, taken apart in the turn of the loop in which they arrive.

The library has a task that waits for bytes: it is woken one turn later, for each message alone
when there is little to do. Here that task waits as before, but only for what is out of the
ordinary: work on a message that has to wait for something, an error, the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

Parse = Callable[[bytes], Coroutine[Any, Any, None]]
"""Takes bytes apart, and does what the messages in them ask for."""


class Begun:
    """A coroutine that has run, in nobody's task, up to where it has to wait; then awaitable.

    Attributes:
        is_done: whether it came to its end without waiting.
        error: what it raised then.
    """

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self._waits_for: Any = None
        self.is_done = False
        self.error: BaseException | None = None
        self._go_on(work.send, None)

    def _go_on(self, resume: Callable[[Any], Any], value: Any) -> None:
        try:
            self._waits_for = resume(value)
        except StopIteration:
            self.is_done = True
        except Exception as error:  # noqa: BLE001  for who awaits it
            self.error, self.is_done = error, True

    def __await__(self) -> Generator[Any, Any, None]:
        """Run the rest of it, and raise what it raises."""
        while not self.is_done:
            try:
                sent = yield self._waits_for
            except GeneratorExit:
                self._work.close()
                raise
            except BaseException as error:  # noqa: BLE001  the coroutine's to handle
                self._go_on(self._work.throw, error)
            else:
                self._go_on(self._work.send, sent)
        if self.error is not None:
            raise self.error


class Arrivals(asyncio.StreamReaderProtocol):
    """Has bytes taken apart as they come while :meth:`take` waits, and keeps them otherwise."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self.reader = reader
        self._parse: Parse | None = None
        self._interrupted: asyncio.Future[None] | None = None
        self._begun: Begun | None = None

    @property
    def can_take(self) -> bool:
        """Whether there is nothing that has to be read first."""
        reader = self.reader
        kept: bytearray = reader._buffer  # type: ignore[attr-defined]  # noqa: SLF001  no other way
        return not (kept or reader.at_eof() or reader.exception() is not None)

    async def take(self, parse: Parse) -> None:
        """Have ``parse`` take what comes, in order, until the connection ends or it has to wait.

        Returns when that is done: what came meanwhile is kept. Raises what ``parse`` raises.
        """
        self._parse = parse
        self._interrupted = asyncio.get_running_loop().create_future()
        try:
            await self._interrupted
        finally:
            self._parse = self._interrupted = None
            begun, self._begun = self._begun, None
        if begun is not None:
            await begun

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        if self._parse is None:
            super().data_received(data)
            return
        begun = Begun(self._parse(data))
        if not begun.is_done or begun.error is not None:
            self._begun = begun
            self._interrupt()

    def eof_received(self) -> bool | None:
        """Note that nothing more comes."""
        keep_open = super().eof_received()
        self._interrupt()
        return keep_open

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is gone."""
        super().connection_lost(exc)
        self._interrupt()

    def _interrupt(self) -> None:
        self._parse = None
        if self._interrupted is not None and not self._interrupted.done():
            self._interrupted.set_result(None)
