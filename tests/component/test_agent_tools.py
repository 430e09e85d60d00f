"""What holds the tools of agents to a contract and tells of their calls, and plug-ins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent_with_tools import agent, code_of
from dsec.tools import BUILT_IN, Tool, load_tool
from dsec.tools.calls import ToolCall
from dsec_common.errors import DsecError


def test_a_tool_that_the_contract_does_not_name_is_denied() -> None:
    with agent() as worker, pytest.raises(DsecError, match="names no tool 'echo'") as refused:
        worker.get_tool("echo").say("a")
    assert code_of(refused) == "denied"


def test_a_call_without_its_permission_is_denied_and_told_of() -> None:
    with agent("echo", permissions=["read_file"]) as worker:
        with pytest.raises(DsecError, match="lacks the permission network_access") as refused:
            worker.get_tool("echo").say("a")
        assert refused.value.details == {"permission": "network_access"}
        (told,) = worker.calls
    assert (told.call.action, told.status, told.ok) == ("echo.say", "denied", False)


def test_calls_beyond_the_rate_are_refused_and_say_when_to_come_back() -> None:
    with agent("echo", rate_limit="2req/h") as worker:
        echo = worker.get_tool("echo")
        assert [echo.say("a"), echo.say("b")] == ["a", "b"]
        with pytest.raises(DsecError) as refused:
            echo.say("c")
        assert code_of(refused) == "exhausted"
        assert 0 < refused.value.retry_after_s <= 3600
        assert [it.status for it in worker.calls] == ["said", "said", "exhausted"]


def test_each_call_is_told_of_with_its_particulars() -> None:
    with agent("echo") as worker:
        worker.get_tool("echo").say(word="a")
        worker.get_tool("echo").say("a")
        one, other = worker.calls
    assert one.call == ToolCall("echo", "say", {"word": "a"})
    assert one.call.arguments_sha256 == other.call.arguments_sha256
    assert (one.status, one.tokens_out, one.notes) == ("said", 1, {"word": "a"})
    assert one.latency_ms >= 0


def test_what_a_tool_raises_is_a_typed_error() -> None:
    with agent("echo") as worker:
        with pytest.raises(DsecError, match=r"echo\.fail: KeyError: 'gone'") as refused:
            worker.get_tool("echo").fail()
        assert code_of(refused) == "internal"
        assert worker.calls[-1].status == "internal"


def test_a_streamed_call_is_over_when_its_stream_is() -> None:
    with agent("echo") as worker:
        count = worker.get_tool("echo").count
        pieces = count(2)
        assert not worker.calls
        assert list(pieces) == [0, 1]
        assert (worker.calls[-1].status, worker.calls[-1].tokens_out) == ("ok", 2)
        stopped = count(3)
        assert next(stopped) == 0
        stopped.close()
        assert worker.calls[-1].status == "stopped"
        with pytest.raises(DsecError, match="three"):
            list(count(5))
        assert worker.calls[-1].status == "internal"
        assert len(worker.calls) == 3


def test_a_call_may_be_given_as_data() -> None:
    with agent("echo") as worker:
        said = worker.call(ToolCall("echo", "say", {"word": "a"}))
        assert (said.ok, said.value, said.status) == (True, "a", "said")
        assert worker.call(ToolCall("echo", "count", {"to": 2})).value == [0, 1]
        for call, code in (
            (ToolCall("echo", "fail"), "internal"),
            (ToolCall("echo", "say", {"wrod": "a"}), "invalid"),
            (ToolCall("echo", "close"), "not_found"),
            (ToolCall("nothing", "say"), "not_found"),
            (ToolCall("files", "read", {"path": "/etc/hostname"}), "denied"),
        ):
            result = worker.call(call)
            assert (result.ok, result.status) == (False, code), call
            with pytest.raises(DsecError):
                result.unwrap()


async def test_calls_may_be_awaited() -> None:
    with agent("echo") as worker:
        echo = worker.get_async_tool("echo")
        assert await echo.say("a") == "a"
        assert [piece async for piece in echo.count(2)] == [0, 1]
        with pytest.raises(DsecError):
            await echo.fail()
        with pytest.raises(AttributeError):
            echo.close  # noqa: B018  it is the access that raises
        assert len(worker.calls) == 3


def test_plug_ins_are_found_by_name_and_replace_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mail_plug_in.py").write_text(
        "from dsec.tools import Tool, tool_call\n"
        "class Mail(Tool):\n"
        "    @tool_call('acme.send_mail')\n"
        "    def send(self, to: str) -> str:\n"
        "        return f'sent to {to}'\n"
    )
    metadata = tmp_path / "mail_plug_in-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mail-plug-in\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[dsec.tools]\nmail = mail_plug_in:Mail\nshell = mail_plug_in:Mail\nno = json:dumps\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with agent("mail", permissions=["acme.send_mail"]) as worker:
        assert worker.get_tool("mail").send("x") == "sent to x"
        with pytest.raises(DsecError, match=r"'no' of dsec\.tools is no class") as refused:
            worker.get_tool("no")
        assert code_of(refused) == "invalid"
    assert load_tool("shell").__module__ == "dsec.tools.shell"
    with pytest.raises(DsecError, match=r"there are files, http_client.*mail") as refused:
        load_tool("nothing")
    assert code_of(refused) == "not_found"
    sys.modules.pop("mail_plug_in")


def test_every_built_in_tool_is_there() -> None:
    assert all(issubclass(load_tool(name), Tool) for name in BUILT_IN)
