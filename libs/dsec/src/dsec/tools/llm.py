"""``llm``: a model behind any server with OpenAI's chat completions."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dsec.tools.http import Body, opened, whole
from dsec.tools.tool import Tool, tool_call
from dsec_common.errors import DsecError, ErrorCode, invalid, unavailable

BASE_URL_VARIABLE: Final = "OPENAI_BASE_URL"
KEY_VARIABLE: Final = "OPENAI_API_KEY"

_TIMEOUT_S: Final = 600.0
_LINE_MAX_BYTES: Final = 4 * 1024 * 1024
_CODE_OF_STATUS: Final = {
    401: ErrorCode.DENIED,
    403: ErrorCode.DENIED,
    404: ErrorCode.NOT_FOUND,
    408: ErrorCode.TIMEOUT,
    429: ErrorCode.EXHAUSTED,
    504: ErrorCode.TIMEOUT,
}
_SERVER_ERROR: Final = 500
_OK: Final = 200
#: Of a request, what the node takes by name; the rest are options.
_ARGUMENTS: Final = (
    "messages",
    "model",
    "max_tokens",
    "temperature",
    "logprobs",
    "top_logprobs",
)

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]


@dataclass(frozen=True)
class TokenLogprob:
    """A token that the model wrote, and how likely it was.

    Attributes:
        token: its text.
        logprob: the natural logarithm of its probability.
        top: the likeliest tokens at its place with theirs, as far as they were asked for.
    """

    token: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a model wrote.

    Attributes:
        text: all of it.
        model: who wrote it, as its server says.
        finish_reason: why it ended, such as ``stop`` or ``length``.
        tokens_in: tokens that it read.
        tokens_out: tokens that it wrote.
        logprobs: of each token, when they were asked for and the server tells them.
    """

    text: str
    model: str
    finish_reason: str
    tokens_in: int
    tokens_out: int
    logprobs: tuple[TokenLogprob, ...] = ()


