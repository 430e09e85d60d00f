"""What of a layer's import is said in the request, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable

from dsec_common.errors import invalid
from dsec_common.wire.layer import GitHistory, ImportLayer, LayerKind


def import_request(
    kind: LayerKind | str,
    name: str,
    version: str,
    tags: Iterable[str],
    *,
    replace: bool,
    left_out: tuple[Iterable[str], bool, GitHistory | str | None] = ((), False, None),
) -> ImportLayer:
    """Return the request; what is uploaded is named in it later.

    Raises:
        DsecError: ``invalid``.
    """
    exclude, clean, git = left_out
    for what, texts in (("tags", tags), ("exclude", exclude)):
        if isinstance(texts, str):
            raise invalid(f"{what} is a list, not the text {texts!r}")
    return ImportLayer(
        upload_id="",
        size_bytes=0,
        sha256="",
        kind=layer_kind(kind),
        name=name,
        version=version,
        replace=replace,
        tags=tuple(tags),
        exclude=tuple(exclude),
        clean=clean,
        git=None if git is None else _git(git),
    )


def layer_kind(kind: LayerKind | str) -> LayerKind:
    """Return the kind that is meant.

    Raises:
        DsecError: ``invalid``.
    """
    try:
        return LayerKind(kind)
    except ValueError:
        known = ", ".join(LayerKind)
        raise invalid(f"{kind!r} is not a kind of layer; use one of {known}") from None


def _git(git: GitHistory | str) -> GitHistory:
    try:
        return GitHistory(git)
    except ValueError:
        known = ", ".join(GitHistory)
        raise invalid(f"git={git!r} is not known; use one of {known}") from None
