"""A base layer that Inspect's own checks can run in: the host's shell, and Debian's adduser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from dsec.rootfs import build_host_rootfs

#: What Debian's ``adduser``, a Perl program, calls; and what the checks call beside it.
PROGRAMS: Final = (
    *("perl", "ps", "getent", "useradd", "userdel", "usermod", "groupadd", "groupdel", "gpasswd"),
    *("passwd", "chfn", "chage"),
)
PACKAGES: Final = ("adduser", "perl-base")
_WANTED: Final = ("/usr/sbin/", "/usr/share/perl5/", "/usr/lib/", "/etc/adduser.conf")


def build_inspect_rootfs(destination: Path) -> None:
    """Make the tree; what Perl needs of its own is taken from the host's packages."""
    build_host_rootfs(destination, python=True, programs=PROGRAMS)
    for package in PACKAGES:
        listed = subprocess.run(
            ["dpkg", "-L", package], check=True, capture_output=True, text=True
        ).stdout
        for line in listed.splitlines():
            source = Path(line)
            if line.startswith(_WANTED) and source.is_file():
                target = destination / line.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=True)
    # Accounts without passwords: adduser leaves the fields locked.
    (destination / "etc/shadow").write_text("root:*:19000:0:99999:7:::\n")
    (destination / "etc/gshadow").touch()
    (destination / "etc/login.defs").write_text("UID_MIN 1000\nGID_MIN 1000\n")
    (destination / "etc/skel").mkdir(exist_ok=True)
    _permit_root(destination)
    (destination / "etc/shells").write_text("/bin/sh\n")


def _permit_root(destination: Path) -> None:
    """Let ``chfn``, which asks PAM, do what root asks of it."""
    module = next(Path("/usr/lib").glob("*/security/pam_permit.so"))
    target = destination / str(module).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(module, target)
    (destination / "etc/pam.d").mkdir(exist_ok=True)
    (destination / "etc/pam.d/other").write_text(
        "".join(f"{kind} required pam_permit.so\n" for kind in ("auth", "account", "session"))
    )
