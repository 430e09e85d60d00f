"""An OpenAI-compatible inference server as the engine of a relay."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Self

import aiohttp
import msgspec

from dsec.model_relay.calls import Json, ModelRequest, Tell
from dsec.model_relay.engine import Sampled, engine_body, read_engine
from dsec.model_relay.engine_stream import StreamReader
from dsec_common.errors import unavailable
from dsec_common.model_errors import ModelCallError

#: What a server says while it is away, full or loading.
_AWAY: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONNECT_S: Final = 10.0


class HttpEngine:
    """Samples at ``<base_url>/chat/completions``, of vLLM for one; an async context manager.

    A call that is cancelled closes its connection, by which the server ends it.

    Args:
        base_url: with ``/v1``.
        api_key: the server's; it stays here.
        model: the server's name for the model; empty for whatever a harness calls it.
        sampling: options of each call, whatever the harness asks: ``{"temperature": 1.0}``.
        model_version: of the weights that it has; :attr:`model_version` may be set at any time.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        model: str = "",
        sampling: Mapping[str, Any] | None = None,
        model_version: str = "",
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model
        self._sampling = dict(sampling or {})
        self._session: aiohttp.ClientSession | None = None
        self.model_version = model_version

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __call__(self, request: ModelRequest) -> Sampled:
        """Sample the answer to a call.

        Raises:
            DsecError: ``unavailable`` while the server is away; ``unsupported`` when it does not
                return its tokens.
            ModelCallError: what the server refuses, for the harness: a prompt that is too long.
        """
        body = engine_body(request, model=self._model, sampling=self._sampling)
        version = self.model_version
        async with self._asking(body) as response:
            told = await response.read()
        return read_engine(told, body, model_version=version)

    async def stream(self, request: ModelRequest, tell: Tell) -> Sampled:
        """Sample it and tell what comes as soon as it comes.

        Raises:
            DsecError, ModelCallError: as when called.
        """
        body = engine_body(request, model=self._model, sampling=self._sampling, stream=True)
        reader = StreamReader(tell, body, model_version=self.model_version)
        async with self._asking(body) as response:
            async for data in response.content.iter_any():
                reader.feed(data)
        return reader.end()

    @contextlib.asynccontextmanager
    async def _asking(self, body: Json) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask the server and yield its answer; left early, the connection is closed."""
        if self._session is None:
            raise unavailable("the engine is not open: use it as an async context manager")
        try:
            async with self._session.post(
                self._url,
                data=msgspec.json.encode(body),
                headers={"content-type": "application/json", **self._headers},
            ) as response:
                if response.status in _AWAY:
                    raise unavailable(f"the inference server says {response.status}")
                if response.status != 200:  # noqa: PLR2004  HTTP's own
                    raise _refused(response.status, await response.read())
                yield response
        except aiohttp.ClientError as error:
            raise unavailable(f"the inference server is away: {error}") from error


def _refused(status: int, told: bytes) -> ModelCallError:
    """Return the server's own words: harnesses look for them, when their context is too long."""
    code, message = "", told.decode(errors="replace")[:2000]
    try:
        error = msgspec.json.decode(told)
        error = error.get("error", error)
        message, code = str(error["message"]), str(error.get("code") or "")
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        pass
    return ModelCallError(status if status in {400, 404, 413} else 500, message, code=code)
