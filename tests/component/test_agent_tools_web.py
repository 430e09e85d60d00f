"""The tools of agents that ask servers: the HTTP client and the model, with real ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from agent_with_tools import agent, code_of, slow_server
from dsec.tools.calls import ToolCall
from dsec_common.errors import DsecError
from outside_web import Answer, Asked, Web, completion, web

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
