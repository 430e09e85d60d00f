"""Every NATS subject of the platform, built and taken apart in one place.

No subject is ever formatted at a call site: each function here validates each token, so an id that
holds a dot, a wildcard or a space is refused before it can name something else.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from dsec_common.errors import DsecError, ErrorCode, invalid

ROOT: Final = "dsec.v1"
SYSTEM: Final = "_sys"
DEFAULT_PROJECT: Final = "default"

_PROJECT: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NODE: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62})")
_LOCAL: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62})")
_VERB: Final = re.compile(r"[a-z][a-z_]{0,62}")


def _token(value: str, pattern: re.Pattern[str], what: str, rule: str) -> str:
    if isinstance(value, str) and pattern.fullmatch(value):
        return value
    shown = repr(value[:40] + "…" if isinstance(value, str) and len(value) > 40 else value)  # noqa: PLR2004  the longest that reads well in an error
    raise invalid(f"{shown} is not a valid {what}: {rule}", token=what)


def validate_project(project: str) -> str:
    """Return ``project`` unchanged, or raise ``invalid``."""
    return _token(
        project, _PROJECT, "project name", "use 1-63 lower-case letters, digits and inner hyphens"
    )


def validate_node(node: str) -> str:
    """Return ``node`` unchanged, or raise ``invalid``."""
    return _token(node, _NODE, "node name", "use 1-63 letters, digits, hyphens and underscores")


def validate_local(local: str) -> str:
    """Return a sandbox's or rollout's local part unchanged, or raise ``invalid``."""
    return _token(local, _LOCAL, "id", "use 1-63 letters, digits, hyphens and underscores")


def _verb(verb: str) -> str:
    return _token(verb, _VERB, "verb", "use lower-case letters and underscores")


class ScopedId(NamedTuple):
    """An id of two tokens: where it lives, and which it is there.

    A sandbox's is ``<node>.<local>``, a rollout's ``<shard>.<local>``, so a request finds its
    node or its shard's owner with no look-up.
    """

    owner: str
    local: str

    def __str__(self) -> str:
        return f"{self.owner}.{self.local}"

    @classmethod
    def parse(cls, text: str, what: str = "sandbox id") -> ScopedId:
        """Return the two tokens of ``text``, or raise ``invalid``."""
        owner, dot, local = text.partition(".") if isinstance(text, str) else ("", "", "")
        if not dot or not _NODE.fullmatch(owner) or not _LOCAL.fullmatch(local):
            example = "s0.ea5lj…" if what == "rollout id" else "node-1.01jq8…"
            raise invalid(
                f"{text[:40]!r} is not a valid {what}: it looks like '{example}', two parts of "
                "letters, digits, hyphens and underscores joined by one dot",
                token=what,
            )
        return cls(owner, local)


# --- What a project may ask -----------------------------------------------------------------------

SANDBOX_VERBS: Final = (
    "exec",
    "start_exec",
    "add_arguments",
    "read_exec",
    "write_stdin",
    "resize_exec",
    "signal_exec",
    "cancel_exec",
    "inspect_exec",
    "list_execs",
    "inspect",
    "delete",
    "inspect_network",
    "set_network",
    "enter_agent_phase",
    "open_port",
    "read_port",
    "write_port",
    "close_port",
    "pause",
    "resume",
    "touch",
    "patch",
    "read_file",
    "write_file",
    "stat_file",
    "list_directory",
    "make_directory",
    "move_file",
    "copy_file",
    "delete_file",
    "write_tree",
    "read_tree",
    "watch_files",
    "snapshot",
    "fork",
    "rollback",
    "begin_action",
    "keep_action",
    "end_action",
    "list_actions",
)
LAYER_VERBS: Final = ("upload", "import", "list", "inspect", "tag", "remove")
POOL_VERBS: Final = ("set", "list", "remove")
AGENT_VERBS: Final = (
    "upload",
    "register",
    "list",
    "inspect",
    "instances",
    "update",
    "remove",
    "revoke",
    "policy",
    "report_dependencies",
    "dependencies",
    "synchronise",
)
DAG_VERBS: Final = ("register", "list", "remove", "run", "inspect", "resume")
SNAPSHOT_VERBS: Final = ("list", "inspect", "delete", "pack")
KEPT_VERBS: Final = ("put_state", "get_state", "checkpoint", "checkpoints", "rollback", "branch")
ROLLOUT_VERBS: Final = ("next", "feedback", "stream", "inspect", "close", *KEPT_VERBS)
GROUP_VERBS: Final = ("next", "answer")


def sandbox_create(project: str) -> str:
    """Request/reply: a sandbox now, or a typed refusal."""
    return f"{ROOT}.{validate_project(project)}.sandbox.create"


def sandbox_create_gang(project: str) -> str:
    """Request/reply: several sandboxes, all or none."""
    return f"{ROOT}.{validate_project(project)}.sandbox.create_gang"


def sandbox_waiting(project: str, verb: str) -> str:
    """Request/reply about a request that waits for Compute Units: ``explain``, ``cancel``."""
    return f"{ROOT}.{validate_project(project)}.sandbox.{_verb(verb)}"


def sandbox_list(project: str) -> str:
    """Request/reply: the project's sandboxes on all nodes."""
    return f"{ROOT}.{validate_project(project)}.sandbox.list"


