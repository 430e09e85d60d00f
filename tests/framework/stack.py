"""A whole platform for end-to-end tests: what ``dsec up`` runs, in a directory of its own.

Node names carry this process's id, so several test runs on one machine do not meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from dsec.client import DSecClient
from dsec.connection import Context, read_context
from dsec.rootfs import build_host_rootfs
from dsec.stack.layout import Layout
from sharing_out import SESSION_PLATFORM

BASE = "host@1"
STOP_TIMEOUT_S = 90.0


class Stack:
    """One running platform; :meth:`start` it, :meth:`stop` it, :meth:`leftovers` tells the rest."""

    def __init__(self, directory: Path, *, name: str = SESSION_PLATFORM, nodes: int = 1) -> None:
        self.directory = directory
        self.prefix = f"{name}{os.getpid()}"
        self.node_names = tuple(f"{self.prefix}-{number}" for number in range(1, nodes + 1))
        self.parts: list[dict[str, Any]] = []
        self.more_environment: dict[str, str] = {}
        self.process: subprocess.Popen[str] | None = None
        self._said: IO[str] | None = None

    # --- Life ---------------------------------------------------------------------------------

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of ``dsec`` for this platform."""
        return [
            sys.executable,
            "-m",
            "dsec.cli.main",
            "--state-directory",
            str(self.directory),
            *arguments,
        ]

    def start(self, *options: str) -> None:
        """Start the platform and return when it says that it runs."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._said = (self.directory / "up.log").open("a+")
        self.process = subprocess.Popen(
            self.command(
                "up",
                "--json",
                "--nats-port=0",
                f"--node-prefix={self.prefix}",
                f"--nodes={len(self.node_names)}",
                *options,
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**environment(), **self.more_environment},
        )
        event = self.next_event("running")
        self.parts = event["parts"]

    def next_event(self, wanted: str) -> dict[str, Any]:
        """Return the next event of this name that the platform tells; others are passed over."""
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == wanted:
                return event
        self.process.wait()
        message = f"the platform ended before {wanted!r}: {self.said()}"
        raise AssertionError(message)

    def said(self) -> str:
        """Return what the platform wrote to standard error."""
        return (self.directory / "up.log").read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask the platform to stop, wait until it is gone, and return its exit code."""
        process, self.process = self.process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            process.communicate(timeout=STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
            if self._said is not None:
                self._said.close()
        return process.returncode

    def leftovers(self) -> list[str]:
        """Return what of this platform is still on the machine, which should be nothing."""
        layout = Layout(self.directory)
        traces = (layout.run, layout.record, layout.runtime, self.directory / "context.json")
        return [
            *(f"mount {line}" for line in _lines("/proc/self/mountinfo") if self._names(line)),
            *(f"process {line}" for line in _command_lines() if self._names(line)),
            *(f"socket {line}" for line in _lines("/proc/net/unix") if self._names(line)),
            *(f"cgroup {tree}" for tree in _cgroups() if self.prefix in tree),
            *(f"file {path}" for path in traces if path.exists()),
        ]

    def _names(self, text: str) -> bool:
        return str(self.directory) in text or self.prefix in text

    # --- Use ----------------------------------------------------------------------------------

    @property
    def context(self) -> Context:
        """Where the platform listens."""
        context = read_context(self.directory)
        assert context is not None
        return context

    def part(self, name: str) -> dict[str, Any]:
        """Return what the platform said of one of its parts when it came up."""
        return next(part for part in self.parts if part["name"] == name)

    def client(self, project: str = "default") -> DSecClient:
        """Return a client of a project, not yet connected."""
        return DSecClient(
            self.context.nats_servers,
            self.directory / "auth" / "projects" / f"{project}.creds",
            kafka_bootstrap=self.context.kafka_bootstrap,
        )

    def dsec(
        self, *arguments: str, check: bool = True, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line against this platform; with ``check`` it must succeed."""
        done = subprocess.run(
            self.command(*arguments),
            check=False,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment(),
        )
        if check:
            assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stderr}"
        return done

    def dsec_json(self, *arguments: str) -> Any:
        """Run a command with ``--json`` and return its one document."""
        return json.loads(self.dsec("--json", *arguments).stdout)

    def import_host_base(self, programs: Sequence[str] = ()) -> str:
        """Make a base layer of this host's shell and Python, if it is not there; its reference."""
        if any(layer["reference"] == BASE for layer in self.dsec_json("layer", "list")):
            return BASE
        scratch = Path(tempfile.mkdtemp(prefix="dsec-base-"))
        try:
            build_host_rootfs(scratch / "root", python=True, programs=programs)
            name, _, version = BASE.partition("@")
            self.dsec(
                *("layer", "import", str(scratch / "root"), "--kind", "base"),
                *("--name", name, "--version", version),
            )
        finally:
            shutil.rmtree(scratch)
        return BASE


def environment() -> dict[str, str]:
    """Return this environment without what would point a command at another platform."""
    return {key: value for key, value in os.environ.items() if not key.startswith("DSEC_")}


def _lines(path: str) -> list[str]:
    return Path(path).read_text(errors="replace").splitlines()


def _cgroups() -> list[str]:
    # Other platforms' cgroups come and go meanwhile; walk() passes over what has vanished.
    return [root for root, _, _ in os.walk("/sys/fs/cgroup") if "/dsec-" in root]


def _command_lines() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:
                continue
            found.append(f"{entry.name} {words.decode(errors='replace')}")
    return found


@contextlib.contextmanager
def running_stack(
    directory: Path, *options: str, name: str = SESSION_PLATFORM, nodes: int = 1
) -> Iterator[Stack]:
    """Yield a platform that runs; afterwards it has stopped in order and left nothing."""
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    platform = Stack(directory, name=name, nodes=nodes)
    try:
        platform.start(*options)
        yield platform
    finally:
        code = platform.stop()
    assert code == 0, platform.said()
    assert platform.leftovers() == []


def pid_of(stack: Stack, part: str) -> int:
    """Return the process that is the part now: it may have been started again."""
    record = json.loads((stack.directory / "supervisor.json").read_text())
    return next(int(found["process"]["pid"]) for found in record["parts"] if found["name"] == part)
