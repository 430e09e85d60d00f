"""Nodes by an HTTP call to whoever can make them.

The body is an :class:`~dsec_broker.providers.Order` as JSON. With a secret, the header
``dsec-signature`` holds ``sha256=`` and the HMAC-SHA256, in hexadecimal digits, of the header
``dsec-timestamp`` (Unix seconds), a dot, and the body. Any answer of 2xx takes the order on.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from dsec_broker.providers import Order, settings_of
from dsec_common.errors import DsecError, ErrorCode, from_os_error, unavailable

_SHOWN_CHARACTERS: Final = 200
_OK: Final = range(200, 300)
_RETRYABLE: Final = frozenset({408, 425, 429, *range(500, 600)})


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the provider ``webhook``.

    Attributes:
        url: where orders are sent.
        secret_file: holds the secret that signs them; empty sends them without a signature.
        timeout_s: how long one attempt may take.
        attempts: how often an order is sent before it has failed.
        pause_s: before the second attempt; doubled before each further one.
    """

    url: str
    secret_file: str = ""
    timeout_s: float = 10.0
    attempts: int = 4
    pause_s: float = 0.5

    def __post_init__(self) -> None:
        """Refuse what could only fail later."""
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}: it begins with http:// or https://")
        if self.attempts < 1 or not self.timeout_s > 0 or not self.pause_s >= 0:
            raise ValueError("attempts is at least 1, timeout_s more than 0, pause_s 0 or more")


def open_webhook(settings: Mapping[str, str]) -> WebhookProvider:
    """Return the provider ``webhook``; for the entry point."""
    return WebhookProvider(settings_of(WebhookSettings, settings, "webhook"))


class WebhookProvider:
    """Sends orders, each until it is taken on or has failed for good."""

    def __init__(self, settings: WebhookSettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    def may_leave(self, nodes: Collection[str], idle: Collection[str]) -> Sequence[str]:
        """Return all idle nodes: they are named in the order."""
        del nodes
        return sorted(idle)

    async def scale(self, order: Order) -> None:
        """Send the order, again after what may pass.

        Raises:
            DsecError: ``unavailable`` after the last attempt; ``denied`` or ``invalid`` at once
                for an answer of 4xx.
        """
        settings, body = self._settings, msgspec.json.encode(order)
        pause_s = settings.pause_s
        for attempt in range(1, settings.attempts + 1):
            try:
                await self._send(body)
            except DsecError as error:
                if not error.retryable or attempt == settings.attempts:
                    raise
            else:
                return
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()

    async def _send(self, body: bytes) -> None:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
            self._session = aiohttp.ClientSession(timeout=timeout)
        url = self._settings.url
        try:
            async with self._session.post(
                url, data=body, headers=self._headers(body), allow_redirects=False
            ) as response:
                status, told = response.status, (await response.text())[:_SHOWN_CHARACTERS]
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or "it took too long"
            raise unavailable(f"the node provider's webhook {url} failed: {reason}") from error
        if status in _OK:
            return
        message = f"the node provider's webhook {url} answered {status}: {told}"
        if status in _RETRYABLE:
            raise unavailable(message)
        code = ErrorCode.DENIED if status in {401, 403} else ErrorCode.INVALID
        raise DsecError(code, message)

    def _headers(self, body: bytes) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self._settings.secret_file:
            stamp = str(int(time.time()))
            headers["dsec-timestamp"] = stamp
            headers["dsec-signature"] = "sha256=" + sign(self._secret(), stamp, body)
        return headers

    def _secret(self) -> bytes:
        # Read for each order, so that a secret can be changed while the broker runs.
        path = self._settings.secret_file
        try:
            return Path(path).read_bytes().strip()
        except OSError as error:
            raise from_os_error("read the webhook's secret", error, path) from error


def sign(secret: bytes, timestamp: str, body: bytes) -> str:
    """Return the signature of an order: HMAC-SHA256 of timestamp, dot and body, in hexadecimal."""
    return hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