def queue_sandbox_create(project: str) -> str:
    """JetStream: a sandbox as soon as there is room; the outcome is an event."""
    return f"{ROOT}.{validate_project(project)}.queue.sandbox.create"


def sandbox(project: str, sandbox_id: ScopedId, verb: str) -> str:
    """Request/reply with the sandbox's node."""
    return (
        f"{ROOT}.{validate_project(project)}.sandbox."
        f"{validate_node(sandbox_id.owner)}.{validate_local(sandbox_id.local)}.{_verb(verb)}"
    )


def layer(project: str, node: str, verb: str) -> str:
    """Request/reply with a node's layer store."""
    return f"{ROOT}.{validate_project(project)}.layer.{validate_node(node)}.{_verb(verb)}"


def snapshot(project: str, node: str, verb: str) -> str:
    """Request/reply with a node about its snapshots; the message names which."""
    return f"{ROOT}.{validate_project(project)}.snapshot.{validate_node(node)}.{_verb(verb)}"


def pool(project: str, verb: str) -> str:
    """Request/reply with any scheduler about the project's warm pools."""
    return f"{ROOT}.{validate_project(project)}.pool.{_verb(verb)}"


def agent(project: str, verb: str) -> str:
    """Request/reply with any scheduler about the project's agents: :data:`AGENT_VERBS`."""
    return f"{ROOT}.{validate_project(project)}.agent.{_verb(verb)}"


def dag(project: str, verb: str) -> str:
    """Request/reply with any scheduler about DAGs of agents: :data:`DAG_VERBS`."""
    return f"{ROOT}.{validate_project(project)}.dag.{_verb(verb)}"


def function_call(project: str) -> str:
    """Request/reply: one task, run in a sandbox of its own."""
    return f"{ROOT}.{validate_project(project)}.function.call"


def node(project: str, verb: str) -> str:
    """Request/reply with the broker about nodes (``list``, ``inspect``)."""
    return f"{ROOT}.{validate_project(project)}.node.{_verb(verb)}"


def force_unlock(project: str) -> str:
    """Request/reply: end leases of the project, whoever holds them."""
    return f"{ROOT}.{validate_project(project)}.lease.force_unlock"


def rollout_open(project: str) -> str:
    """Request/reply with any Chronus."""
    return f"{ROOT}.{validate_project(project)}.rollout.open"


def rollout(project: str, rollout_id: ScopedId, verb: str) -> str:
    """Request/reply with the rollout's shard."""
    return (
        f"{ROOT}.{validate_project(project)}.rollout."
        f"{validate_node(rollout_id.owner)}.{validate_local(rollout_id.local)}.{_verb(verb)}"
    )


def rollout_group(project: str, verb: str) -> str:
    """Request/reply with any Chronus about a group of rollouts: ``take_group``, ``open_group``."""
    return f"{ROOT}.{validate_project(project)}.rollout.{_verb(verb)}"


