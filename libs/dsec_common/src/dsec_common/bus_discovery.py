"""How ``nats micro`` finds a service: the discovery subjects of NATS ADR-32, answered in JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from dsec_common.bus_serving import ReplyGuard, Send, Served
from dsec_common.wire.base import new_id

_TYPE: Final = "io.nats.micro.v1."


class Discovery:
    """Answers ``$SRV.PING``, ``$SRV.INFO`` and ``$SRV.STATS`` for one process."""

    def __init__(
        self,
        name: str,
        version: str,
        description: str,
        served: Sequence[Served[Any]],
        send: Send,
    ) -> None:
        self.name = name
        self.id = new_id()
        self._version = version
        self._description = description
        self._served = served
        self._send = send
        self._started_at = time.time()
        self._guard: ReplyGuard

    async def open(self, client: Client, guard: ReplyGuard) -> None:
        """Subscribe to the subjects that concern this process."""
        self._guard = guard
        for verb in ("PING", "INFO", "STATS"):
            for suffix in ("", f".{self.name}", f".{self.name}.{self.id}"):
                await client.subscribe(f"$SRV.{verb}{suffix}", cb=self._answer)

    async def _answer(self, message: Msg) -> None:
        if not self._guard.allows(message.reply):
            return
        verb = message.subject.split(".")[1]
        identity = {
            "type": f"{_TYPE}{verb.lower()}_response",
            "name": self.name,
            "id": self.id,
            "version": self._version,
            "metadata": {},
        }
        answer = {"PING": {}, "INFO": self._info(), "STATS": self._stats()}[verb]
        await self._send(message.reply, msgspec.json.encode(identity | answer), {})

    def _info(self) -> dict[str, Any]:
        return {
            "description": self._description,
            "endpoints": [{"name": _name(one), "subject": one.subject} for one in self._served],
        }

    def _stats(self) -> dict[str, Any]:
        return {
            "started": datetime.fromtimestamp(self._started_at, UTC).isoformat(),
            "endpoints": [
                {
                    "name": _name(one),
                    "subject": one.subject,
                    "num_requests": one.stats.requests,
                    "num_errors": one.stats.errors,
                    "last_error": one.stats.last_error,
                    "processing_time": int(one.stats.processing_time_s * 1e9),
                    "average_processing_time": int(
                        one.stats.processing_time_s * 1e9 / max(one.stats.requests, 1)
                    ),
                }
                for one in self._served
            ],
        }


def _name(served: Served[Any]) -> str:
    """Return an endpoint's name: its subject's last two words, which ADR-32 wants without dots."""
    words = [token for token in served.subject.split(".") if token not in {"*", ">"}]
    return "-".join(words[-2:])
