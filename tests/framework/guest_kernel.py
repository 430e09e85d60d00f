"""A stock kernel for emulated machines: Debian's cloud kernel, unpacked into a cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path


class KernelUnavailableError(Exception):
    """This machine cannot get the kernel; the message says why."""


def cached_kernel() -> Path:
    """Return the kernel's image, fetched through apt the first time.

    Raises:
        KernelUnavailableError: no apt, no index, or nothing to fetch.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    cache = home / "dsec" / "guest-kernel"
    found = sorted(cache.glob("vmlinuz-*"))
    if found:
        return found[-1]
    if shutil.which("apt-get") is None:
        raise KernelUnavailableError("no apt-get to fetch a kernel with")
    package = _package_name()
    with tempfile.TemporaryDirectory(prefix="dsec-kernel-") as scratch:
        _run("apt-get", "download", package, cwd=scratch)
        archive = next(Path(scratch).glob("*.deb"))
        _run("dpkg", "-x", str(archive), "unpacked", cwd=scratch)
        image = next(Path(scratch).glob("unpacked/boot/vmlinuz-*"))
        cache.mkdir(parents=True, exist_ok=True)
        # Into place by a rename: a killed run leaves no half of a kernel.
        fetched = cache / f".{image.name}"
        shutil.copyfile(image, fetched)
        return fetched.rename(cache / image.name)


def _package_name() -> str:
    """Return the package that the newest cloud kernel is in (the plain name only depends on it)."""
    told = _run("apt-cache", "depends", "linux-image-cloud-amd64")
    match = re.search(r"Depends: (linux-image-\S+)", told)
    if match is None:
        raise KernelUnavailableError("apt knows no linux-image-cloud-amd64; run apt-get update")
    return match[1]


def _run(*command: str, cwd: str | None = None) -> str:
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise KernelUnavailableError(f"{' '.join(command)}: {ended.stderr.strip()[-300:]}")
    return ended.stdout
