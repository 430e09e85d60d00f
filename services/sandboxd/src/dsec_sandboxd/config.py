"""What the node daemon is told."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from dsec_common.accounts_permissions import RESPONSE_THRESHOLD_S
from dsec_common.config import ServiceConfig
from dsec_common.errors import DsecError
from dsec_common.nodes_file import NODES_FILE, read_nodes_file
from dsec_common.subjects import validate_node
from dsec_common.wire.network import NetworkRule
from dsec_sandboxd.layers.urls import check_url
from dsec_sandboxd.network_config import check_network_settings

MIB = 1024 * 1024
GIB = 1024 * MIB
# A command at its limit still has to be ended and answered.
_ANSWER_MARGIN_S = 600.0


class SandboxdConfig(ServiceConfig, frozen=True, kw_only=True):
    """Settings of one node.

    Attributes:
        node: the node's name, one subject token; empty takes the host's name, made valid.
        layers_directory: the layer store, local or shared with other nodes.
        layers_backend: a layer store elsewhere: ``dir:/path``, ``nats:dsec-layers`` or
            ``s3://bucket/prefix?endpoint=…&region=…``; empty means ``layers_directory``.
        layers_cache_directory: where images of a store that is no directory are kept on this node;
            empty means ``<state_directory>/sandboxd/<node>/layers``.
        layers_cache_bytes: how much of them; the least recently used go, never one in use.
        layers_garbage_interval_s: seconds between two searches for images that nothing means.
        layers_fold_above: neighbouring small layers of a sandbox that names more than so many
            layers are mounted as one image, a fold.
        layer_folds_bytes: what folds may take of the disk; the least recently used go.
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
        nodes_file: ``nodes.yaml``, of which this node reads its own entry: models of GPUs, labels.
        gpu_interval_s: seconds between two readings of the GPUs.
        gpu_patience_s: a driver that does not answer one for so long hangs, and its cards with it.
        layers_idle_max: mounted layers kept ready without a sandbox that uses them.
        pids_max: most processes one sandbox may ask for.
        inodes_max: most files in a writable layer that one sandbox may ask for.
        exec_timeout_max_s: longest time limit of a command.
        exec_kept_s: how long a command's result and output are kept after its end.
        execs_kept_max: how many started execs of one sandbox are kept after their end.
        execs_max: how many started execs may run in one sandbox.
        exec_output_bytes: kept of each output stream of a started exec, its end.
        exec_memory_bytes: what the output of all execs together may take, of the node's memory.
        exec_results_bytes: what kept results of short commands may take of the daemon's memory.
        layer_upload_max_bytes: largest archive.
        layer_uploads_max: archives on their way at once; one project may have half of them.
        disk_reserve_bytes: uploads leave so much of the disk free.
        layer_imports_max: imports running at once; others wait.
        upload_idle_s: an upload without a new piece for so long is removed.
        log_spool_directory: the behaviour log's spool; empty means ``<state_directory>/log-spool``.
        log_spool_max_bytes: its bound.
        network_uplink: the host's device that leads outside; ``auto``: the one of its default
            route; ``manual``: the operator leads the router outside; empty: nothing does.
        network_resolvers: servers that names are looked up with, ``address`` or ``address:port``;
            none means those of the host.
        network_deny: addresses and ranges that no sandbox reaches, whatever its policy says.
        network_rule_sets: named sets of rules, beside those that every node knows.
        network_connections_max: open connections of one sandbox to the outside; as many may begin
            at once, and a quarter of it each second.
        model_server: a server with OpenAI's chat completions that ``llm`` of contracts asks, such
            as ``http://127.0.0.1:8000/v1``; empty for none.
        model_server_secret: its key, which no sandbox learns.
        snapshots_directory: where durable snapshots are; empty means
            ``<state_directory>/sandboxd/<node>/snapshots``.
        snapshots_max: how many snapshots one project may have on this node.
        snapshot_memory_bytes: what snapshots may take of the node's memory until they are packed.
        snapshot_disk_bytes: what durable snapshots may take of the disk.
        stop_keeps_sandboxes: an orderly stop lets the sandboxes live on for the next daemon of
            this node, as SIGUSR2 does once; otherwise it ends them.
        pool_calls_max: how many sandboxes may wait for function calls with the same layers; 0 has
            none made ahead of a call.
        reconcile_interval_s: seconds between two searches for what belongs to no sandbox.
        gpu_device_directory: where the GPU driver's device nodes are.
        gpu_devices: paths below it by uuid of GPU or MIG instance, several with spaces between, for
            those that are not just ``nvidia<index>``: MIG instances have devices of their own.
        gpu_mps_directory: the pipes of this node's CUDA MPS daemon.
        metering_interval_s: a sandbox's use is told at least so often, and at its end.
        quick_wakes_s: so long after a request to a latency-sensitive sandbox idle processors wait
            awake for the next one; 0 lets them sleep as they like.
    """

    node: str = ""
    layers_directory: str = "/var/lib/dsec/layers"
    layers_backend: str = ""
    layers_cache_directory: str = ""
    layers_cache_bytes: int = 32 * GIB
    layers_garbage_interval_s: float = 3600.0
    layers_fold_above: int = 8
    layer_folds_bytes: int = 4 * GIB
    run_directory: str = ""
    cpu_oversubscription: float = 32.0
    memory_oversubscription: float = 8.0
    sandboxes_max: int = 3200
    memory_reserve_bytes: int = 512 * MIB
    heartbeat_interval_s: float = 1.0
    ended_kept_s: float = 3600.0
    ended_kept_max: int = 20_000
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    nodes_file: str = NODES_FILE
    gpu_interval_s: float = 1.0
    gpu_patience_s: float = 10.0
    layers_idle_max: int = 64
    pids_max: int = 32_768
    inodes_max: int = 4_194_304
    exec_timeout_max_s: float = 3600.0
    exec_kept_s: float = 300.0
    execs_kept_max: int = 256
    execs_max: int = 1024
    exec_output_bytes: int = 1 * MIB
    exec_memory_bytes: int = 512 * MIB
    exec_results_bytes: int = 16 * MIB
    layer_upload_max_bytes: int = 32 * GIB
    layer_uploads_max: int = 16
    disk_reserve_bytes: int = 1 * GIB
    layer_imports_max: int = 1
    upload_idle_s: float = 120.0
    log_spool_directory: str = ""
    log_spool_max_bytes: int = 1 * GIB
    network_uplink: str = ""
    network_resolvers: tuple[str, ...] = ()
    network_deny: tuple[str, ...] = ()
    network_rule_sets: dict[str, tuple[NetworkRule, ...]] = msgspec.field(default_factory=dict)
    network_connections_max: int = 1024
    model_server: str = ""
    model_server_secret: str = ""
    snapshots_directory: str = ""
    snapshots_max: int = 10_000
    snapshot_memory_bytes: int = 2 * GIB
    snapshot_disk_bytes: int = 32 * GIB
    stop_keeps_sandboxes: bool = False
    pool_calls_max: int = 32
    reconcile_interval_s: float = 60.0
    gpu_device_directory: str = "/dev"
    gpu_devices: dict[str, str] = msgspec.field(default_factory=dict)
    gpu_mps_directory: str = "/tmp/nvidia-mps"  # noqa: S108  where CUDA puts it
    metering_interval_s: float = 300.0
    quick_wakes_s: float = 0.1

    def __post_init__(self) -> None:
        """Refuse what could only fail later.

        Raises:
            ValueError: naming the setting; it becomes a configuration error.
        """
        _check(validate_node, self.node)
        _check(check_url, self.layers_backend)
        for name in (
            "cpu_oversubscription",
            "memory_oversubscription",
            "heartbeat_interval_s",
            "gpu_interval_s",
            "gpu_patience_s",
            "reconcile_interval_s",
            "metering_interval_s",
            "exec_timeout_max_s",
            "exec_kept_s",
            "upload_idle_s",
            "layers_garbage_interval_s",
            "layers_cache_bytes",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0")
        longest_s = RESPONSE_THRESHOLD_S - _ANSWER_MARGIN_S
        if self.exec_timeout_max_s > longest_s:
            raise ValueError(
                f"exec_timeout_max_s must be at most {longest_s:g}: NATS forgets who asked after "
                f"{RESPONSE_THRESHOLD_S:g} s, and a later result would reach nobody"
            )
        for name in (
            "sandboxes_max",
            "layer_uploads_max",
            "layer_imports_max",
            "snapshots_max",
            "snapshot_memory_bytes",
            "snapshot_disk_bytes",
            "execs_max",
            "exec_output_bytes",
            "exec_memory_bytes",
            "layers_fold_above",
            "layer_folds_bytes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in (
            "memory_reserve_bytes",
            "disk_reserve_bytes",
            "ended_kept_max",
            "execs_kept_max",
            "exec_results_bytes",
            "layers_idle_max",
            "pool_calls_max",
            "quick_wakes_s",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
        if self.model_server and not self.model_server.startswith(("http://", "https://")):
            raise ValueError(f"model_server: {self.model_server} is no address of HTTP or HTTPS")
        check_network_settings(
            deny=self.network_deny,
            resolvers=self.network_resolvers,
            rule_sets=self.network_rule_sets,
            connections_max=self.network_connections_max,
        )

    def completed(self) -> Self:
        """Return the settings with the labels of ``nodes_file`` behind their own."""
        entry = read_nodes_file(self.nodes_file).entry(self.node_name)
        return msgspec.structs.replace(self, labels={**entry.labels, **self.labels})

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
    def layers_cache_path(self) -> Path:
        """Where images of a remote layer store are kept."""
        return Path(self.layers_cache_directory or self.state_path / "layers")

    @property
    def state_path(self) -> Path:
        """Where the daemon's RocksDB and uploads are; nodes of one machine do not share it."""
        return Path(self.state_directory) / "sandboxd" / self.node_name

    @property
    def snapshots_path(self) -> Path:
        """Where durable snapshots are."""
        return Path(self.snapshots_directory or str(self.state_path / "snapshots"))

    @property
    def spool_path(self) -> Path:
        """Where the behaviour log waits for Kafka."""
        return Path(self.log_spool_directory or str(Path(self.state_directory) / "log-spool"))


def _check(check: Callable[[str], object], value: str) -> None:
    """Turn the refusal of a setting that is not empty into a configuration error."""
    if not value:
        return
    try:
        check(value)
    except DsecError as error:
        raise ValueError(error.message) from None


def valid_node_name(host_name: str) -> str:
    """Return ``host_name`` with what a subject token cannot hold replaced by hyphens."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", host_name).strip("-_")[:63]
    return name or "node"
