"""A Docker engine for tests alone: its own socket, data and mount namespace, no network of its own.

Its data lies in the user's cache directory, so that images are built once; a lock lets one test run
at a time use it. It touches neither firewall, nor bridges, nor the machine's own engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

from docker_base import BaseImage

_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.1
_PREFIX: Final = "dsec-docker-"
_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


class EngineUnavailableError(Exception):
    """No engine can be started here; the message says why."""


def find_programs() -> None:
    """Raise when this machine lacks what an engine needs."""
    if os.geteuid() != 0:
        raise EngineUnavailableError("a Docker engine needs root")
    for program, package in (
        ("dockerd", "docker.io"),
        ("docker", "docker.io"),
        ("containerd", "containerd"),
        ("runc", "runc"),
        ("unshare", "util-linux"),
        ("setpriv", "util-linux"),
    ):
        if shutil.which(program) is None:
            raise EngineUnavailableError(f"no {program}: apt-get install {package}")


class DockerEngine:
    """One engine, from :meth:`start` to :meth:`stop`, which removes its containers and volumes."""

    def __init__(self) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self.cache = Path(cache).expanduser() / "dsec" / "docker-tests"
        self.data = self.cache / "data"
        # A socket's path is at most 107 characters long. The cgroup is named alike, after this
        # process: tests of others that run at the time do not take it for something left behind.
        self.run_directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self.cgroup = self.run_directory.name
        self._lock: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- Life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the daemon and return when it answers.

        Raises:
            EngineUnavailableError: with the end of its log when it does not.
        """
        self.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = (self.cache / "lock").open("ab")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for left in _cgroups(f"{_PREFIX}*"):
            left.rmdir()
        # Made here and not by the first container: whoever runs that one did not leave them behind.
        for hierarchy in _hierarchies():
            (hierarchy / self.cgroup).mkdir()
        configuration = self.run_directory / "daemon.json"
        configuration.write_text("{}")
        command = [
            # Its mounts are nobody else's and end with it; it ends with this thread.
            *("unshare", "--mount", "--propagation", "private", "--"),
            *("setpriv", "--pdeathsig", "TERM", "--"),
            "dockerd",
            f"--host={self._address}",
            f"--config-file={configuration}",
            f"--data-root={self.data}",
            f"--exec-root={self.run_directory / 'exec'}",
            f"--pidfile={self.run_directory / 'pid'}",
            f"--cgroup-parent=/{self.cgroup}",
            "--exec-opt=native.cgroupdriver=cgroupfs",
            *("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"),
            "--userland-proxy=false",
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # What it and containerd leave in the folder for such things goes with ours.
                env={**os.environ, "TMPDIR": str(self.run_directory)},
                process_group=0,
                # Should we be killed, the lock is held until the daemon has ended, too.
                pass_fds=(self._lock.fileno(),),
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._run("version", check=False).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                end = self._log.read_text(errors="replace")[-1500:]
                raise EngineUnavailableError(f"dockerd does not start here: {end}")
            time.sleep(_POLL_S)
        # A test run that was killed may have left some.
        self.remove_all()

    def remove_all(self) -> None:
        """Remove every container and volume; images stay."""
        if containers := self.docker("ps", "--all", "--quiet").split():
            self.docker("rm", "--force", "--volumes", *containers)
        if volumes := self.docker("volume", "ls", "--quiet").split():
            self.docker("volume", "rm", *volumes)

    def stop(self) -> None:
        """Stop everything; only images and the build cache stay, in the cache directory."""
        process, self._process = self._process, None
        try:
            if process is not None:
                if process.poll() is None:
                    self.remove_all()
                    process.terminate()
                try:
                    process.wait(_STOP_TIMEOUT_S)
                finally:
                    process.kill()
                    process.wait()
        finally:
            for path in self.cgroups():
                with contextlib.suppress(OSError):
                    path.rmdir()
            shutil.rmtree(self.run_directory, ignore_errors=True)
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def cgroups(self) -> list[Path]:
        """Return the engine's own cgroups, deepest first."""
        return _cgroups(self.cgroup)

    # --- Use ----------------------------------------------------------------------------------

    def docker(self, *arguments: str, stdin: bytes | None = None) -> str:
        """Run a ``docker`` command and return what it printed; its failure is an error."""
        done = self._run(*arguments, check=False, stdin=stdin)
        if done.returncode != 0:
            said = (done.stdout + done.stderr).decode(errors="replace")[-4000:]
            message = f"docker {' '.join(arguments)[:300]}: exit {done.returncode}\n{said}"
            raise AssertionError(message)
        return done.stdout.decode(errors="replace")

    def attempt(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run a ``docker`` command that may fail."""
        return self._run(*arguments, check=False)

    def inspect(self, container: str) -> dict[str, Any]:
        """Return what the engine knows of a container."""
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", container))
        return found[0]

    def volume(self, name: str) -> Path:
        """Return where a volume's files are on this machine."""
        return self.data / "volumes" / name / "_data"

    def base_image(self) -> str:
        """Return the name of the base image, imported unless the same one is there."""
        base = BaseImage()
        name = f"dsec-base:{base.digest}"
        if self.attempt("image", "inspect", name).returncode == 0:
            return name
        if others := self.docker("images", "--quiet", "dsec-base").split():
            # Whatever was built on an older base goes with it; one that is in use may stay.
            built = self.docker("images", "--quiet", "--all").split()
            self.attempt("rmi", "--force", *built, *others)
        changes = [word for change in base.changes() for word in ("--change", change)]
        with subprocess.Popen(
            [*self._client, "import", *changes, "-", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=self._environment,
        ) as importing:
            assert importing.stdin is not None
            base.write(importing.stdin)
            importing.stdin.close()
            assert importing.wait() == 0
        return name

    def build(self, context: Path, base: str, name: str) -> None:
        """Build the image of a directory's Dockerfile; what did not change is not built again."""
        shared = ("--network=host", f"--build-arg=BASE={base}")
        # The stages need names to survive as cache.
        for stage in ("dependencies", "build"):
            tag = f"{name}-{stage}"
            self.docker("build", *shared, f"--target={stage}", f"--tag={tag}", str(context))
        self.docker("build", *shared, f"--tag={name}", str(context))
        self.docker("image", "prune", "--force")

    @property
    def _log(self) -> Path:
        return self.run_directory / "dockerd.log"

    @property
    def _address(self) -> str:
        return f"unix://{self.run_directory / 'docker.sock'}"

    @property
    def _client(self) -> Sequence[str]:
        return ("docker", "--host", self._address)

    @property
    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DOCKER_")}
        # Neither the user's configuration and log-ins, nor plugins that may not be there.
        return {**kept, "DOCKER_CONFIG": str(self.run_directory), "DOCKER_BUILDKIT": "0"}

    def _run(
        self, *arguments: str, check: bool, stdin: bytes | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*self._client, *arguments],
            check=check,
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            env=self._environment,
        )


def _hierarchies() -> list[Path]:
    """Return the root of each hierarchy: version 1's controllers and version 2, or it alone."""
    roots = [_CGROUP_ROOT, *_CGROUP_ROOT.iterdir()]
    return [root for root in roots if root.is_mount() and (root / "cgroup.procs").is_file()]


def _cgroups(pattern: str) -> list[Path]:
    """Return these cgroups of all hierarchies and those below them, deepest first."""
    tops = sorted(top for root in _hierarchies() for top in root.glob(pattern) if top.is_dir())
    return [path for top in tops for path in [*sorted(_directories(top), reverse=True), top]]


def _directories(top: Path) -> list[Path]:
    return [Path(folder) / name for folder, names, _ in os.walk(top) for name in names]
