"""``compose.yaml`` read as data, and carried out with plain ``docker run``.

Only what the file uses is understood, and nothing is passed over: a word that has no translation
here is an error, so that the file cannot come to say what is never tested.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

REPOSITORY: Final = Path(__file__).parent.parent.parent
COMPOSE_FILE: Final = REPOSITORY / "compose.yaml"
SERVICES: Final = ("broker", "scheduler", "chronus", "tracer", "sandboxd")

#: By number, as in linux/capability.h; the last ones that every engine in use knows.
CAPABILITIES: Final = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"),
    *("SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW"),
    *("IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT"),
    *("SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD"),
    *("LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG"),
    *("WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ"),
)
#: What matters when containers are made or ended by Compose itself, and not by a test.
_PASSED_OVER: Final = frozenset({"build", "depends_on", "image", "ports", "restart"})


def read_compose(*, node: str = "") -> dict[str, Any]:
    """Return the file, with its node called ``node`` when that is given."""
    text = COMPOSE_FILE.read_text(encoding="utf-8")
    if node:
        text = text.replace("compose-1", node)
    compose: dict[str, Any] = yaml.safe_load(text)
    return compose


def run_options(service: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """Return the options of ``docker run`` for a service; its environment gives way to ours."""
    options = []
    for word, value in service.items():
        match word:
            case "command" | "environment" | "healthcheck":
                continue
            case "volumes":
                options += [f"--volume={volume}" for volume in value]
            case "tmpfs":
                options += [f"--tmpfs={place}" for place in value]
            case "privileged":
                options += _privileged() if value else []
            case "cgroup":
                options.append(f"--cgroupns={value}")
            case "stop_grace_period":
                options.append(f"--stop-timeout={seconds(value):g}")
            case _ if word not in _PASSED_OVER:
                message = f"no translation of {word}: {json.dumps(value)}"
                raise AssertionError(message)
    merged = {**service.get("environment", {}), **environment}
    return [*options, *(f"--env={name}={value}" for name, value in merged.items())]


def _privileged() -> list[str]:
    """Return ``--privileged``, or all of it that a machine with fewer capabilities can give."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    bounding = int(status.partition("CapBnd:")[2].split()[0], 16)
    held = [name for number, name in enumerate(CAPABILITIES) if bounding >> number & 1]
    if len(held) == len(CAPABILITIES):
        return ["--privileged"]
    return [
        "--cap-drop=ALL",
        *(f"--cap-add={name}" for name in held),
        *(f"--security-opt={what}=unconfined" for what in ("seccomp", "apparmor", "systempaths")),
        "--device-cgroup-rule=a *:* rwm",
    ]


def health_command(service: Mapping[str, Any], port: int) -> list[str]:
    """Return the command of a service's health check, asked at another port."""
    kind, *command = service["healthcheck"]["test"]
    assert kind == "CMD"
    usual = f":{service['environment']['DSEC_HTTP_PORT']}/"
    assert any(usual in word for word in command)
    return [word.replace(usual, f":{port}/") for word in command]


def seconds(period: str) -> float:
    """Return the seconds of a period as this file writes them: ``30s``."""
    assert period.endswith("s")
    return float(period.removesuffix("s"))