def group(project: str, shard: str, verb: str) -> str:
    """Request/reply with a shard about a group's rollouts in it: :data:`GROUP_VERBS`."""
    return f"{ROOT}.{validate_project(project)}.group.{validate_node(shard)}.{_verb(verb)}"


def trace(project: str, verb: str) -> str:
    """Request/reply with the tracer (``get``, ``cost``)."""
    return f"{ROOT}.{validate_project(project)}.trace.{_verb(verb)}"


#: Every subject that a project may send a request to, with ``*`` where its own name stands.
#: Accounts export and import exactly these, verb by verb.
USER_SERVICES: Final[tuple[str, ...]] = (
    f"{ROOT}.*.sandbox.create",
    f"{ROOT}.*.sandbox.list",
    f"{ROOT}.*.sandbox.create_gang",
    f"{ROOT}.*.sandbox.explain",
    f"{ROOT}.*.sandbox.cancel",
    f"{ROOT}.*.queue.sandbox.create",
    *(f"{ROOT}.*.sandbox.*.*.{verb}" for verb in SANDBOX_VERBS),
    *(f"{ROOT}.*.layer.*.{verb}" for verb in LAYER_VERBS),
    *(f"{ROOT}.*.snapshot.*.{verb}" for verb in SNAPSHOT_VERBS),
    *(f"{ROOT}.*.pool.{verb}" for verb in POOL_VERBS),
    *(f"{ROOT}.*.agent.{verb}" for verb in AGENT_VERBS),
    *(f"{ROOT}.*.dag.{verb}" for verb in DAG_VERBS),
    f"{ROOT}.*.function.call",
    f"{ROOT}.*.node.list",
    f"{ROOT}.*.node.inspect",
    f"{ROOT}.*.lease.force_unlock",
    f"{ROOT}.*.rollout.open",
    f"{ROOT}.*.rollout.take_group",
    f"{ROOT}.*.rollout.open_group",
    *(f"{ROOT}.*.rollout.*.*.{verb}" for verb in ROLLOUT_VERBS),
    *(f"{ROOT}.*.group.*.{verb}" for verb in GROUP_VERBS),
    f"{ROOT}.*.trace.get",
    f"{ROOT}.*.trace.cost",
)

#: The stream of events that each project may read of its own.
EVENT_PATTERN: Final = f"{ROOT}.*.evt.>"


# --- Events ---------------------------------------------------------------------------------------


def sandbox_event(project: str, sandbox_id: ScopedId, what: str) -> str:
    """Event of a sandbox: ``running``, ``paused``, ``resumed``, ``resized``, ``ended``."""
    return (
        f"{ROOT}.{validate_project(project)}.evt.sandbox."
        f"{validate_node(sandbox_id.owner)}.{validate_local(sandbox_id.local)}.{_verb(what)}"
    )


def request_event(project: str, request_id: str, what: str) -> str:
    """Event of a queued request: ``created``, ``refused``."""
    return (
        f"{ROOT}.{validate_project(project)}.evt.request.{validate_local(request_id)}.{_verb(what)}"
    )


def agent_event(project: str, name: str, what: str) -> str:
    """Event of an agent: ``rolled_back``."""
    return f"{ROOT}.{validate_project(project)}.evt.agent.{validate_local(name)}.{_verb(what)}"


def rollout_event(project: str, rollout_id: ScopedId, what: str) -> str:
    """Event of a rollout: ``put_back``."""
    owner, local = validate_node(rollout_id.owner), validate_local(rollout_id.local)
    return f"{ROOT}.{validate_project(project)}.evt.rollout.{owner}.{local}.{_verb(what)}"


def layer_event(project: str, upload_id: str, what: str) -> str:
    """Event of a layer import: ``progress``."""
    return f"{ROOT}.{validate_project(project)}.evt.layer.{validate_local(upload_id)}.{_verb(what)}"


