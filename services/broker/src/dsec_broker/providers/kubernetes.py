"""Nodes as the pods of one StatefulSet or Deployment, by the REST API of Kubernetes.

The set belongs to the provider alone: its replicas are the provider's nodes. A node's name is its
pod's (``DSEC_SANDBOXD_NODE`` from ``metadata.name``), and it carries the label
``provider=kubernetes`` (``DSEC_SANDBOXD_LABELS``). The broker's service account may get and update
the set's ``scale``, and patch and delete its pods.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import msgspec
import structlog

from dsec_broker.providers import Order, settings_of
from dsec_common.errors import DsecError, ErrorCode, from_os_error, unavailable

log = structlog.get_logger()

_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?")
_CONFLICTS_MAX: Final = 5
_OK: Final = range(200, 300)
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409
_SERVER_ERROR: Final = 500
_TOO_MANY: Final = 429
_SHOWN_CHARACTERS: Final = 200
#: Of the pods of a Deployment those with the lowest cost are deleted first; 0 is every pod's.
_DELETION_COST: Final = {"controller.kubernetes.io/pod-deletion-cost": "-1000"}


class KubernetesSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the provider ``kubernetes``.

    Attributes:
        name: the set's name.
        kind: what it is.
        namespace: where it is.
        url: the API server; the default is right inside a cluster.
        token_file: holds the service account's token; read for each order, since it is renewed.
            Empty sends none.
        ca_file: the API server's certificate authority; empty takes the system's.
        timeout_s: how long one request may take.
    """

    name: str
    kind: Literal["statefulset", "deployment"] = "statefulset"
    namespace: str = "default"
    url: str = "https://kubernetes.default.svc"
    token_file: str = f"{_ACCOUNT}/token"
    ca_file: str = f"{_ACCOUNT}/ca.crt"
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuse what could only fail later."""
        for field in ("name", "namespace"):
            if not _NAME.fullmatch(getattr(self, field)):
                raise ValueError(f"{field} {getattr(self, field)!r} is no name in Kubernetes")
        if not self.timeout_s > 0:
            raise ValueError("timeout_s is more than 0")


def open_kubernetes(settings: Mapping[str, str]) -> KubernetesProvider:
    """Return the provider ``kubernetes``; for the entry point."""
    return KubernetesProvider(settings_of(KubernetesSettings, settings, "kubernetes"))


class KubernetesProvider:
    """Sets the replicas of one set, so that only nodes that leave are taken away."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None

    def may_leave(self, nodes: Collection[str], idle: Collection[str]) -> Sequence[str]:
        """Return what lowering the replicas takes: of a StatefulSet, its last nodes."""
        if self._settings.kind == "deployment":
            return sorted(idle)
        leaving: list[str] = []
        for name in sorted(nodes, key=self._ordinal, reverse=True):
            if name not in idle:
                break
            leaving.append(name)
        return leaving

    async def scale(self, order: Order) -> None:
        """Set the replicas; pods that leave and that lowering them would not take are deleted.

        A pod that is deleted comes back as a fresh one for as long as the replicas ask for it.

        Raises:
            DsecError: what the API server answered.
        """
        for _ in range(_CONFLICTS_MAX):
            scale = await self._call("GET", self._scale_path)
            replicas = int(scale.get("spec", {}).get("replicas", 0))
            taken = await self._taken_by_lowering(replicas, order)
            scale["spec"] = {"replicas": max(order.wanted, replicas - len(taken))}
            try:
                if scale["spec"]["replicas"] != replicas:
                    await self._call("PUT", self._scale_path, scale)
                    log.info("scaled", **scale["spec"], was=replicas, set=self._settings.name)
            except DsecError as error:
                if error.code is ErrorCode.CONFLICT:
                    continue  # somebody else changed the set: look again
                raise
            for name in order.leaving:
                if name not in taken:
                    await self._pod("DELETE", name)
            return
        raise unavailable(
            f"{self._settings.kind} {self._settings.name} was changed by others "
            f"{_CONFLICTS_MAX} times in a row"
        )

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()

    async def _taken_by_lowering(self, replicas: int, order: Order) -> list[str]:
        """Return which of the leaving nodes fewer replicas take away, and no others.

        A Deployment's are marked as the first to go.
        """
        surplus = max(0, replicas - order.wanted)
        if self._settings.kind == "statefulset":
            last = replicas
            while (
                last > replicas - surplus and f"{self._settings.name}-{last - 1}" in order.leaving
            ):
                last -= 1
            return [f"{self._settings.name}-{number}" for number in range(last, replicas)]
        taken: list[str] = []
        for name in order.leaving:
            if len(taken) == surplus:
                break
            if await self._pod("PATCH", name, {"metadata": {"annotations": _DELETION_COST}}):
                taken.append(name)
        return taken

    def _ordinal(self, name: str) -> int:
        number = name.rpartition("-")[2]
        return int(number) if number.isdecimal() else -1

    # --- The API ------------------------------------------------------------------------------

    @property
    def _scale_path(self) -> str:
        settings = self._settings
        return (
            f"/apis/apps/v1/namespaces/{settings.namespace}/{settings.kind}s/{settings.name}/scale"
        )

    async def _pod(self, method: str, name: str, body: Any = None) -> bool:
        """Change a pod; return whether it was there."""
        try:
            await self._call(
                method, f"/api/v1/namespaces/{self._settings.namespace}/pods/{name}", body
            )
        except DsecError as error:
            if error.code is ErrorCode.NOT_FOUND:
                return False
            raise
        return True

    async def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        url = self._settings.url.rstrip("/") + path
        try:
            async with self._connection().request(
                method,
                url,
                data=None if body is None else msgspec.json.encode(body),
                headers={"accept": "application/json", "content-type": kind} | self._token(),
            ) as response:
                status, told = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or "it took too long"
            raise unavailable(f"{method} {url} failed: {reason}") from error
        if status not in _OK:
            raise _refused(method, url, status, told)
        answer: dict[str, Any] = msgspec.json.decode(told, type=dict[str, Any])
        return answer

    def _connection(self) -> aiohttp.ClientSession:
        if self._session is None:
            settings = self._settings
            verify: ssl.SSLContext | bool = True
            if settings.ca_file and settings.url.startswith("https:"):
                try:
                    verify = ssl.create_default_context(cafile=settings.ca_file)
                except OSError as error:
                    raise from_os_error("read the CA", error, settings.ca_file) from error
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=verify),
                timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
            )
        return self._session

    def _token(self) -> dict[str, str]:
        path = self._settings.token_file
        if not path:
            return {}
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise from_os_error("read the service account's token", error, path) from error
        return {"authorization": f"Bearer {token}"}


def _refused(method: str, url: str, status: int, told: bytes) -> DsecError:
    """Return the error for an answer that is not 2xx, with what the server says of it."""
    try:
        said = str(msgspec.json.decode(told, type=dict[str, Any]).get("message", ""))
    except msgspec.DecodeError:
        said = told.decode(errors="replace")
    message = f"{method} {url} was answered {status}: {said[:_SHOWN_CHARACTERS]}"
    if status >= _SERVER_ERROR or status == _TOO_MANY:
        return unavailable(message)
    codes = {
        401: ErrorCode.DENIED,
        403: ErrorCode.DENIED,
        _NOT_FOUND: ErrorCode.NOT_FOUND,
        _CONFLICT: ErrorCode.CONFLICT,
    }
    return DsecError(codes.get(status, ErrorCode.INVALID), message)
