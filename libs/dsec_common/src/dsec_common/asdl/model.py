"""The agent contract (ASDL): every field, its kind, and what it is for.

This is the one list of what a contract may say. What reads contracts, the published JSON Schema
and the checks follow from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from dsec_common.asdl import checks
from dsec_common.asdl.kinds import (
    Choice,
    Flag,
    ListOf,
    Number,
    Permission,
    SchemaOf,
    Share,
    Table,
    Template,
    Text,
    Version,
)
from dsec_common.asdl.units import Duration, RateLimit
from dsec_common.compute.model import COUNT_MAX
from dsec_common.compute.units import UNITS_MAX
from dsec_common.wire.agent import NETWORK_ACCESS, validate_version
from dsec_common.wire.consistency import DEPENDENCIES_MAX, DEPENDENCY, validate_dependency
from dsec_common.wire.network import NetworkPolicy
from dsec_common.wire.tools import Rate

READ_FILE: Final = "read_file"
WRITE_FILE: Final = "write_file"
RUN_COMMAND: Final = "run_command"

PERMISSIONS: Final = (NETWORK_ACCESS, READ_FILE, WRITE_FILE, RUN_COMMAND)
"""The built-in permissions; a plug-in's own have a dot in their names."""

ATTEMPTS_MAX: Final = 100
"""Executions of one step, those that failed included."""

MEMORY_MIN_MB: Final = 4
MEMORY_MAX_MB: Final = 16 * 1024 * 1024
TIMEOUT_MAX_S: Final = 30 * 86_400
_TOKENS_MAX: Final = 100_000_000
USUAL_JITTER: Final = 0.1
_TOOLKITS_MAX: Final = 62