class Llm(Tool):
    """``llm``, and ``llm_summarizer`` of the same kind. It needs no permission.

    Where ``OPENAI_BASE_URL`` says nothing and the node has a model server, the node asks that.
    Otherwise the server is ``OPENAI_BASE_URL`` (such as ``http://127.0.0.1:8000/v1``), with
    ``OPENAI_API_KEY`` if there is one. The model, the most tokens that it may write and the
    temperature are the contract's; a call may ask for fewer tokens and another temperature.

    Errors of every call, as :class:`DsecError`: ``invalid`` for what the server refuses and when
    no server is named, ``denied`` for more tokens or another model than the contract allows and
    when the server refuses the key, ``exhausted`` with ``retry_after_s`` when it is asked too
    often, ``unavailable`` and ``timeout`` when it does not answer whole, and the contract's.
    """

    @tool_call()
    def invoke(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        model: str = "",
        system: str = "",
        timeout_s: float = _TIMEOUT_S,
    ) -> str:
        """Return the model's answer to a prompt, or to messages, as text."""
        asked = self._asked(prompt, max_tokens, temperature, model, system)
        return self._complete(asked, timeout_s).text

    @tool_call()
    def complete(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        model: str = "",
        system: str = "",
        logprobs: bool = False,
        top_logprobs: int = 0,
        options: Mapping[str, Any] | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> Completion:
        """Return the model's answer with what is known of it.

        Args:
            prompt: a text of the user, or messages with ``role`` and ``content``.
            max_tokens: the most that it may write; by default what the contract allows.
            temperature: by default the contract's.
            model: by default the contract's.
            system: what is said before a prompt that is a text.
            logprobs: ask for the probability of each token.
            top_logprobs: ask for so many others at each place, too.
            options: further fields of the request, such as ``seed`` or ``stop``.
            timeout_s: for the whole answer.
        """
        asked = self._asked(prompt, max_tokens, temperature, model, system)
        if logprobs or top_logprobs:
            asked["logprobs"] = True
        if top_logprobs:
            asked["top_logprobs"] = top_logprobs
        taken = sorted(asked.keys() & (options or {}).keys())
        if taken:
            raise invalid(f"{taken[0]} is an argument of its own and not one of options")
        return self._complete(asked | dict(options or {}), timeout_s)

    @tool_call()
    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        model: str = "",
        system: str = "",
        timeout_s: float = _TIMEOUT_S,
    ) -> Iterator[str]:
        """Yield the model's answer as it is written; a stream that breaks off is an error.

        What the node has a model write comes in one piece.
        """
        asked = self._asked(prompt, max_tokens, temperature, model, system)
        by_node = self._by_node(asked, timeout_s)
        if by_node is not None:
            if whole_text := self._completion(by_node).text:
                yield whole_text
            return
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        with self._opened(asked, timeout_s) as answer:
            for event in _events(answer):
                self._count(event.get("usage"))
                for choice in event.get("choices") or ():
                    if choice.get("finish_reason"):
                        self.note(finish_reason=str(choice["finish_reason"]))
                    if text := (choice.get("delta") or {}).get("content"):
                        yield text

    def _asked(
        self,
        prompt: Prompt,
        max_tokens: int | None,
        temperature: float | None,
        model: str,
        system: str,
    ) -> dict[str, Any]:
        allowed = self.desk.allowance
        if model and allowed.model and model != allowed.model:
            raise _beyond(f"{self.desk.name}: the contract names the model {allowed.model}", model)
        if max_tokens and allowed.max_tokens and max_tokens > allowed.max_tokens:
            raise _beyond(
                f"{self.desk.name}: the contract allows {allowed.max_tokens} tokens", max_tokens
            )
        if not (model or allowed.model):
            raise invalid(f"{self.desk.name}: name a model, in the contract or in the call")
        before = [{"role": "system", "content": system}] if system else []
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        asked = {
            "model": model or allowed.model,
            "messages": [*before, *messages],
            "max_tokens": max_tokens or allowed.max_tokens,
            "temperature": allowed.temperature if temperature is None else temperature,
        }
        self.note(model=str(asked["model"]))
        return {name: value for name, value in asked.items() if value is not None}

    def _complete(self, asked: Mapping[str, Any], timeout_s: float) -> Completion:
        by_node = self._by_node(asked, timeout_s)
        if by_node is not None:
            return self._completion(by_node)
        with self._opened(asked, timeout_s) as answer:
            body = whole(answer)
        return self._completion(body)

    def _by_node(self, asked: Mapping[str, Any], timeout_s: float) -> bytes | None:
        """Return the completion that the node's model wrote; None where it is to be asked here."""
        if self.desk.environment.get(BASE_URL_VARIABLE):
            return None
        own = {name: asked[name] for name in _ARGUMENTS if name in asked}
        options = {name: value for name, value in asked.items() if name not in own}
        answered = self.ask_node({**own, "options": options, "timeout_s": timeout_s}, timeout_s)
        return None if answered is None else answered[1]

    def _completion(self, body: bytes) -> Completion:
        try:
            told = json.loads(body)
            usage, choice = told.get("usage"), told["choices"][0]
            completion = Completion(
                text=choice["message"].get("content") or "",
                model=str(told.get("model", "")),
                finish_reason=str(choice.get("finish_reason") or ""),
                tokens_in=int((usage or {}).get("prompt_tokens") or 0),
                tokens_out=int((usage or {}).get("completion_tokens") or 0),
                logprobs=tuple(_logprob(one) for one in _tokens(choice)),
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise unavailable(
                f"{self.desk.name} was answered with no chat completion: {type(error).__name__}"
            ) from error
        self._count(usage)
        self.note(finish_reason=completion.finish_reason)
        return completion

    @property
    def _base_url(self) -> str:
        base_url = self.desk.environment.get(BASE_URL_VARIABLE, "")
        if not base_url:
            raise invalid(
                f"{self.desk.name}: set {BASE_URL_VARIABLE} to the model's server, such as "
                "http://127.0.0.1:8000/v1"
            )
        return base_url.rstrip("/")

    @contextlib.contextmanager
    def _opened(self, asked: Mapping[str, Any], timeout_s: float) -> Iterator[Body]:
        headers = {"Content-Type": "application/json"}
        if key := self.desk.environment.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        try:
            body = json.dumps(asked).encode("utf-8")
        except (TypeError, ValueError) as error:
            raise invalid(f"{self.desk.name}: the messages are no JSON: {error}") from None
        url = f"{self._base_url}/chat/completions"
        with opened("POST", url, headers, body, timeout_s) as answer:
            if answer.status != _OK:
                raise _refusal(self._base_url, answer)
            yield answer

    def _count(self, usage: Mapping[str, Any] | None) -> None:
        usage = usage or {}
        self.note(
            tokens_in=int(usage.get("prompt_tokens") or 0),
            tokens_out=int(usage.get("completion_tokens") or 0),
        )


def _tokens(choice: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (choice.get("logprobs") or {}).get("content") or ()


def _logprob(one: Mapping[str, Any]) -> TokenLogprob:
    top = {str(it["token"]): float(it["logprob"]) for it in one.get("top_logprobs") or ()}
    return TokenLogprob(str(one["token"]), float(one["logprob"]), top)


def _events(answer: Body) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream until it says that it is over.

    Raises:
        DsecError: ``unavailable`` when it ends before that, or says that something failed.
    """
    while line := answer.readline(_LINE_MAX_BYTES):
        name, _, value = line.decode("utf-8", "replace").strip().partition(":")
        if name != "data":
            continue
        value = value.strip()
        if value == "[DONE]":
            return
        try:
            event = json.loads(value)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "error" in event:
            raise unavailable(f"the model's server failed within its answer: {value[:500]}")
        yield event
    raise unavailable("the model's server ended its answer before it was whole")


def _refusal(base_url: str, answer: Body) -> DsecError:
    body = whole(answer)
    code = _CODE_OF_STATUS.get(answer.status)
    if code is None:
        code = ErrorCode.UNAVAILABLE if answer.status >= _SERVER_ERROR else ErrorCode.INVALID
    retry_after = answer.headers.get("Retry-After", "")
    return DsecError(
        code,
        f"{base_url} answered {answer.status}: {_said(body)}",
        retry_after_s=float(retry_after) if retry_after.isdecimal() else 0.0,
        details={"status": answer.status},
    )


def _said(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:500]


def _beyond(message: str, asked: object) -> DsecError:
    return DsecError(ErrorCode.DENIED, f"{message}, and {asked} was asked for")
