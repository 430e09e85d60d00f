"""What references mean, remembered for as long as no reference has changed."""

from __future__ import annotations

from typing import Final, Protocol

from dsec_sandboxd.layers.records import Layer

_REMEMBERED_MAX: Final = 4096


class LayerSource(Protocol):
    """The part of the layer store that is asked."""

    @property
    def references_version(self) -> str:
        """Another token after every change of any reference, by whatever node."""
        ...

    async def resolve(self, project: str, reference: str) -> Layer:
        """Return the layer that a project means."""
        ...


class LayerCache:
    """Resolves references with one look at the store for a whole creation.

    An answer is as fresh as the store's own: any change of a reference, by whatever node, drops
    what is remembered. The image of a remembered layer is not looked at again; a mount does that.
    """

    def __init__(self, store: LayerSource) -> None:
        self._store = store
        self._version = ""
        self._known: dict[tuple[str, str], Layer] = {}

    async def resolve(self, project: str, references: list[str]) -> list[Layer]:
        """Return the layers that a project means, in the order of ``references``.

        Raises:
            DsecError: as the store's ``resolve``, for the first that cannot be.
        """
        version = self._store.references_version
        if version != self._version or len(self._known) > _REMEMBERED_MAX:
            self._known.clear()
            self._version = version
        layers = []
        for reference in references:
            layer = self._known.get((project, reference))
            if layer is None:
                layer = await self._store.resolve(project, reference)
                if version == self._version:
                    self._known[project, reference] = layer
            layers.append(layer)
        return layers
