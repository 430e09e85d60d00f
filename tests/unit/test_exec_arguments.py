"""Command lines sent ahead in pieces."""

from __future__ import annotations

from typing import Any

import pytest

from dsec.long_arguments import send_ahead
from dsec_common.bus_types import ReplyAddress, Request
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.testing.clock import FakeClock
from dsec_common.wire.base import MSGPACK, Message
from dsec_common.wire.exec import AddArguments, ArgumentsAdded, StartExec
from dsec_sandboxd.commands import ARGUMENT_BYTES_MAX
from dsec_sandboxd.exec_arguments import ARGUMENT_LIST_IDLE_S, ARGUMENT_LISTS_MAX, ArgumentLists


def asked(message: AddArguments, local: str = "s1") -> Request[Any]:
    subject = f"dsec.v1.p.sandbox.n.{local}.add_arguments"
    return Request(
        message=message,
        subject=subject,
        tokens=tuple(subject.split(".")),
        headers={},
        reply_to="",
        caller=ReplyAddress(subject=""),
        content_type=MSGPACK,
        traceparent="",
    )


async def test_a_long_command_line_arrives_whole_and_in_order() -> None:
    lists = ArgumentLists(FakeClock())
    argv = ("printf", "%s", *(f"{number:060000d}" for number in range(20)))

    async def ask(piece: Message) -> ArgumentsAdded:
        assert isinstance(piece, AddArguments)
        await lists.add(asked(piece))
        return await lists.add(asked(piece))  # its answer was lost

    command = await send_ahead(StartExec(argv=argv), ask)
    assert command.argv + lists.get("s1", command.arguments_from) == argv


async def test_a_short_command_line_goes_along_with_its_start() -> None:
    command = StartExec(argv=("echo", "a"))

    async def ask(piece: Message) -> ArgumentsAdded:
        raise AssertionError(piece)

    assert await send_ahead(command, ask) is command


async def test_a_gap_or_too_much_is_refused_and_changes_nothing() -> None:
    lists = ArgumentLists(FakeClock())
    await lists.add(asked(AddArguments(list_id="l", first=0, arguments=("a",))))
    for first, arguments in ((2, ("b",)), (-1, ("b",)), (1, ("x" * (300 * 1024),))):
        with pytest.raises(DsecError) as refused:
            await lists.add(asked(AddArguments(list_id="l", first=first, arguments=arguments)))
        assert refused.value.code is ErrorCode.INVALID
    assert lists.get("s1", "l") == ("a",)


async def test_all_of_a_command_line_is_bounded() -> None:
    lists = ArgumentLists(FakeClock())
    piece = ("x" * (64 * 1024 - 1),) * 4
    pieces = ARGUMENT_BYTES_MAX // (256 * 1024)
    for number in range(pieces):
        await lists.add(asked(AddArguments(list_id="l", first=4 * number, arguments=piece)))
    with pytest.raises(DsecError) as refused:
        await lists.add(asked(AddArguments(list_id="l", first=4 * pieces, arguments=piece)))
    assert refused.value.code is ErrorCode.INVALID


async def test_a_sandbox_keeps_few_lists_and_a_left_one_is_forgotten() -> None:
    clock = FakeClock()
    lists = ArgumentLists(clock)
    for number in range(ARGUMENT_LISTS_MAX):
        await lists.add(asked(AddArguments(list_id=f"l{number}", first=0, arguments=("a",))))
    with pytest.raises(DsecError) as refused:
        await lists.add(asked(AddArguments(list_id="more", first=0, arguments=("a",))))
    assert refused.value.code is ErrorCode.EXHAUSTED
    await lists.add(asked(AddArguments(list_id="more", first=0, arguments=("a",)), "s2"))
    await clock.advance(ARGUMENT_LIST_IDLE_S + 1)
    lists.remove_old()
    with pytest.raises(DsecError) as gone:
        lists.get("s1", "l0")
    assert gone.value.code is ErrorCode.NOT_FOUND


async def test_lists_go_with_their_sandbox() -> None:
    lists = ArgumentLists(FakeClock())
    await lists.add(asked(AddArguments(list_id="l", first=0, arguments=("a",))))
    await lists.sandbox_ending("s1")
    with pytest.raises(DsecError):
        lists.get("s1", "l")