def lease_event(project: str, node_name: str, what: str) -> str:
    """Event of a project's leases on a node: ``unlocked``."""
    return f"{ROOT}.{validate_project(project)}.evt.lease.{validate_node(node_name)}.{_verb(what)}"


def project_events(project: str) -> str:
    """Return the pattern of all of a project's events."""
    return f"{ROOT}.{validate_project(project)}.evt.>"


# --- Between services -----------------------------------------------------------------------------


def heartbeat(node_name: str) -> str:
    """Event, once a second: a node lives and has this."""
    return f"{ROOT}.{SYSTEM}.heartbeat.{validate_node(node_name)}"


def node_alarm(node_name: str, what: str) -> str:
    """Event for operators, in no project: something is wrong with what services keep of a node."""
    return f"{ROOT}.{SYSTEM}.evt.node.{validate_node(node_name)}.{_verb(what)}"


HEARTBEATS: Final = f"{ROOT}.{SYSTEM}.heartbeat.*"


def node_request(node_name: str, verb: str) -> str:
    """Request/reply from a service to one node (``place``, ``list``)."""
    return f"{ROOT}.{SYSTEM}.node.{validate_node(node_name)}.{_verb(verb)}"


def lease(verb: str) -> str:
    """Request/reply with the broker: ``grant``, ``renew``, ``release``, ``transfer``, ``list``."""
    return f"{ROOT}.{SYSTEM}.lease.{_verb(verb)}"


def node_lease(node_name: str, verb: str) -> str:
    """Request/reply from a node to the broker about leases on its own: ``grant``, ``release``."""
    return f"{ROOT}.{SYSTEM}.node_lease.{validate_node(node_name)}.{_verb(verb)}"


FIND_WAITING: Final = f"{ROOT}.{SYSTEM}.waiting.find"
"""Request to every scheduler: whoever has what waits answers."""

WAITING_REPORTS: Final = f"{ROOT}.{SYSTEM}.waiting.report"
"""Event: what goes first at a scheduler."""


def instance_report(node_name: str) -> str:
    """Request/reply from a node to any scheduler: which instances of agents began and ended."""
    return f"{ROOT}.{SYSTEM}.instances.{validate_node(node_name)}"


INSTANCE_REPORTS: Final = f"{ROOT}.{SYSTEM}.instances.*"


ROLLOUT_SYSTEM_VERBS: Final = ("report", "step", "await", "inspect")


def rollout_system(project: str, rollout_id: ScopedId, verb: str) -> str:
    """Request/reply from a sandbox's node to the rollout's shard: :data:`ROLLOUT_SYSTEM_VERBS`.

    The project is the sandbox's own, known to the node, and the shard's owner checks that the
    rollout belongs to it.
    """
    return (
        f"{ROOT}.{SYSTEM}.rollout.{validate_project(project)}."
        f"{validate_node(rollout_id.owner)}.{validate_local(rollout_id.local)}.{_verb(verb)}"
    )


def group_system(project: str, shard: str, verb: str) -> str:
    """Request/reply from a Chronus to a shard's owner about a group: ``take``, ``open``."""
    return f"{ROOT}.{SYSTEM}.group.{validate_project(project)}.{validate_node(shard)}.{_verb(verb)}"


def shard_taken(shard: str) -> str:
    """Event for nodes: a shard of Chronus has a new owner."""
    return f"{ROOT}.{SYSTEM}.shard.{validate_node(shard)}.taken"


def is_to_shard(subject: str, shard: str) -> bool:
    """Return whether a subject is a node's request to this shard (see :func:`rollout_system`)."""
    tokens = subject.split(".")
    return tokens[2:4] == [SYSTEM, "rollout"] and tokens[5:6] == [shard]


SHARDS_TAKEN: Final = f"{ROOT}.{SYSTEM}.shard.*.taken"


def rollout_journal(shard: str) -> str:
    """JetStream: the write-ahead log of one Chronus shard."""
    return f"{ROOT}.{SYSTEM}.journal.{validate_node(shard)}"


ROLLOUT_JOURNALS: Final = f"{ROOT}.{SYSTEM}.journal.*"


