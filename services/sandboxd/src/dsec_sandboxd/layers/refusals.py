"""What is said of references that do not do, with what may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Final

from dsec_common.errors import DsecError, ErrorCode, not_found
from dsec_sandboxd.layers.names import DigestReference, NamedReference, TagReference
from dsec_sandboxd.layers.records import ReferenceRecord

_NAMES_SHOWN_MAX: Final = 20


def unknown(
    project: str,
    wanted: NamedReference | TagReference | DigestReference,
    known: Sequence[NamedReference],
    tags: Iterable[str] = (),
) -> DsecError:
    """Return the error for a reference that ``project`` does not have, or that names no version.

    ``tags`` are those of the wanted name.
    """
    if isinstance(wanted, DigestReference):
        return not_found(
            f"the project {project} has no layer with the digest {wanted}; import it, or name one "
            "that `dsec layer list` shows",
            reference=str(wanted),
        )
    versions = [reference.version for reference in known if reference.name == wanted.name]
    offered = ", ".join(
        [*versions[-_NAMES_SHOWN_MAX:], *(f":{tag}" for tag in sorted(tags)[:_NAMES_SHOWN_MAX])]
    )
    if versions and isinstance(wanted, NamedReference) and not wanted.version:
        return DsecError(
            ErrorCode.INVALID,
            f"the layer reference {wanted} has no version; the project {project} has it in: "
            f"{offered}",
            details={"reference": str(wanted)},
        )
    if versions:
        hint = f"it has {wanted.name} in: {offered}"
    else:
        names = {reference.name for reference in known}
        close = difflib.get_close_matches(wanted.name, names, n=3)
        similar = [str(reference) for reference in known if reference.name in close]
        hint = (
            f"did you mean {' or '.join(similar[:_NAMES_SHOWN_MAX])}?"
            if similar
            else "import it first with `dsec layer import`"
        )
    return not_found(f"the project {project} has no layer {wanted}; {hint}", reference=str(wanted))


def conflict(
    project: str, reference: NamedReference, standing: ReferenceRecord, wanted: ReferenceRecord
) -> DsecError:
    """Return the error for a reference that means something else already."""
    differs = (
        f"other content ({standing.digest})"
        if standing.digest != wanted.digest
        else f"the kind {standing.kind}"
        if standing.kind is not wanted.kind
        else "other variables, directory or user for commands"
    )
    return DsecError(
        ErrorCode.CONFLICT,
        f"{reference} exists in the project {project} with {differs}; choose another version, or "
        "replace it",
        details={"reference": str(reference), "digest": standing.digest, "kind": standing.kind},
    )


def tagged(reference: NamedReference, tags: Sequence[str]) -> DsecError:
    """Return the error for the removal of a version that tags mean."""
    named = ", ".join(f"{reference.name}:{tag}" for tag in tags)
    return DsecError(
        ErrorCode.CONFLICT,
        f"{named} means {reference}; move or remove the tag first",
        details={"reference": str(reference), "tags": ",".join(tags)},
    )


def several_names(digest: DigestReference) -> DsecError:
    """Return the error for the removal of a digest."""
    return DsecError(
        ErrorCode.INVALID,
        f"{digest} may have several names; remove a layer by its name@version",
    )


def lost_image(reference: NamedReference, digest: str) -> DsecError:
    """Return the error for a reference whose image is gone."""
    return DsecError(
        ErrorCode.LAYER_ERROR,
        f"the image of the layer {reference} is gone from the store; import it again",
        details={"reference": str(reference), "digest": digest},
    )
