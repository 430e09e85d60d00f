"""Telling a running NATS server of projects; it takes about a millisecond and no reload."""

from __future__ import annotations

from typing import Final

import msgspec

from dsec_common.accounts import AuthDirectory
from dsec_common.bus import Bus, BusConfig
from dsec_common.errors import DsecError, ErrorCode

_TIMEOUT_S: Final = 5.0


async def announce_project(auth: AuthDirectory, servers: tuple[str, ...], name: str) -> None:
    """Have the running servers accept a project of ``auth``; repeating it is fine.

    Raises:
        DsecError: ``not_found`` for an unknown project; ``unavailable`` when no server answers: one
            that starts later with this directory knows the project anyway.
    """
    await _order(auth, servers, "$SYS.REQ.CLAIMS.UPDATE", auth.project_token(name))


async def retire_project(auth: AuthDirectory, servers: tuple[str, ...], name: str) -> None:
    """Forget a project in ``auth`` and have the running servers close its connections.

    Raises:
        DsecError: ``not_found``; ``unavailable`` when no server answers.
    """
    await _order(auth, servers, "$SYS.REQ.CLAIMS.DELETE", auth.remove_project(name))


async def _order(auth: AuthDirectory, servers: tuple[str, ...], subject: str, token: str) -> None:
    config = BusConfig(
        servers=servers,
        credentials_path=str(auth.system_credentials()),
        name="dsec project",
        connect_timeout_s=_TIMEOUT_S,
    )
    async with await Bus.connect(config) as bus:
        answer = msgspec.json.decode(await bus.request_raw(subject, token.encode("ascii")))
    error = answer.get("error")
    if error:
        raise DsecError(
            ErrorCode.INTERNAL,
            f"NATS refused {subject}: {error.get('description', error)}",
        )
