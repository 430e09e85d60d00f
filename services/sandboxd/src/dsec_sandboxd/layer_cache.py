"""What references mean, remembered for as long as no reference has changed."""

from __future__ import annotations

from typing import Final, Protocol

from dsec_common.errors import invalid
from dsec_common.wire.layer import LayerKind
from dsec_common.wire.sandbox import CreateSandbox
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

    async def asked(self, project: str, request: CreateSandbox) -> tuple[Layer, ...]:
        """Return the layers that a project's request means now, lowest first.

        Raises:
            DsecError: ``not_found`` or ``layer_error`` for a layer; ``invalid`` for one of another
                kind, or one that is named twice.
        """
        wanted = [(request.base, LayerKind.BASE)]
        if request.workspace:
            wanted.append((request.workspace, LayerKind.WORKSPACE))
        wanted += [(toolkit, LayerKind.TOOLKIT) for toolkit in request.toolkits]
        layers = await self.resolve(project, [reference for reference, _ in wanted])
        for layer, (_, kind) in zip(layers, wanted, strict=True):
            # Data is mounted as a toolkit is: one more layer on top.
            data = kind is LayerKind.TOOLKIT and layer.kind is LayerKind.DATA
            if layer.kind is not kind and not data:
                raise invalid(
                    f"layer {layer.reference} is a {layer.kind.value}, not a {kind.value}; name it "
                    f"as the {layer.kind.value}",
                    field=kind.value,
                    reference=layer.reference,
                )
        digests = [layer.digest for layer in layers]
        if len(set(digests)) != len(digests):
            raise invalid("the same layer is named twice; name each once", field="toolkits")
        return tuple(layers)
