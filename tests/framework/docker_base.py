"""A base image made of this machine's own Debian packages, for where no registry can be reached.

It holds what the Dockerfile would fetch otherwise, and how this machine's pip finds its index
(configuration, certificates, environment), which is nobody else's business and stays in the cache.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Final

PACKAGES: Final = (
    *("base-files", "bash", "ca-certificates", "coreutils", "dash", "erofs-utils", "findutils"),
    *("gcc", "grep", "libc-bin", "libc6-dev", "linux-libc-dev", "make", "python3", "python3-venv"),
    *("sed", "tar", "util-linux"),
)
_LEFT_OUT: Final = re.compile(r"/usr/share/(doc|man|info|locale|lintian|bug|icons)/.+")
_DIRECTORIES: Final = {
    **dict.fromkeys(("dev", "etc", "home", "opt", "proc", "run", "sys", "var/lib"), 0o755),
    **dict.fromkeys(("tmp", "var/tmp"), 0o1777),
    "root": 0o700,
}
_USERS: Final = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "",
    "etc/resolv.conf": "",
}
#: How pip finds its index here: files that are in no package, and variables.
_PIP_FILES: Final = ("/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf")
_PIP_VARIABLES: Final = re.compile(
    r"PIP_.*|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|(https?|no)_proxy", re.IGNORECASE
)


class BaseUnavailableError(Exception):
    """This machine cannot give a base image; the message says what is missing."""


class BaseImage:
    """What goes into the image; :attr:`digest` changes when any of it does."""

    def __init__(self) -> None:
        self.packages = _closure(PACKAGES)
        self.environment = {
            name: value for name, value in os.environ.items() if _PIP_VARIABLES.fullmatch(name)
        }
        self.files = _pip_files(self.environment)
        told = hashlib.sha256(Path(__file__).read_bytes())
        for name, version in sorted(self.packages.items()):
            told.update(f"{name}={version}\n".encode())
        for name, value in sorted(self.environment.items()):
            told.update(f"{name}={value}\n".encode())
        for path in self.files:
            told.update(b"%s\n%s\n" % (os.fsencode(path), path.read_bytes()))
        self.digest = told.hexdigest()[:16]

    def changes(self) -> list[str]:
        """Return what ``docker import --change`` is told."""
        quoted = {
            name: value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
            for name, value in self.environment.items()
        }
        return [f'ENV {name}="{value}"' for name, value in quoted.items()]

    def write(self, stream: IO[bytes]) -> None:
        """Write the root file system as a tar archive."""
        with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as archive:
            for link in ("/bin", "/sbin", "/lib", "/lib64"):
                if Path(link).is_symlink():
                    archive.add(link, recursive=False)
            for name, mode in _DIRECTORIES.items():
                member = tarfile.TarInfo(name)
                member.type, member.mode = tarfile.DIRTYPE, mode
                archive.addfile(member)
            for name, text in _USERS.items():
                member = tarfile.TarInfo(name)
                member.mode, member.size = 0o644, len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
            made = {f"/{name}" for name in (*_DIRECTORIES, *_USERS)}
            paths = _package_files(self.packages) | {str(path) for path in self.files}
            for path in sorted(paths - made):
                archive.add(path, recursive=False, filter=_owned_by_root)


def _closure(wanted: Iterable[str]) -> dict[str, str]:
    """Return these installed packages and all that they depend on, with their versions."""
    form = "${Status}\t${Package}\t${binary:Package}\t${Version}\t${Provides}\t${Pre-Depends}, "
    try:
        listed = subprocess.run(
            ["dpkg-query", "--show", f"--showformat={form}${{Depends}}\n"],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BaseUnavailableError(f"this machine has no Debian packages: {error}") from error
    installed: dict[str, list[str]] = {}
    providers: dict[str, str] = {}
    for line in listed.splitlines():
        status, name, *fields = line.split("\t")
        if status.endswith(" installed"):
            installed[name] = fields
            for provided in _names(fields[2]):
                providers.setdefault(provided[0], name)
    if lost := [name for name in wanted if name not in installed]:
        raise BaseUnavailableError(f"apt-get install {' '.join(lost)}: a base image needs them")
    found: dict[str, str] = {}
    open_names = list(wanted)
    while open_names:
        name = open_names.pop()
        full_name, version, _, depends = installed[name]
        if full_name in found:
            continue
        found[full_name] = version
        for alternatives in _names(depends):
            known = (one if one in installed else providers.get(one) for one in alternatives)
            open_names += [one for one in known if one][:1]
    return found


def _names(field: str) -> list[list[str]]:
    """Return the packages of a relation field: alternatives within conjunctions."""
    plain = re.sub(r"\([^)]*\)|:[a-z0-9]+", "", field)
    return [
        [one.strip() for one in part.split("|")] for part in plain.split(",") if part.strip(" |")
    ]


def _package_files(packages: Iterable[str]) -> set[str]:
    """Return every file and directory of the packages, each by its one real name."""
    listed = subprocess.run(
        ["dpkg-query", "--listfiles", *packages], capture_output=True, check=True, text=True
    ).stdout
    found = set()
    for line in listed.splitlines():
        if line.startswith("/") and line != "/." and not _LEFT_OUT.fullmatch(line):
            path = os.path.join(os.path.realpath(os.path.dirname(line)), os.path.basename(line))  # noqa: PTH118, PTH119, PTH120  tens of thousands of them
            if os.path.lexists(path) and path.count("/") > 1:
                found.add(path)
    return found | _alternatives(found)


def _alternatives(paths: set[str]) -> set[str]:
    """Return the links by which programs among these paths are known too, such as ``cc``."""
    found = set()
    for link in Path("/etc/alternatives").glob("*"):
        command = Path("/usr/bin") / link.name
        if os.path.realpath(link) in paths and command.is_symlink():
            found |= {str(link), str(command)}
    return found


def _pip_files(environment: dict[str, str]) -> list[Path]:
    named = [environment.get(name, "") for name in ("PIP_CONFIG_FILE", "PIP_CERT", "SSL_CERT_FILE")]
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    paths = [Path(name).expanduser() for name in (*_PIP_FILES, *named, bundle) if name]
    wheels = [Path(word) for word in environment.get("PIP_FIND_LINKS", "").split()]
    paths += [path for folder in wheels if folder.is_dir() for path in folder.iterdir()]
    return sorted({path for path in paths if path.is_file()})


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
