"""What a project is told of its layers: one of them, or a page. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dsec_common.wire.layer import (
    LAYERS_PAGE_MAX,
    LayerInfo,
    LayerList,
    LayerMeaning,
    ListLayers,
)
from dsec_sandboxd.errors import invalid_field
from dsec_sandboxd.layers.records import Layer


def layer_info(layer: Layer, node: str, cause_id: str) -> LayerInfo:
    """Return all that is known of a layer in the store of ``node``."""
    return LayerInfo(
        cause_id=cause_id,
        reference=layer.reference,
        digest=layer.digest,
        kind=layer.kind,
        size_bytes=layer.size_bytes,
        created_at=layer.created_at,
        entries=layer.entries,
        nodes=(node,),
        tags=layer.tags,
        source_digest=layer.source_digest,
        history=tuple(
            LayerMeaning(at=before.at, digest=before.meaning) for before in layer.history
        ),
        defaults=layer.defaults,
    )


def page_of(layers: Sequence[Layer], node: str, store_id: str, asked: ListLayers) -> LayerList:
    """Return the page that ``asked`` wants of a project's ``layers``, sorted by reference.

    Raises:
        DsecError: ``invalid`` for a limit below 1.
    """
    if asked.limit < 1:
        raise invalid_field("limit", f"{asked.limit}; ask for at least 1")
    wanted = [
        layer for layer in layers if layer.reference > asked.after and _is_wanted(layer, asked)
    ]
    page = wanted[: min(asked.limit, LAYERS_PAGE_MAX)]
    return LayerList(
        cause_id=asked.message_id,
        layers=tuple(
            msgspec.structs.replace(layer_info(layer, node, asked.message_id), history=())
            for layer in page
        ),
        store_id=store_id,
        next_after=page[-1].reference if len(page) < len(wanted) else "",
    )


def _is_wanted(layer: Layer, asked: ListLayers) -> bool:
    prefix = asked.name.removesuffix("*")
    named = layer.name.startswith(prefix) if asked.name.endswith("*") else layer.name == prefix
    return (
        (named or not asked.name)
        and asked.kind in {None, layer.kind}
        and (not asked.tag or asked.tag in layer.tags)
    )
