"""Node providers: where nodes come from when the cluster's own do not do.

A provider is a factory under the entry point group ``dsec.node_providers``; it takes the settings
of ``node_provider_settings`` and returns a :class:`NodeProvider`. Its nodes say in their
heartbeats, by the label ``provider``, whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Final, Protocol, TypeAlias, TypeVar

import msgspec

from dsec_common.errors import DsecError, invalid

GROUP: Final = "dsec.node_providers"

S = TypeVar("S", bound=msgspec.Struct)


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider is to bring about.

    Attributes:
        wanted: how many of its nodes there are to be, those that leave not counted.
        leaving: nodes that have nothing to do, take nothing any more, and are to be ended.
        fence: grows with every broker that gives orders; an order with a smaller one is an old
            broker's.
    """

    wanted: int
    leaving: tuple[str, ...] = ()
    fence: int = 0


class NodeProvider(Protocol):
    """Starts and ends nodes.

    Life: made by its factory, which refuses wrong settings; asked :meth:`may_leave` and told
    :meth:`scale` any number of times, one after the other; closed once. Its nodes outlive it, and
    the next provider with the same settings, perhaps in another broker, knows them.
    """

    def may_leave(self, nodes: Collection[str], idle: Collection[str]) -> Sequence[str]:
        """Return which idle nodes can be ended now, the first to go first.

        Args:
            nodes: the names of all of this provider's nodes that live.
            idle: those of them that have had nothing to do for a while.
        """
        ...

    async def scale(self, order: Order) -> None:
        """Have ``order.wanted`` nodes run or start, and end those that leave; no others.

        Idempotent: the same order again changes nothing. It need not wait until a node runs.

        Raises:
            DsecError: what failed; the order is given again later.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; nodes live on."""
        ...


Factory: TypeAlias = Callable[[Mapping[str, str]], NodeProvider]


def open_provider(name: str, settings: Mapping[str, str]) -> NodeProvider:
    """Return the provider of this name.

    Raises:
        DsecError: ``invalid`` when there is none, or it refuses its settings.
    """
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise invalid(f"there is no node provider {name!r}; installed: {known}")
    factory: Factory = found[name].load()
    return factory(settings)


def settings_of(kind: type[S], settings: Mapping[str, str], provider: str) -> S:
    """Return a provider's settings, checked whole.

    Raises:
        DsecError: ``invalid``, naming the setting.
    """
    try:
        return msgspec.convert(dict(settings), kind, strict=False)
    except (msgspec.ValidationError, DsecError) as error:
        raise invalid(f"node_provider_settings of {provider!r} are not valid: {error}") from error
