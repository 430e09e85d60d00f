from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsec.cli.output import (
    Output,
    UsageError,
    age_text,
    pairs,
    size_bytes,
    size_text,
    time_text,
)
from dsec_common.errors import invalid


def _dsec(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dsec.cli.main", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "DSEC_HOME": str(tmp_path / "state")},
    )


def test_help_names_every_command_and_loads_no_transport(tmp_path: Path) -> None:
    done = _dsec(tmp_path, "--help")
    assert done.returncode == 0
    for command in ("up", "down", "status", "logs", "trace", "sandbox", "layer", "node", "project"):
        assert command in done.stdout
    code = (
        "import sys, dsec.cli.main; "
        "print([m for m in ('nats', 'aiokafka', 'rich.table', 'structlog') if m in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=30
    )
    assert loaded.stdout.strip() == "[]"


def test_what_agents_name_drives_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b]0;mine\x07\u202etxt\udcff\x9bé\tb\n"
    out = Output(json=False)
    out.text(name)
    out.say(name)
    out.facts({"file": name})
    out.table(("FILE",), [(name,)])
    out.error(invalid(name))
    said = capsys.readouterr()
    for line in (said.out + said.err).splitlines():
        assert all(one.isprintable() or one == "\t" for one in line)
    assert said.out.startswith("a\\x1b]0;mine\\x07\\u202etxt\\udcff\\x9bé\tb\n")


def test_without_a_platform_an_error_says_what_to_do(tmp_path: Path) -> None:
    done = _dsec(tmp_path, "sandbox", "list")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "dsec up" in done.stderr
    assert "Traceback" not in done.stderr


def test_with_json_the_error_is_json_on_standard_error(tmp_path: Path) -> None:
    for arguments in (("node", "list", "--json"), ("--json", "node", "list")):
        done = _dsec(tmp_path, *arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        error = json.loads(done.stderr)["error"]
        assert error["code"] == "unavailable"
        assert "dsec up" in error["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("sandbox", "creat"),
        ("sandbox", "create", "base@1", "--memory", "much"),
        ("sandbox", "create", "base@1", "--label", "novalue"),
        ("sandbox", "cp", "a", "b"),
        ("layer", "import", "--name", "a", "--version", "1"),
        ("layer", "import", ".", "--name", "a"),
        ("sandbox", "mv", "node-1.a:/here", "node-1.b:/there"),
        ("network", "forward", "node-1.a", "99999"),
        ("agent", "policy", "crawler", "--rate-limit", "agent_socket=fast"),
        ("agent", "policy", "crawler"),
        ("agent", "policy", "crawler", "--pause", "--clear"),
        ("factory", "check", "leaky@1"),
        ("factory", "build", "spec.yaml", "-n", "0"),
        ("up", "--nodes", "0"),
        ("up", "--log-level", "loud"),
        ("up", "--nats-port", "70000"),
    ],
)
def test_a_command_line_that_cannot_be_meant_exits_with_2(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = _dsec(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("sandbox", "creat"),
        ("sandbox", "create", "base@1", "--memory", "much"),
        ("sandbox", "create", "base@1", "--bogus"),
        ("logs", "--sandbox", "nameless"),
        ("up", "--kafka", "external"),
    ],
)
def test_with_json_a_wrong_command_line_is_told_as_json(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    done = _dsec(tmp_path, "--json", *arguments)
    assert done.returncode in {1, 2}
    assert done.stdout == ""
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "invalid"
    assert error["message"]


def test_a_kafka_that_does_not_answer_is_said_in_time(tmp_path: Path) -> None:
    done = _dsec(
        tmp_path, "--servers", "nats://127.0.0.1:1", "logs", "--kafka", "127.0.0.1:1", "--json"
    )
    assert done.returncode == 1
    assert "127.0.0.1:1" in json.loads(done.stderr)["error"]["message"]


def test_the_version_is_an_option_too(tmp_path: Path) -> None:
    assert _dsec(tmp_path, "--version").stdout.startswith("dsec ")


def test_a_sandbox_command_that_the_platform_cannot_run_exits_with_125(tmp_path: Path) -> None:
    assert _dsec(tmp_path, "sandbox", "exec", "node-1.x", "true").returncode == 125


def test_version_as_json_is_one_document(tmp_path: Path) -> None:
    done = _dsec(tmp_path, "version", "--json")
    assert json.loads(done.stdout)["dsec"]


def test_status_and_down_of_nothing_say_so(tmp_path: Path) -> None:
    status = _dsec(tmp_path, "status", "--json")
    assert status.returncode == 1
    assert json.loads(status.stdout)["state"] == "not running"
    down = _dsec(tmp_path, "down", "--json")
    assert down.returncode == 0
    assert json.loads(down.stdout) == {"was": "not running", "cleaned": []}
    assert not (tmp_path / "state").exists()


def test_project_commands_without_a_state_directory_say_where_they_looked(tmp_path: Path) -> None:
    done = _dsec(tmp_path, "project", "create", "team-a")
    assert done.returncode == 1
    assert str(tmp_path / "state") in done.stderr


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("512", 512),
        ("64k", 65536),
        ("512m", 512 << 20),
        ("1.5g", 3 << 29),
        ("2GiB", 2 << 30),
        ("1T", 1 << 40),
    ],
)
def test_sizes_are_read_in_powers_of_1024(text: str, value: int) -> None:
    assert size_bytes(text) == value


@pytest.mark.parametrize("text", ["", "much", "12q", "m", "1e999g"])
def test_what_is_no_size_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        size_bytes(text)


def test_figures_read_well() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 3 << 20)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
    ]
    now = time.time()
    ages = [age_text(now - s) for s in (5, 65, 7300, 200_000)]
    assert ages == ["5s", "1m", "2h", "2d"]
    assert time_text(0) == "-"
    assert time_text(1718461327.9) == "2024-06-15T14:22:07Z"


def test_pairs_keep_what_follows_the_first_equals_sign() -> None:
    assert pairs(["a=b=c", "d="], "--env") == {"a": "b=c", "d": ""}
    with pytest.raises(UsageError, match="KEY=VALUE"):
        pairs(["=x"], "--env")


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_reader_that_has_read_enough_is_no_error(tmp_path: Path, more: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dsec.cli.main", "version", *more],
            check=False,
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=60,
            env={"PATH": os.environ["PATH"], "DSEC_HOME": str(tmp_path / "state")},
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
