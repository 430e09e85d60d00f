"""The typed errors of file operations that a sandbox refused."""

from __future__ import annotations

import errno
import os
from typing import Final

from dsec_common.errors import DsecError, ErrorCode, invalid
from dsec_sandboxd.kernel.protocol import step_name
from dsec_sandboxd.kernel.spawner import creation_error

_PATH_BYTES_MAX: Final = 4095


def check_path(path: str) -> None:
    """Refuse what can never name a file of a sandbox.

    Raises:
        DsecError: ``invalid`` with reason ``invalid_path``.
    """
    size = len(os.fsencode(path))
    if not path.startswith("/") or "\0" in path or size > _PATH_BYTES_MAX:
        raise invalid(
            f"{path[:200]!r} is not an absolute path of at most {_PATH_BYTES_MAX} bytes",
            reason="invalid_path",
        )


_FILE_CODES: Final = {
    errno.ENOENT: ErrorCode.NOT_FOUND,
    errno.ENOTDIR: ErrorCode.NOT_FOUND,
    errno.EACCES: ErrorCode.DENIED,
    errno.EPERM: ErrorCode.DENIED,
    errno.EROFS: ErrorCode.DENIED,
    errno.EEXIST: ErrorCode.CONFLICT,
    errno.ENOTEMPTY: ErrorCode.CONFLICT,
    errno.ENOSPC: ErrorCode.EXHAUSTED,
    errno.ENOMEM: ErrorCode.EXHAUSTED,
    errno.EAGAIN: ErrorCode.EXHAUSTED,
    errno.EDQUOT: ErrorCode.EXHAUSTED,
    errno.EMFILE: ErrorCode.EXHAUSTED,
    errno.ESTALE: ErrorCode.CONFLICT,
    errno.EBUSY: ErrorCode.DENIED,
    errno.EBADMSG: ErrorCode.INVALID,
    errno.EOPNOTSUPP: ErrorCode.INVALID,
    errno.EISDIR: ErrorCode.INVALID,
    errno.ELOOP: ErrorCode.INVALID,
    errno.ENAMETOOLONG: ErrorCode.INVALID,
    errno.EINVAL: ErrorCode.INVALID,
    errno.EXDEV: ErrorCode.INVALID,
    errno.ENXIO: ErrorCode.INVALID,
}
_INVALID_REASONS: Final = {
    errno.EISDIR: "is_directory",
    errno.ENXIO: "not_a_file",
    errno.EBADMSG: "invalid_archive",
    errno.EOPNOTSUPP: "invalid_archive",
}
_INVALID_WORDS: Final = {
    "is_directory": "is a directory; name a file",
    "not_a_file": "is no regular file; only those are read and written",
    "invalid_archive": "cannot be taken from this stream: it is no whole tar archive, or holds "
    "what is no file, directory or link",
    "invalid_path": "is not a possible path; check its length, names and links",
}


def file_error(path: str, user: str, step: int, error: int) -> DsecError:
    """Return the typed error for a file operation that the sandbox refused."""
    operation = step_name(step)
    base = creation_error(step, error)
    code = _FILE_CODES.get(error, ErrorCode.INTERNAL)
    if operation == "file_child_died":
        code, extra = ErrorCode.UNAVAILABLE, {"what": "path"}
        said = f"{path!r}: a process in the sandbox ended the operation: try again"
    elif operation == "file_user":
        said, extra = f"the user {user!r} is not known in the sandbox", {"what": "user"}
    elif operation == "file_rename" and error == errno.EXDEV:
        # Overlayfs does not rename directories of lower layers, and nothing is renamed over mounts.
        code, extra = ErrorCode.UNSUPPORTED, {"reason": "across_layers"}
        said = (
            f"{path!r} is a directory of a layer, or the target is on another mount, so it cannot "
            "be moved in one step: copy it with a command and delete the old one"
        )
    elif code is ErrorCode.INVALID:
        reason = _INVALID_REASONS.get(error, "invalid_path")
        reason = "not_a_file" if operation == "file_kind" and error == errno.EINVAL else reason
        said, extra = f"{path!r} {_INVALID_WORDS[reason]}", {"reason": reason}
    else:
        said, extra = f"{path!r}: {os.strerror(error)}", {"what": "path"}
    return DsecError(code, said, details={**base.details, **extra, "path": path})