# --- Patterns that services subscribe to ----------------------------------------------------------


def any_project(verb_tail: str) -> str:
    """Return the pattern of ``verb_tail`` (such as ``sandbox.create``) for every project."""
    pattern = f"{ROOT}.*.{verb_tail}"
    if pattern not in USER_SERVICES:
        raise DsecError(ErrorCode.INTERNAL, f"{pattern} is not a subject that projects may ask")
    return pattern


def any_project_sandbox(node_name: str, verb: str) -> str:
    """Return the pattern of requests to this node's sandboxes, of every project."""
    return f"{ROOT}.*.sandbox.{validate_node(node_name)}.*.{_verb(verb)}"


def any_node_lease(verb: str) -> str:
    """Return the pattern of :func:`node_lease` for every node."""
    return f"{ROOT}.{SYSTEM}.node_lease.*.{_verb(verb)}"


def any_project_layer(node_name: str, verb: str) -> str:
    """Return the pattern of requests to this node's layer store, of every project."""
    return f"{ROOT}.*.layer.{validate_node(node_name)}.{_verb(verb)}"


def any_project_snapshot(node_name: str, verb: str) -> str:
    """Return the pattern of requests about this node's snapshots, of every project."""
    return f"{ROOT}.*.snapshot.{validate_node(node_name)}.{_verb(verb)}"


def any_project_rollout(shard: str, verb: str) -> str:
    """Return the pattern of trainers' requests to this shard, of every project."""
    return f"{ROOT}.*.rollout.{validate_node(shard)}.*.{_verb(verb)}"


def any_system_rollout(shard: str, verb: str) -> str:
    """Return the pattern of nodes' requests to this shard."""
    return f"{ROOT}.{SYSTEM}.rollout.*.{validate_node(shard)}.*.{_verb(verb)}"


def any_project_group(shard: str, verb: str) -> str:
    """Return the pattern of trainers' requests about groups to this shard, of every project."""
    return f"{ROOT}.*.group.{validate_node(shard)}.{_verb(verb)}"


def any_system_group(shard: str, verb: str) -> str:
    """Return the pattern of what another Chronus asks of this shard about groups."""
    return f"{ROOT}.{SYSTEM}.group.*.{validate_node(shard)}.{_verb(verb)}"


def project_of(subject: str) -> str:
    """Return the project that a user-facing subject was sent by.

    The account's import put it there, so it is the connection's own.

    Raises:
        DsecError: ``invalid`` when the subject is not a project's.
    """
    tokens = subject.split(".")
    if len(tokens) < 4 or ".".join(tokens[:2]) != ROOT or tokens[2] == SYSTEM:  # noqa: PLR2004  root, version, project, verb
        raise invalid(f"{subject!r} is not a project's subject")
    return validate_project(tokens[2])


def scoped_id_of(subject: str) -> ScopedId:
    """Return the sandbox or rollout id in ``dsec.v1.<project>.<thing>.<owner>.<local>.<verb>``."""
    tokens = subject.split(".")
    if len(tokens) != 7:  # noqa: PLR2004  the seven tokens above
        raise invalid(f"{subject!r} names no sandbox and no rollout")
    return ScopedId(validate_node(tokens[4]), validate_local(tokens[5]))


def system_rollout_of(subject: str) -> tuple[str, ScopedId]:
    """Return project and rollout id of a node's request to a shard (see :func:`rollout_system`)."""
    tokens = subject.split(".")
    if len(tokens) != 8:  # noqa: PLR2004  dsec v1 _sys rollout project shard local verb
        raise invalid(f"{subject!r} names no rollout")
    return validate_project(tokens[4]), ScopedId(
        validate_node(tokens[5]), validate_local(tokens[6])
    )


def system_group_of(subject: str) -> str:
    """Return the project of a request about a group to a shard (see :func:`group_system`)."""
    tokens = subject.split(".")
    if len(tokens) != 7:  # noqa: PLR2004  dsec v1 _sys group project shard verb
        raise invalid(f"{subject!r} names no group's project")
    return validate_project(tokens[4])
