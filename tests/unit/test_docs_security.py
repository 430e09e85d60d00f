"""Every attempt that was seen or tried is in the table of the security page, with its tests."""

from __future__ import annotations

import re
from functools import cache

import pytest

from documents import ROOT

#: What agents did in real training runs, then what worked on machines without the defence.
SEEN = (
    "Searching the platform's files and logs for answers",
    "Forged messages to the control socket",
    "Forged messages on the agent's socket",
    "Overwriting `/bin/sh`, `env`, `python3` or `ld.so`",
    "`XFS_IOC_SWAPEXT` and other calls on files",
    "A recursive search of `/proc`",
    "`yes` filling the log store",
    "Scanning ports for mirrors",
    "A package proxy used to fetch the solution",
    "Git history that holds the fix",
    "Killing or tracing PID 1",
    "Fork bombs",
    "Memory bombs",
    "Disk and inode bombs",
    "Writing to `/proc/sys` and `/sys`",
    "Mounting",
    "Loading BPF",
    "Set-id files in layers",
    "Links in uploaded paths",
    "Links in archives",
    "Device nodes in layers",
    "A layer that names `..`",
    "Escaping through `/proc/self/exe`",
    "Inherited descriptors",
    "Ids that hold wildcards",
    "`/proc/1/mem` and ptrace of PID 1",
    "`pidfd_getfd` of PID 1's descriptors",
    "All inotify instances of the node",
    "All terminals of the node",
    "All asynchronous contexts (`aio-max-nr`)",
    "All process numbers (`pid_max`)",
    "AF_VSOCK, AF_ALG and other families",
    "A nested user namespace and its firewall",
    "Keys, io_uring, userfaultfd, perf",
    "Mounting cgroup v1, a release agent",
    "NET_ADMIN and NET_RAW inside",
    "A socket that is dead after a restart",
    "Overwriting the spawner's descriptors while they are shared",
    "Paths of the host in `mountinfo`",
    "A core pattern that runs a program on the host",
    "A crafted file system image",
    "`sync` and `syncfs`",
    "Descriptors sent to the daemon",
    "`trusted.*` attributes in layers",
)


def _rows(*, beside: bool = False) -> dict[str, list[str]]:
    """Return each attempt with its tests: those of the suite, or those beside the parts."""
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    section = text.split("## What was tried, and what stops it")[1].split("\n## ")[0]
    table = section.split("beside the parts:\n")[beside]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: re.findall(r"`(\w+)`", row[2]) for row in rows[1:]}


@cache
def _tests(directory: str = "") -> frozenset[str]:
    found = (ROOT / "tests" / directory).rglob("test_*.py")
    sources = (path.read_text(encoding="utf-8") for path in found)
    return frozenset(
        name
        for source in sources
        for name in re.findall(r"^(?:async )?def test_(\w+)", source, re.MULTILINE)
    )


@pytest.mark.parametrize("attempt", SEEN)
def test_what_was_seen_is_in_the_table(attempt: str) -> None:
    assert attempt in _rows()


@pytest.mark.parametrize("attempt", _rows())
def test_every_attempt_has_tests_in_the_security_suite(attempt: str) -> None:
    named = _rows()[attempt]
    assert named, f"no test is named for {attempt!r}"
    assert [name for name in named if name not in _tests("security")] == []


@pytest.mark.parametrize("attempt", _rows(beside=True))
def test_what_is_tried_beside_the_parts_has_tests_that_exist(attempt: str) -> None:
    named = _rows(beside=True)[attempt]
    assert named, f"no test is named for {attempt!r}"
    assert [name for name in named if name not in _tests()] == []
