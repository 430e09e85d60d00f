"""The tools of agents, with real servers, files and programs, and what holds them to a contract."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pypdf
import pytest

from dsec.agent import Agent, Context
from dsec.tools import BUILT_IN, Tool, load_tool, tool_call
from dsec.tools.calls import ToolCall
from dsec_common.errors import DsecError
from outside_web import Answer, Asked, Web, completion, web

EVERY = ["network_access", "read_file", "write_file", "run_command"]


class Echo(Tool):
    @tool_call("network_access")
    def say(self, word: str) -> str:
        self.note(status="said", tokens_out=1, word=word)
        return word

    @tool_call()
    def fail(self) -> None:
        raise KeyError("gone")

    @tool_call()
    def count(self, to: int) -> Iterator[int]:
        for number in range(to):
            if number == 3:
                raise ValueError("three")
            self.note(tokens_out=1)
            yield number


class Worker(Agent):
    tools: ClassVar = {"echo": Echo}

    def execute(self) -> None:
        return None


def agent(*tools: str, permissions: list[str] | None = None, **limits: Any) -> Worker:
    granted = EVERY if permissions is None else permissions
    capabilities = [{"tool": tool, "permissions": granted, **limits} for tool in tools]
    return Worker(contract={"name": "worker", "capabilities": capabilities}, context=Context("t"))


ANSWERS = {
    "/hello": Answer(body='{"hello": "w\u00f6rld"}'),
    "/missing": Answer(status=404, body="no"),
    "/moved": Answer(status=302, headers={"Location": "/hello"}),
    "/loop": Answer(status=302, headers={"Location": "/loop"}),
    "/file": Answer(status=302, headers={"Location": "file:///etc/passwd"}),
    "/cut": Answer(body="half", cut=True),
    "/large": Answer(body=b"x" * (17 << 20)),
}


def answers(asked: Asked) -> Answer:
    match asked.path.partition("?")[0]:
        case "/echo":
            return Answer(body=asked.body)
        case "/away":
            return Answer(status=302, headers={"Location": f"{asked.headers['x-other']}/hello"})
        case known:
            return ANSWERS[known]


@pytest.fixture
def site() -> Iterator[Web]:
    with web(answers) as running:
        yield running


def code_of(refused: pytest.ExceptionInfo[DsecError]) -> str:
    return refused.value.code.value


# --- The contract ---


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


# --- http_client ---


def test_http_asks_and_any_status_is_an_answer(site: Web) -> None:
    with agent("http_client") as worker:
        http = worker.get_tool("http_client")
        found = http.get(f"{site.url}/hello", params={"q": "a b"}, headers={"X-One": "1"})
        assert (found.status_code, found.ok, found.json()) == (200, True, {"hello": "wörld"})
        assert (site.asked[0].path, site.asked[0].headers["x-one"]) == ("/hello?q=a+b", "1")
        sent = http.post(f"{site.url}/echo", json={"a": 1})
        assert (sent.json(), site.asked[1].headers["content-type"]) == (
            {"a": 1},
            "application/json",
        )
        assert http.request("PUT", f"{site.url}/echo", data="raw").text == "raw"
        missing = http.get(f"{site.url}/missing?key=secret")
        assert (missing.status_code, missing.ok, missing.text) == (404, False, "no")
        assert http.get(f"{site.url}/moved").url == f"{site.url}/hello"
        assert [it.status for it in worker.calls] == ["200", "200", "200", "404", "200"]
        assert worker.calls[3].notes["url"] == f"{site.url}/missing"  # its query may be a secret


def test_http_takes_no_secret_to_another_host_and_follows_to_no_file(site: Web) -> None:
    with agent("http_client") as worker, web(answers) as other:
        http = worker.get_tool("http_client")
        secrets = {"Authorization": "Bearer x", "Cookie": "y", "X-Other": other.url}
        assert http.get(f"{site.url}/away", headers=secrets).ok
        assert {"authorization", "cookie"} & other.asked[0].headers.keys() == set()
        assert other.asked[0].headers["x-other"]
        assert http.get(f"{site.url}/file").status_code == 302
        assert http.get(f"{site.url}/loop").status_code == 302


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("file:///etc/passwd", "invalid"),
        ("http://127.0.0.1:1/", "unavailable"),
        ("http://exa mple/", "invalid"),
        ("SITE/cut", "unavailable"),
        ("SITE/large", "exhausted"),
    ],
)
def test_http_says_what_went_wrong(site: Web, url: str, code: str) -> None:
    with agent("http_client") as worker, pytest.raises(DsecError) as refused:
        worker.get_tool("http_client").get(url.replace("SITE", site.url))
    assert code_of(refused) == code


@contextlib.contextmanager
def slow_server(head: bytes) -> Iterator[str]:
    """Yield the address of a server that sends a head at once, and then a byte now and then."""
    over = threading.Event()

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            peer.sendall(head)
            while not over.wait(0.02):
                peer.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    "head",
    [b"", b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\n\r\n"],
    ids=["status", "header", "body"],
)
def test_http_waits_no_longer_than_it_is_told_for_all_of_an_answer(head: bytes) -> None:
    with slow_server(head) as url, agent("http_client") as worker:
        with pytest.raises(DsecError, match=r"within 0\.3 s") as refused:
            worker.get_tool("http_client").get(url, timeout_s=0.3)
        assert code_of(refused) == "timeout"
        assert refused.value.retryable


# --- llm ---


def sse(*events: Any, done: bool = True) -> Answer:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return Answer(body="".join(lines) + ("data: [DONE]\n\n" if done else ""))


def piece(text: str, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, **choice}]}


MODEL: dict[str, Any] = {"model": "deepseek-v2-7b", "max_tokens": 512, "temperature": 0.3}


def ask(answer: Answer, monkeypatch: pytest.MonkeyPatch, call: str, **arguments: Any) -> Any:
    """Return what a call of the tool returns, what it sent, and what was told of it."""
    with web(lambda _: answer) as server, agent("llm", **MODEL) as worker:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1/")
        monkeypatch.setenv("OPENAI_API_KEY", "key")
        result = worker.call(ToolCall("llm", call, {"prompt": "hi", **arguments}))
        return result, server.asked


def test_the_model_is_asked_as_the_contract_says(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = ask(completion("sunny"), monkeypatch, "invoke", max_tokens=100, system="be")
    assert result.unwrap() == "sunny"
    assert (result.tokens_in, result.tokens_out) == (11, 7)
    assert (asked[0].path, asked[0].headers["authorization"]) == (
        "/v1/chat/completions",
        "Bearer key",
    )
    assert json.loads(asked[0].body) == {
        "model": "deepseek-v2-7b",
        "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
        "max_tokens": 100,
        "temperature": 0.3,
    }
    _, asked = ask(completion("x"), monkeypatch, "invoke")
    assert json.loads(asked[0].body)["max_tokens"] == 512


def test_log_probabilities_come_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    top = [{"token": "sun", "logprob": -0.1}, {"token": "rain", "logprob": -2.5}]
    told = {"content": [{"token": "sun", "logprob": -0.1, "top_logprobs": top}]}
    answer = completion("sun", logprobs=told, finish_reason="length")
    result, asked = ask(answer, monkeypatch, "complete", top_logprobs=2, options={"seed": 7})
    written = result.unwrap()
    assert (written.text, written.finish_reason, written.model) == ("sun", "length", MODEL["model"])
    (token,) = written.logprobs
    assert (token.token, token.logprob, token.top) == ("sun", -0.1, {"sun": -0.1, "rain": -2.5})
    sent = json.loads(asked[0].body)
    assert (sent["logprobs"], sent["top_logprobs"], sent["seed"]) == (True, 2, 7)


def test_an_answer_is_streamed_and_its_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    answer = sse(piece("sun"), piece("ny", finish_reason="stop"), usage)
    result, asked = ask(answer, monkeypatch, "stream")
    assert result.unwrap() == ["sun", "ny"]
    assert (result.tokens_in, result.tokens_out) == (3, 2)
    assert json.loads(asked[0].body)["stream"]


@pytest.mark.parametrize("options", [{"max_tokens": 10_000}, {"messages": []}])
def test_options_cannot_go_round_the_contract(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    result, asked = ask(completion("x"), monkeypatch, "complete", options=options)
    assert (result.status, asked) == ("invalid", [])


@pytest.mark.parametrize(
    ("answer", "call", "arguments", "code"),
    [
        (completion("x"), "invoke", {"max_tokens": 513}, "denied"),
        (completion("x"), "invoke", {"model": "larger"}, "denied"),
        (Answer(401, '{"error": {"message": "no such key"}}'), "invoke", {}, "denied"),
        (Answer(400, '{"error": {"message": "too long"}}'), "invoke", {}, "invalid"),
        (Answer(429, "{}", {"Retry-After": "7"}), "invoke", {}, "exhausted"),
        (Answer(503, "{}"), "invoke", {}, "unavailable"),
        (Answer(200, "no json"), "invoke", {}, "unavailable"),
        (Answer(200, '{"choices": []}'), "invoke", {}, "unavailable"),
        (Answer(200, "{", cut=True), "invoke", {}, "unavailable"),
        (sse(piece("half"), done=False), "stream", {}, "unavailable"),
        (sse({"error": {"message": "out of memory"}}), "stream", {}, "unavailable"),
    ],
)
def test_a_model_that_does_not_answer_is_a_typed_error(
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer,
    call: str,
    arguments: dict[str, Any],
    code: str,
) -> None:
    result, _ = ask(answer, monkeypatch, call, **arguments)
    assert result.status == code
    assert result.error is not None
    assert (result.error.retry_after_s == 7) is (code == "exhausted")


def test_a_model_that_writes_too_slowly_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"delta": {"content": "sun"}}]}\n\n'
    with slow_server(head) as url, agent("llm", **MODEL) as worker:
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        stream = worker.get_tool("llm").stream("hi", timeout_s=0.3)
        assert next(stream) == "sun"
        with pytest.raises(DsecError) as refused:
            next(stream)
        assert code_of(refused) == "timeout"
        assert worker.calls[-1].status == "timeout"


def test_without_a_server_or_a_model_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with agent("llm", model="m") as worker, pytest.raises(DsecError, match="OPENAI_BASE_URL"):
        worker.get_tool("llm").invoke("x")
    with agent("llm") as worker, pytest.raises(DsecError, match="name a model"):
        worker.get_tool("llm").invoke("x")


# --- shell, files, sql, pdf_parser ---


def test_commands_run_and_leave_nothing_behind(tmp_path: Path) -> None:
    with agent("shell") as worker:
        shell = worker.get_tool("shell")
        ran = shell.run(
            "cat; echo $WORD >&2; pwd; exit 3", stdin="in ", cwd=str(tmp_path), env={"WORD": "w"}
        )
        assert (ran.exit_code, ran.stdout, ran.stderr) == (3, f"in {tmp_path}\n", "w\n")
        assert worker.calls[-1].status == "3"
        assert shell.run(["echo", "$HOME"]).stdout == "$HOME\n"
        left = shell.run("sleep 1000 & echo $!")
        assert left.ok
        _until_over(int(left.stdout))
        # One that left the group may hold its output open; nobody waits for that.
        held = shell.run(
            "setsid sh -c 'touch away; exec yes' & until [ -e away ]; do :; done; echo $! >&2",
            cwd=str(tmp_path),
        )
        assert held.ok
        _until_over(int(held.stderr))
        assert shell.run("exec <&-; echo closed", stdin="x" * 1_000_000).stdout == "closed\n"
        assert len(shell.run("cat", stdin="y" * 200_000).stdout) == 200_000
        long = shell.run("head -c 1000000 /dev/zero | tr '\\0' x")
        assert (len(long.stdout), long.truncated) == (256 * 1024, True)
        with pytest.raises(DsecError) as late:
            shell.run("echo begun; sleep 1000", timeout_s=0.3)
        assert (code_of(late), late.value.details["stdout"]) == ("command_timeout", "begun\n")
        with pytest.raises(DsecError) as missing:
            shell.run(["/no/such/program"])
        assert code_of(missing) == "not_found"


def _until_over(pid: int) -> None:
    """Return when a process runs no more; its parent may not have looked yet."""
    deadline = time.monotonic() + 10
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"process {pid} lives"
            time.sleep(0.005)


def test_files_are_written_whole(tmp_path: Path) -> None:
    with agent("files") as worker:
        files = worker.get_tool("files")
        path = tmp_path / "a" / "b.txt"
        assert files.write(path, "wörd") == 5
        assert files.read(path) == "wörd"
        path.chmod(0o600)
        files.write(path, b"\xff")
        assert (files.read_bytes(path), path.stat().st_mode & 0o777) == (b"\xff", 0o600)
        with pytest.raises(DsecError, match="no text in UTF-8"):
            files.read(path)
        assert files.list(tmp_path) == ["a/"]
        assert files.list(path.parent) == ["b.txt"]
        files.delete(path)
        with pytest.raises(DsecError) as missing:
            files.read(path)
        assert code_of(missing) == "not_found"


def test_reading_is_no_permission_to_write(tmp_path: Path) -> None:
    with agent("files", "sql", permissions=["read_file"]) as worker:
        for call in (
            ToolCall("files", "write", {"path": tmp_path / "x", "content": "x"}),
            ToolCall(
                "sql", "execute", {"database": tmp_path / "x", "statement": "CREATE TABLE t (a)"}
            ),
        ):
            assert worker.call(call).status == "denied"
    assert list(tmp_path.iterdir()) == []


def test_sql_asks_and_changes(tmp_path: Path) -> None:
    database, other = tmp_path / "a b?.db", tmp_path / "other.db"
    with agent("sql") as worker:
        sql = worker.get_tool("sql")
        sql.execute(database, "CREATE TABLE t (a INTEGER, b TEXT)")
        assert sql.execute(database, "INSERT INTO t VALUES (?, ?), (2, 'two')", (1, "one")) == 2
        assert sql.query(database, "SELECT * FROM t WHERE a = :a", {"a": 2}) == [
            {"a": 2, "b": "two"}
        ]
        for statement, code in (
            ("DELETE FROM t", "invalid"),  # asking changes nothing
            ("SELECT nothing", "invalid"),
            (f"ATTACH '{other}' AS o", "invalid"),
        ):
            with pytest.raises(DsecError) as refused:
                sql.query(database, statement)
            assert code_of(refused) == code
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"
        with pytest.raises(DsecError) as refused:
            sql.query(database, endless.format("count(*)"), timeout_s=0.1)
        assert code_of(refused) == "command_timeout"
        with pytest.raises(DsecError) as refused:
            sql.query(database, endless.format("i"))
        assert code_of(refused) == "exhausted"
        with pytest.raises(DsecError) as refused:
            sql.query(other, "SELECT 1")
        assert code_of(refused) == "not_found"
        with sqlite3.connect(database) as busy:
            busy.execute("BEGIN IMMEDIATE")
            with pytest.raises(DsecError) as refused:
                sql.execute(database, "DELETE FROM t", timeout_s=0.05)
            busy.rollback()
        busy.close()
        assert (code_of(refused), refused.value.retryable) == ("unavailable", True)
    assert not other.exists()


PAGE = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 4 0 R
/Resources<</Font<</F 5 0 R>>>>>>endobj
4 0 obj<</Length 38>>stream
BT /F 9 Tf 9 50 Td (Cloudy today) Tj ET
endstream endobj
5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj
trailer<</Root 1 0 R>>
startxref
0
%%EOF
"""


def test_a_pdfs_text_is_read_page_by_page(tmp_path: Path) -> None:
    writer = pypdf.PdfWriter()
    writer.append(str(_written(tmp_path / "page.pdf", PAGE)))
    writer.add_blank_page()
    path = tmp_path / "two.pdf"
    writer.write(path)
    writer.close()
    with agent("pdf_parser") as worker:
        parser = worker.get_tool("pdf_parser")
        text = parser.parse(path)
        assert [page.strip() for page in text.pages] == ["Cloudy today", ""]
        assert parser.parse(path.read_bytes()).text == text.text
        for document, code in ((b"no pdf", "invalid"), (tmp_path / "none.pdf", "not_found")):
            with pytest.raises(DsecError) as refused:
                parser.parse(document)
            assert code_of(refused) == code


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
