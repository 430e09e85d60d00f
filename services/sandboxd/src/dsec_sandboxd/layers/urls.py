"""How a node's settings name a layer store. No I/O."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from dsec_common.accounts_permissions import LAYERS_BUCKET
from dsec_common.errors import invalid

_FORMS: Final = f"dir:/path, nats:{LAYERS_BUCKET} or s3://bucket/prefix"
S3_OPTIONS: Final = frozenset({"endpoint", "region", "virtual_hosted_style"})


def store_url(backend: str, directory: Path) -> str:
    """Return the URL of a store: ``backend`` if it is given, else the directory's."""
    return backend or f"dir:{directory.absolute()}"


def check_url(url: str) -> None:
    """Return if ``url`` names a back end.

    Raises:
        DsecError: ``invalid`` otherwise.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "dir" and Path(rest).is_absolute():
        return
    if scheme == "nats" and rest:
        return
    if scheme == "s3":
        s3_options(url)
        return
    raise invalid(f"{url!r} is not a layer store: write {_FORMS}")


def s3_options(url: str) -> dict[str, str]:
    """Return what follows the question mark of a bucket's URL.

    Raises:
        DsecError: ``invalid`` when it is none, or has options that are not :data:`S3_OPTIONS`.
    """
    parts = urlsplit(url)
    options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    if parts.scheme != "s3" or not parts.netloc or options.keys() - S3_OPTIONS:
        raise invalid(
            f"{url!r} is not a bucket's URL: write s3://bucket/prefix, and after a question mark "
            f"any of {', '.join(sorted(S3_OPTIONS))}"
        )
    return options
