"""What one may choose about a stack, and what that means for each service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from dsec.stack.child import ServiceSpec
from dsec.stack.layout import NODE_PART_PREFIX, Layout
from dsec_common.accounts import AuthDirectory
from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_common.subjects import validate_node

NATS_PORT: Final = 4222
SANDBOXD: Final = "sandboxd"
#: In the order in which they stop: first who makes work, last who must still answer the others.
CORE_SERVICES: Final = ("chronus", "tracer", "scheduler", "broker")
#: On one machine reading logs back must not slow what writes them; it catches up.
_NICENESS: Final = {"tracer": 5}


class StackOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A stack to be.

    Attributes:
        directory: its state directory.
        kafka: the provider: ``embedded``, ``apache``, ``external`` or ``auto``.
        kafka_bootstrap: the address of an external Kafka.
        nats_port: None takes 4222 when it is free, else any free one; 0 takes any free one.
        nodes: how many sandbox nodes to run on this machine.
        node_prefix: nodes are called ``<prefix>-1``, ``<prefix>-2``, …
        sandboxd: whether to run nodes at all; they need root.
        layers_directory: the nodes' shared layer store; None keeps it in the state directory.
        uplink: whether sandboxes may get outside by this machine's default route, if it has one.
        start_timeout_s: how long each part may take to start.
        log_level: of the services.
    """

    directory: Path
    kafka: str = "embedded"
    kafka_bootstrap: str = ""
    nats_port: int | None = None
    nodes: int = 1
    node_prefix: str = "node"
    sandboxd: bool = True
    layers_directory: Path | None = None
    uplink: bool = True
    start_timeout_s: float = 60.0
    log_level: str = "info"

    def check(self) -> None:
        """Refuse what cannot work, before anything is started.

        Raises:
            DsecError: ``denied`` when sandboxes are wanted and we are not root; ``invalid``.
        """
        if self.nodes < 1:
            raise invalid(f"--nodes is at least 1, not {self.nodes}; see also --without-sandboxd")
        for name in self.node_names():
            validate_node(name)
        if self.kafka == "external" and not self.kafka_bootstrap:
            raise invalid("--kafka external needs --kafka-bootstrap host:port")
        if self.sandboxd and os.geteuid() != 0:
            raise DsecError(
                ErrorCode.DENIED,
                "sandboxes need root (namespaces, mounts, cgroups): run `sudo dsec up`, or "
                "`dsec up --without-sandboxd` for a platform without a node of its own",
            )

    def node_names(self) -> tuple[str, ...]:
        """Return the names of this machine's nodes."""
        if not self.sandboxd:
            return ()
        return tuple(f"{self.node_prefix}-{number}" for number in range(1, self.nodes + 1))


def service_specs(
    options: StackOptions, layout: Layout, auth: AuthDirectory, nats_url: str, kafka: str
) -> list[ServiceSpec]:
    """Return how to run every service, in the order in which they stop: nodes first."""
    layers = options.layers_directory or layout.layers

    def spec(name: str, role: str, credentials: Path, *more: str) -> ServiceSpec:
        runtime_file = layout.runtime / f"{name}.json"
        settings = {
            "nats-servers": nats_url,
            "nats-credentials": str(credentials),
            "kafka-bootstrap": kafka,
            "state-directory": str(layout.services),
            "runtime-file": str(runtime_file),
            "log-level": options.log_level,
        }
        flags = tuple(f"--{key}={value}" for key, value in settings.items() if value)
        return ServiceSpec(
            name=name,
            module=f"dsec_{role}",
            arguments=(*flags, *more),
            runtime_file=runtime_file,
            log=layout.logs / f"{name}.log",
            niceness=_NICENESS.get(role, 0),
        )

    nodes = [
        spec(
            f"{NODE_PART_PREFIX}{node}",
            SANDBOXD,
            auth.service_credentials(SANDBOXD, node),
            f"--node={node}",
            f"--layers-directory={layers}",
            f"--run-directory={layout.run / node}",
            *(("--network-uplink=auto",) if options.uplink else ()),
        )
        for node in options.node_names()
    ]
    return [*nodes, *(spec(role, role, auth.service_credentials(role)) for role in CORE_SERVICES)]
