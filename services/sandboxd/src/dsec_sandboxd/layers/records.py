"""What the store writes down, and what it hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dsec_common.errors import DsecError, ErrorCode
from dsec_common.wire.layer import LayerKind

if TYPE_CHECKING:
    from pathlib import Path

_T = TypeVar("_T")


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Beside an image: what it must be. ``entries`` counts inodes."""

    size_bytes: int
    entries: int
    created_at: float


class ReferenceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A project's reference: which image, in which role, and where it came from.

    The role belongs to the reference, since one content may be a workspace here and a toolkit
    there.
    """

    digest: str
    kind: LayerKind
    created_at: float
    source_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer as a project sees it.

    Attributes:
        project: whose reference it is.
        name: the reference's name.
        version: its version.
        digest: ``sha256:…`` of the image file.
        kind: the role that it was imported for.
        size_bytes: size of the image file.
        entries: files, directories and links in it; hard links count once.
        created_at: when the reference was made or last replaced, Unix time in seconds.
        source_digest: digest of the archive file or of the image's manifest; empty for a directory.
        image_path: the image file; never written to again.
    """

    project: str
    name: str
    version: str
    digest: str
    kind: LayerKind
    size_bytes: int
    entries: int
    created_at: float
    source_digest: str
    image_path: Path

    @property
    def reference(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedLayer:
    """The outcome of an import: the layer, and what was changed on its way in, in sentences."""

    layer: Layer
    warnings: tuple[str, ...] = ()


def read_record(path: Path, record_type: type[_T]) -> _T | None:
    """Return the record at ``path``, or ``None`` when there is none.

    Raises:
        DsecError: ``layer_error`` when it is not readable as one.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=record_type)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise DsecError(
            ErrorCode.LAYER_ERROR,
            f"the layer store's record {path.name} is damaged ({error}); import that layer again "
            "with replace",
        ) from None
