"""What the node daemon is told."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import msgspec

from dsec_common.accounts_permissions import RESPONSE_THRESHOLD_S
from dsec_common.config import ServiceConfig
from dsec_common.errors import DsecError
from dsec_common.subjects import validate_node

MIB = 1024 * 1024
GIB = 1024 * MIB
# A command at its limit still has to be ended and answered.
_ANSWER_MARGIN_S = 600.0


class SandboxdConfig(ServiceConfig, frozen=True, kw_only=True):
    """Settings of one node.

    Attributes:
        node: the node's name, one subject token; empty takes the host's name, made valid.
        layers_directory: the layer store, local or shared with other nodes.
        run_directory: sockets and the kernel part's files, on a tmpfs; empty means
            ``/run/dsec/<node>``.
        cpu_oversubscription: how many times the machine's processors may be handed out.
        memory_oversubscription: same, for its memory.
        sandboxes_max: sandboxes at once.
        memory_reserve_bytes: below this much available memory no sandbox is admitted.
        heartbeat_interval_s: seconds between two heartbeats.
        ended_kept_s: how long the record of an ended sandbox stays readable.
        ended_kept_max: how many of them stay, the newest.
        labels: told in heartbeats.
        layers_idle_max: mounted layers kept ready without a sandbox that uses them.
        pids_max: most processes one sandbox may ask for.
        inodes_max: most files in a writable layer that one sandbox may ask for.
        exec_timeout_max_s: longest time limit of a command.
        layer_upload_max_bytes: largest archive.
        layer_uploads_max: archives on their way at once; one project may have half of them.
        disk_reserve_bytes: uploads leave so much of the disk free.
        layer_imports_max: imports running at once; others wait.
        upload_idle_s: an upload without a new piece for so long is removed.
        log_spool_directory: the behaviour log's spool; empty means ``<state_directory>/log-spool``.
        log_spool_max_bytes: its bound.
    """

    node: str = ""
    layers_directory: str = "/var/lib/dsec/layers"
    run_directory: str = ""
    cpu_oversubscription: float = 32.0
    memory_oversubscription: float = 8.0
    sandboxes_max: int = 3200
    memory_reserve_bytes: int = 512 * MIB
    heartbeat_interval_s: float = 1.0
    ended_kept_s: float = 3600.0
    ended_kept_max: int = 20_000
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    layers_idle_max: int = 64
    pids_max: int = 32_768
    inodes_max: int = 4_194_304
    exec_timeout_max_s: float = 3600.0
    layer_upload_max_bytes: int = 32 * GIB
    layer_uploads_max: int = 16
    disk_reserve_bytes: int = 1 * GIB
    layer_imports_max: int = 1
    upload_idle_s: float = 120.0
    log_spool_directory: str = ""
    log_spool_max_bytes: int = 1 * GIB

    def __post_init__(self) -> None:
        """Refuse what could only fail later.

        Raises:
            ValueError: naming the setting; it becomes a configuration error.
        """
        if self.node:
            try:
                validate_node(self.node)
            except DsecError as error:
                raise ValueError(error.message) from None
        for name in (
            "cpu_oversubscription",
            "memory_oversubscription",
            "heartbeat_interval_s",
            "exec_timeout_max_s",
            "upload_idle_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0")
        longest_s = RESPONSE_THRESHOLD_S - _ANSWER_MARGIN_S
        if self.exec_timeout_max_s > longest_s:
            raise ValueError(
                f"exec_timeout_max_s must be at most {longest_s:g}: NATS forgets who asked after "
                f"{RESPONSE_THRESHOLD_S:g} s, and a later result would reach nobody"
            )
        for name in ("sandboxes_max", "layer_uploads_max", "layer_imports_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in (
            "memory_reserve_bytes",
            "disk_reserve_bytes",
            "ended_kept_max",
            "layers_idle_max",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")

    @property
    def node_name(self) -> str:
        """The node's name as subjects carry it."""
        return self.node or valid_node_name(socket.gethostname())

    @property
    def run_path(self) -> Path:
        """Where the daemon's sockets are."""
        return Path(self.run_directory or f"/run/dsec/{self.node_name}")

    @property
    def layers_path(self) -> Path:
        """Where the layer store is."""
        return Path(self.layers_directory)

    @property
    def state_path(self) -> Path:
        """Where the daemon's RocksDB and uploads are; nodes of one machine do not share it."""
        return Path(self.state_directory) / "sandboxd" / self.node_name

    @property
    def spool_path(self) -> Path:
        """Where the behaviour log waits for Kafka."""
        return Path(self.log_spool_directory or str(Path(self.state_directory) / "log-spool"))


def valid_node_name(host_name: str) -> str:
    """Return ``host_name`` with what a subject token cannot hold replaced by hyphens."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", host_name).strip("-_")[:63]
    return name or "node"
