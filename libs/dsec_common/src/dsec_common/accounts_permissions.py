"""Who may say and hear what: the subjects of each service, and what a project exports and imports.

Each list is the least that works. A project's reach is decided here alone: its account imports its
own subjects, one verb after another, and the server knows no way from one account to another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dsec_common import subjects
from dsec_common.bus_types import SERVICE_INBOX_PREFIX
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.subjects import ROOT, SYSTEM

_NANOSECONDS: Final = 1_000_000_000

#: The services' roles. ``sandboxd`` has one user for each node, named ``sandboxd:<node>``.
#: ``operator`` is a person with ``nats micro``: it asks services how they are and reads events.
ROLES: Final = ("broker", "scheduler", "chronus", "tracer", "operator")
NODE_ROLE: Final = "sandboxd"

#: How long a request may stay unanswered before the server forgets its caller. It must be above
#: the longest command's timeout: later the reply reaches nobody.
RESPONSE_THRESHOLD_S: Final = 7200.0

#: Requests with more than one reply. The server remembers the caller of such a request for the
#: whole threshold, about 700 bytes each, but that of any other only until its reply.
STREAMING_SERVICES: Final[frozenset[str]] = frozenset()

#: Agents, their instances and their packages.
AGENT_STREAMS: Final = ("KV_dsec-agents", "KV_dsec-agent-instances", "OBJ_dsec-agent-packages")

#: The streams that each role owns; a bucket is the stream ``KV_<bucket>``. Nobody else reaches
#: them, so a new one needs its line here.
OWNED_STREAMS: Final[dict[str, tuple[str, ...]]] = {
    "broker": ("KV_dsec-nodes", "KV_dsec-elastic"),
    "scheduler": (
        "DSEC_QUEUE",
        "DSEC_EVENTS",
        "KV_dsec-idempotency",
        "KV_dsec-pools",
        *AGENT_STREAMS,
        "KV_dsec-dependencies",
        "KV_dsec-dags",
        "KV_dsec-dag-runs",
    ),
    "chronus": (
        "chronus-journal",
        "KV_chronus-owners",
        "KV_chronus-rollouts",
        "KV_chronus-requests",
    ),
    "tracer": ("KV_tracer-offsets",),
    "operator": (),
}

#: The layer store of all nodes, where it is in NATS; every node may write to it.
LAYERS_BUCKET: Final = "dsec-layers"

_PUBLISHES: Final[dict[str, tuple[str, ...]]] = {
    "broker": (
        f"{ROOT}.{SYSTEM}.node.*.resize",
        f"{ROOT}.{SYSTEM}.node.*.retire",
        f"{ROOT}.{SYSTEM}.node.*.revoke",
        f"{ROOT}.*.evt.lease.>",
        f"{ROOT}.{SYSTEM}.evt.node.>",
    ),
    "scheduler": (
        f"{ROOT}.{SYSTEM}.node.*.*",
        f"{ROOT}.{SYSTEM}.lease.*",
        f"{ROOT}.{SYSTEM}.waiting.*",
        # Asked only when a node's answer got lost: did the sandbox come to life?
        f"{ROOT}.*.sandbox.*.*.inspect",
        # Of a gang that was not made whole.
        f"{ROOT}.*.sandbox.*.*.delete",
        f"{ROOT}.*.evt.request.>",
        f"{ROOT}.*.evt.agent.>",
    ),
    "chronus": (
        f"{ROOT}.{SYSTEM}.journal.*",
        f"{ROOT}.{SYSTEM}.rollout.>",
        f"{ROOT}.{SYSTEM}.group.>",
        f"{ROOT}.{SYSTEM}.shard.*.taken",
        # Of an answer that a trainer has only begun; the node answers the trainer.
        f"{ROOT}.{SYSTEM}.node.*.stream",
        # Of rollouts that are kept, put back and branched together with their sandboxes.
        f"{ROOT}.*.sandbox.*.*.snapshot",
        f"{ROOT}.*.sandbox.*.*.rollback",
        f"{ROOT}.*.sandbox.*.*.inspect",
        f"{ROOT}.*.sandbox.*.*.inspect_network",
        f"{ROOT}.*.sandbox.create",
        f"{ROOT}.*.snapshot.*.*",
        f"{ROOT}.*.layer.*.remove",
        f"{ROOT}.*.evt.rollout.>",
    ),
    "tracer": (),
    "operator": ("$SRV.>",),
}

_SUBSCRIBES: Final[dict[str, tuple[str, ...]]] = {
    "broker": (
        subjects.HEARTBEATS,
        f"{ROOT}.{SYSTEM}.lease.*",
        f"{ROOT}.{SYSTEM}.node_lease.*.*",
        f"{ROOT}.*.node.*",
        f"{ROOT}.*.lease.force_unlock",
    ),
    "scheduler": (
        subjects.HEARTBEATS,
        f"{ROOT}.*.sandbox.create",
        f"{ROOT}.*.sandbox.create_gang",
        f"{ROOT}.*.sandbox.explain",
        f"{ROOT}.*.sandbox.cancel",
        f"{ROOT}.*.sandbox.list",
        f"{ROOT}.{SYSTEM}.waiting.*",
        f"{ROOT}.*.pool.*",
        f"{ROOT}.*.agent.*",
        f"{ROOT}.*.dag.*",
        subjects.INSTANCE_REPORTS,
        f"{ROOT}.*.function.call",
        subjects.EVENT_PATTERN,
    ),
    "chronus": (
        f"{ROOT}.*.rollout.open",
        f"{ROOT}.*.rollout.take_group",
        f"{ROOT}.*.rollout.open_group",
        f"{ROOT}.*.rollout.*.*.*",
        f"{ROOT}.*.group.*.*",
        f"{ROOT}.{SYSTEM}.rollout.>",
        f"{ROOT}.{SYSTEM}.group.>",
        subjects.HEARTBEATS,
    ),
    "tracer": (f"{ROOT}.*.trace.*",),
    "operator": (subjects.EVENT_PATTERN, subjects.HEARTBEATS),
}

#: The calls of the JetStream API that take a stream's name, and what follows it.
_STREAM_CALLS: Final = (
    "STREAM.CREATE.{}",
    "STREAM.UPDATE.{}",
    "STREAM.INFO.{}",
    "STREAM.PURGE.{}",
    "STREAM.MSG.GET.{}",
    "DIRECT.GET.{}",
    "DIRECT.GET.{}.>",
    "CONSUMER.CREATE.{}",
    "CONSUMER.CREATE.{}.>",
    "CONSUMER.DURABLE.CREATE.{}.>",
    "CONSUMER.INFO.{}.>",
    "CONSUMER.DELETE.{}.>",
    "CONSUMER.MSG.NEXT.{}.>",
)


def _jetstream(streams: Iterable[str]) -> list[str]:
    allowed: list[str] = []
    for stream in streams:
        allowed += [f"$JS.API.{call.format(stream)}" for call in _STREAM_CALLS]
        allowed += [f"$JS.ACK.{stream}.>", f"$JS.FC.{stream}.>"]
        if stream.startswith("KV_"):
            allowed.append(f"$KV.{stream.removeprefix('KV_')}.>")
        elif stream.startswith("OBJ_"):
            allowed.append(f"$O.{stream.removeprefix('OBJ_')}.>")
    return allowed


def service_permissions(role: str, node: str = "") -> tuple[list[str], list[str]]:
    """Return what a service may publish to and subscribe to.

    Args:
        role: one of :data:`ROLES`, or :data:`NODE_ROLE`.
        node: the node's name, for :data:`NODE_ROLE`.

    Raises:
        DsecError: ``invalid`` for an unknown role or an impossible node name.
    """
    if role == NODE_ROLE:
        subjects.validate_node(node)
        own_publishes: tuple[str, ...] = (
            subjects.heartbeat(node),
            f"{ROOT}.*.evt.sandbox.{node}.>",
            f"{ROOT}.*.evt.layer.>",
            f"{ROOT}.{SYSTEM}.rollout.>",
            subjects.instance_report(node),
            f"{ROOT}.{SYSTEM}.node_lease.{node}.*",
        )
        own_subscribes: tuple[str, ...] = (
            f"{ROOT}.*.sandbox.{node}.*.*",
            f"{ROOT}.*.layer.{node}.*",
            f"{ROOT}.*.snapshot.{node}.*",
            f"{ROOT}.{SYSTEM}.node.{node}.*",
            subjects.SHARDS_TAKEN,
        )
        inbox = f"{SERVICE_INBOX_PREFIX}.{NODE_ROLE}.{node}"
        streams: tuple[str, ...] = (f"KV_{LAYERS_BUCKET}", f"OBJ_{LAYERS_BUCKET}")
    elif role in ROLES:
        own_publishes, own_subscribes = _PUBLISHES[role], _SUBSCRIBES[role]
        inbox = f"{SERVICE_INBOX_PREFIX}.{role}"
        streams = OWNED_STREAMS[role]
    else:
        raise DsecError(
            ErrorCode.INVALID,
            f"{role!r} is no service; the services are {', '.join((*ROLES, NODE_ROLE))}",
        )
    # Replies go to imported requests and to the inboxes of other services.
    publish = ["_R_.>", f"{SERVICE_INBOX_PREFIX}.>", *own_publishes, *_jetstream(streams)]
    subscribe = [f"{inbox}.>", "$SRV.>", *own_subscribes]
    return publish, subscribe


def project_permissions(project: str) -> dict[str, Any]:
    """Return the permissions of a project's users, as a user's JWT writes them.

    They may send requests below the project's own name and read its events. The inbox is the
    account's own: no other account can publish to it but by answering a request.
    """
    subjects.validate_project(project)
    return {
        "pub": {
            "allow": [f"{ROOT}.{project}.>"],
            "deny": [subjects.project_events(project)],
        },
        "sub": {"allow": ["_INBOX.>", subjects.project_events(project)]},
    }


def service_exports() -> list[dict[str, Any]]:
    """Return what the services' account offers to projects: each verb, and their events.

    A reply may come as late as :data:`RESPONSE_THRESHOLD_S` says; all but
    :data:`STREAMING_SERVICES` have exactly one.
    """
    offered: list[dict[str, Any]] = [
        {
            "name": _name(pattern),
            "subject": pattern,
            "type": "service",
            "response_type": "Stream" if pattern in STREAMING_SERVICES else "Singleton",
            "response_threshold": int(RESPONSE_THRESHOLD_S * _NANOSECONDS),
        }
        for pattern in subjects.USER_SERVICES
    ]
    offered.append({"name": "events", "subject": subjects.EVENT_PATTERN, "type": "stream"})
    return offered


def project_imports(project: str, services_public_key: str) -> list[dict[str, Any]]:
    """Return what one project's account takes: every verb and the events, under its name only."""
    subjects.validate_project(project)

    def own(pattern: str) -> str:
        return pattern.replace(f"{ROOT}.*.", f"{ROOT}.{project}.", 1)

    taken: list[dict[str, Any]] = [
        {
            "name": _name(pattern),
            "subject": own(pattern),
            "account": services_public_key,
            "type": "service",
        }
        for pattern in subjects.USER_SERVICES
    ]
    taken.append(
        {
            "name": "events",
            "subject": own(subjects.EVENT_PATTERN),
            "account": services_public_key,
            "type": "stream",
        }
    )
    return taken


def _name(pattern: str) -> str:
    return "-".join(word for word in pattern.split(".")[2:] if word != "*")