_CU_MAX: Final = COUNT_MAX * UNITS_MAX
_LAYER: Final = Text("A layer: name@version, name:tag or sha256:….", most=512)


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the agent uses, and what it may do with it."""

    tool: Annotated[str, Text("The tool's name, such as http_client.", most=128)]
    permissions: Annotated[
        tuple[str, ...],
        ListOf(
            "What the tool may do; without network_access the agent has no network.",
            Permission("", PERMISSIONS),
            most=64,
        ),
    ] = ()
    model: Annotated[str, Text("The model that the tool asks.", most=256)] = ""
    max_tokens: Annotated[
        int | None,
        Number(
            "Tokens that one answer of the model has at most.",
            least=1,
            most=_TOKENS_MAX,
            whole=True,
        ),
    ] = None
    temperature: Annotated[float | None, Number("Of the model's answers.", least=0, most=2)] = None
    rate_limit: Annotated[
        Rate | None, RateLimit("Calls of the tool in a time, such as 10req/min.")
    ] = None


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance is given."""

    min_cu: Annotated[
        float | None,
        Number(
            "Compute Units of GPUs without which it is of no use.",
            least=0,
            most=_CU_MAX,
            above=True,
        ),
    ] = None
    max_cu: Annotated[
        float | None,
        Number("Compute Units of GPUs that it can use at most.", least=0, most=_CU_MAX, above=True),
    ] = None
    memory_mb: Annotated[
        int | None,
        Number(
            "Memory in MiB, the writable layer included.",
            least=MEMORY_MIN_MB,
            most=MEMORY_MAX_MB,
            whole=True,
        ),
    ] = None


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How an execution that failed is tried again."""

    max_attempts: Annotated[
        int, Number("Executions in all; 1 is no retry.", least=1, most=ATTEMPTS_MAX, whole=True)
    ] = 1
    backoff: Annotated[
        Literal["exponential", "fixed"],
        Choice(
            "Whether each wait is twice the last, or all are the same.", ("exponential", "fixed")
        ),
    ] = "exponential"
    jitter: Annotated[
        float,
        Share("The share by which a wait is longer or shorter at random, 0 to 1.", USUAL_JITTER),
    ] = USUAL_JITTER


class Lifecycle(msgspec.Struct, frozen=True, kw_only=True):
    """How long an execution may take, and what becomes of one that fails."""

    timeout: Annotated[
        float | None,
        Duration("How long one execution may take, such as 120s.", most_s=TIMEOUT_MAX_S),
    ] = None
    retry_policy: Annotated[
        RetryPolicy, Table("How an execution that failed is tried again.", RetryPolicy)
    ] = RetryPolicy()
    graceful_shutdown: Annotated[
        bool,
        Flag(
            "Whether an instance whose time is over is given a few seconds to release what it "
            "holds before it is ended."
        ),
    ] = True


class LayersOf(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of an instance whose request names none."""

    base: Annotated[str, _LAYER] = ""
    workspace: Annotated[str, _LAYER] = ""
    toolkits: Annotated[
        tuple[str, ...], ListOf("On top of those of the request.", _LAYER, most=_TOOLKITS_MAX)
    ] = ()


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent can do, what it needs, and what it may do.

    Attributes:
        capabilities: None when nothing is said of them: then who creates an instance decides on
            its network.
    """

    name: Annotated[
        str,
        Text(
            "The agent's name: lower-case ASCII letters, digits, _ and -; it is part of subjects "
            "and keys.",
            check=checks.check_name,
            pattern="^[a-z0-9][a-z0-9_-]{0,62}$",
            most=63,
        ),
    ] = ""
    version: Annotated[
        str,
        Version("The version, as it is written, such as 1.10.", check=validate_version, most=63),
    ] = ""
    description: Annotated[str, Text("What the agent is for, in any language.")] = ""
    capabilities: Annotated[
        tuple[Capability, ...] | None,
        ListOf(
            "The agent's tools.",
            Table("A tool that the agent uses.", Capability, checks.check_capability),
            most=checks.CAPABILITIES_MAX,
        ),
    ] = None
    resources: Annotated[
        Resources, Table("What an instance is given.", Resources, checks.check_resources)
    ] = Resources()
    lifecycle: Annotated[
        Lifecycle, Table("How long it may take, and what becomes of a failure.", Lifecycle)
    ] = Lifecycle()
    state_key_prefix: Annotated[
        str,
        Template(
            "How keys of its state begin: {agent_type} is its name, {shard_id} spreads them.",
            ("agent_type", "shard_id"),
            most=256,
        ),
    ] = ""
    input: Annotated[dict[str, Any] | None, SchemaOf("JSON Schema of what it reads.")] = None
    output: Annotated[dict[str, Any] | None, SchemaOf("JSON Schema of what it prints.")] = None
    command: Annotated[
        tuple[str, ...],
        ListOf("Program and arguments of one execution.", Text(), least=1, most=1024),
    ] = ()
    depends_on: Annotated[
        tuple[str, ...],
        ListOf(
            "What an instance's state is made of and others change: databases, APIs, other "
            "agents' outputs.",
            Text(
                "A dependency, such as orders-db.",
                check=validate_dependency,
                pattern=DEPENDENCY.pattern,
                most=63,
            ),
            most=DEPENDENCIES_MAX,
        ),
    ] = ()
    synchronise: Annotated[
        tuple[str, ...],
        ListOf(
            "Program and arguments that take over what is new of depends_on; they read the "
            "versions as JSON.",
            Text(),
            least=1,
            most=1024,
        ),
    ] = ()
    layers: Annotated[LayersOf, Table("The layers of its instances.", LayersOf)] = LayersOf()
    network: Annotated[
        NetworkPolicy | None,
        checks.NetworkKind(
            "What may be reached with network_access: open (all of it, which is meant without "
            "this), none, or a table with allow, deny and sets of rules."
        ),
    ] = None

    @property
    def permissions(self) -> tuple[str, ...]:
        """What all capabilities need, each once."""
        every = (one for it in self.capabilities or () for one in it.permissions)
        return tuple(dict.fromkeys(every))


CONTRACT: Final = Table("", Contract, checks.check_contract)
"""How a contract is read, as a whole."""
