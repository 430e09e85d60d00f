from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec_common.behavior import BehaviorLog
from stack import Stack, environment


@pytest.fixture
def sandbox(stack: Stack, base: str) -> Iterator[str]:
    name = stack.dsec("sandbox", "create", base, "--label", "by=cli").stdout.strip()
    yield name
    stack.dsec("sandbox", "rm", name)


def test_a_sandbox_is_created_listed_inspected_and_removed(stack: Stack, base: str) -> None:
    created = stack.dsec_json("sandbox", "create", base, "--memory", "64m", "--cpus", "0.5")
    name = created["sandbox_id"]
    assert created["limits"]["memory_bytes"] == 64 << 20
    listed = {info["sandbox_id"]: info for info in stack.dsec_json("sandbox", "list")}
    assert listed[name]["state"] == "running"
    assert listed[name]["memory_bytes_used"] > 0
    table = stack.dsec("sandbox", "list").stdout
    assert "SANDBOX" in table
    assert name in table
    assert stack.dsec_json("sandbox", "inspect", name)["limits"]["cpus"] == 0.5
    assert "running" in stack.dsec("sandbox", "inspect", name).stdout
    removed = stack.dsec_json("sandbox", "rm", name)
    assert removed == [{"sandbox_id": name, "end_cause": "deleted"}]
    assert name not in stack.dsec("sandbox", "list").stdout
    assert "ended (deleted)" in stack.dsec("sandbox", "list", "--all").stdout


def test_exec_gives_the_commands_output_and_exit_code_and_nothing_else(
    stack: Stack, sandbox: str
) -> None:
    done = stack.dsec(
        *("sandbox", "exec", sandbox, "--", "sh", "-c", "echo out; echo err >&2; exit 7"),
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    line = stack.dsec("sandbox", "exec", "--shell", sandbox, "echo $((6 * 7))")
    assert line.stdout == "42\n"
    fed = stack.dsec("sandbox", "exec", "-i", sandbox, "cat", stdin="fed")
    assert fed.stdout == "fed"
    flag = stack.dsec("sandbox", "exec", sandbox, "echo", "--json", "-i")
    assert flag.stdout == "--json -i\n"
    killed = stack.dsec("sandbox", "exec", "-c", sandbox, "kill -SEGV $$", check=False)
    assert killed.returncode == 128 + signal.SIGSEGV
    late = stack.dsec(*("sandbox", "exec", "--timeout", "0.3", sandbox, "sleep", "60"), check=False)
    assert late.returncode == 124
    assert "time ran out" in late.stderr
    missing = stack.dsec("sandbox", "exec", sandbox, "no-such-program", check=False)
    assert missing.returncode == 127
    assert "no-such-program" in missing.stderr
    refused = stack.dsec("sandbox", "exec", sandbox, "/etc/passwd", check=False)
    assert refused.returncode == 126, refused.stderr
    document = stack.dsec("sandbox", "exec", "--json", sandbox, "printf", r"\377", check=False)
    result = json.loads(document.stdout)
    assert (result["exit_code"], result["stdout"], result["stdout_base64"]) == (0, "\ufffd", "/w==")


def test_exec_prints_while_the_command_runs_and_an_interrupt_ends_that(
    stack: Stack, sandbox: str
) -> None:
    line = "echo first; sleep 1000 & echo $! > /tmp/child; wait"
    with subprocess.Popen(
        stack.command("sandbox", "exec", "-c", sandbox, line),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "first\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    gone = "while [ -d /proc/$(cat /tmp/child) ]; do :; done"
    stack.dsec("sandbox", "exec", "-c", "--timeout", "20", sandbox, gone)
    much = stack.dsec("sandbox", "exec", "-c", sandbox, "seq 100000; sleep 1000 & echo left")
    assert much.stdout == "".join(f"{number}\n" for number in range(1, 100_001)) + "left\n"
    refused = stack.dsec("sandbox", "exec", "-i", sandbox, "no-such-program", check=False)
    assert refused.returncode == 127


@pytest.mark.parametrize("joined", ["-i", "-t"])
def test_input_that_is_nowhere_is_input_that_has_ended(
    stack: Stack, sandbox: str, joined: str
) -> None:
    done = subprocess.run(
        stack.command("sandbox", "exec", joined, "--timeout", "20", sandbox, "sh", "-c", "echo a"),
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        env=environment(),
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, b"a", b"")


def test_an_option_that_is_none_is_no_layer_and_no_sandbox(
    stack: Stack, base: str, sandbox: str
) -> None:
    for words in (("run", "--nett", "open", base), ("sandbox", "exec", "--nett", sandbox)):
        done = stack.dsec(*words, "true", check=False)
        assert done.returncode == 2
        assert "--nett" in done.stderr


def test_run_and_call_take_what_create_and_exec_take(stack: Stack, base: str) -> None:
    least = ("--cpus", "0.5", "--cpu-quota", "--cpu-class", "best_effort", "--memory", "64m")
    asked = ("-w", "/tmp", "-u", "nobody", "-c", "-e", "A=1", "--pids", "20", "--inodes", "500")
    line = 'echo "$PWD $(id -un) $A $(cat)"'
    for verb in ("run", "call"):
        done = stack.dsec(verb, *least, *asked, "-i", base, line, stdin="fed")
        assert done.stdout == "/tmp nobody 1 fed\n"
    network = stack.dsec("run", "--network", "none", "--ttl", "60", base, "true")
    assert network.stdout == ""
    created = stack.dsec_json(
        *("sandbox", "create", *least, "--oom-group", "--inodes", "500", "--warm", "bypass", base)
    )
    limits = created["limits"]
    assert (limits["oom_group"], limits["cpu_quota"], limits["inodes"]) == (True, True, 500)
    name = created["sandbox_id"]
    stack.dsec("sandbox", "exec", "-c", name, "echo kept > /tmp/kept")
    snapshot = stack.dsec_json("snapshot", "create", name)["snapshot_id"]
    assert stack.dsec("run", "--snapshot", snapshot, "cat", "/tmp/kept").stdout == "kept\n"
    stack.dsec("sandbox", "rm", name)
    stack.dsec("snapshot", "rm", snapshot)


@pytest.mark.parametrize("queue", [(), ("--queue",)], ids=["asked", "queued"])
def test_commands_that_name_neither_directory_nor_user_take_those_of_create(
    stack: Stack, base: str, queue: tuple[str, ...]
) -> None:
    asked = ("sandbox", "create", *queue, "--cwd", "/tmp", "--user", "nobody", base)
    name = stack.dsec(*asked).stdout.strip()
    line = 'echo "$PWD $(id -un)"'
    assert stack.dsec("sandbox", "exec", "-c", name, line).stdout == "/tmp nobody\n"
    named = stack.dsec("sandbox", "exec", "-w", "/usr", "-u", "root", "-c", name, line)
    assert named.stdout == "/usr root\n"
    stack.dsec("sandbox", "rm", name)


def test_cp_copies_files_and_directories_both_ways(
    stack: Stack, sandbox: str, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/data").write_bytes(os.urandom(300_000))
    (tree / "text").write_text("text")
    assert stack.dsec_json("sandbox", "cp", str(tree), f"{sandbox}:/in") == {"files": 2}
    stack.dsec("sandbox", "cp", f"{sandbox}:/in", str(tmp_path / "out"))
    assert (tmp_path / "out/sub/data").read_bytes() == (tree / "sub/data").read_bytes()
    stack.dsec("sandbox", "cp", str(tree / "text"), f"{sandbox}:/tmp/")
    stack.dsec("sandbox", "cp", f"{sandbox}:/tmp/text", str(tmp_path))
    assert (tmp_path / "text").read_text() == "text"
    missing = stack.dsec("sandbox", "cp", f"{sandbox}:/nope", str(tmp_path), check=False)
    assert missing.returncode == 1
    assert "/nope" in missing.stderr


def test_layers_are_imported_from_a_tar_listed_and_removed(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("x")
    subprocess.run(["tar", "-C", tmp_path / "tree", "-czf", tmp_path / "a.tgz", "."], check=True)
    layer = stack.dsec_json(
        *("layer", "import", str(tmp_path / "a.tgz"), "--kind", "workspace"),
        *("--name", "work", "--version", "2"),
    )
    assert (layer["reference"], layer["kind"]) == ("work@2", "workspace")
    assert "work@2" in stack.dsec("layer", "list").stdout
    assert stack.dsec_json("layer", "inspect", "work@2")["digest"] == layer["digest"]
    assert layer["digest"] in stack.dsec("layer", "inspect", "work@2").stdout
    stack.dsec("layer", "rm", "work@2")
    gone = stack.dsec("layer", "inspect", "work@2", "--json", check=False)
    assert gone.returncode == 1
    assert json.loads(gone.stderr)["error"]["code"] == "not_found"


def test_files_are_looked_at_moved_watched_and_removed(stack: Stack, sandbox: str) -> None:
    def at(path: str) -> str:
        return f"{sandbox}:{path}"

    stack.dsec("sandbox", "mkdir", at("/w/deep/er"))
    stack.dsec("sandbox", "exec", "-c", sandbox, "echo 1 > /w/one; ln -s one /w/link")
    listed = stack.dsec_json("sandbox", "ls", at("/w"))
    assert [(entry["path"], entry["kind"]) for entry in listed] == [
        ("deep", "directory"),
        ("link", "symlink"),
        ("one", "file"),
    ]
    assert "lrwxrwxrwx   0:0" in stack.dsec("sandbox", "ls", at("/w")).stdout
    assert stack.dsec_json("sandbox", "stat", at("/w/link"))["link_target"] == "one"
    assert re.search(r"mode +0644", stack.dsec("sandbox", "stat", at("/w/one")).stdout)
    stack.dsec("sandbox", "mv", at("/w/one"), at("/w/deep/one"))
    kept = stack.dsec("sandbox", "mv", "--keep", at("/w/link"), "/w/deep/one", check=False)
    assert (kept.returncode, "conflict" in kept.stderr) == (1, True)
    with subprocess.Popen(
        stack.command("sandbox", "watch", "--json", "-r", at("/w")), stdout=subprocess.PIPE
    ) as watching:
        assert watching.stdout is not None
        changes = iter(watching.stdout.readline, b"")
        toucher = threading.Thread(target=_change_until, args=(stack, sandbox, watching))
        toucher.start()
        event = json.loads(next(changes))
        watching.terminate()
        toucher.join()
    assert event["path"] == "deep/er/file"
    assert stack.dsec("sandbox", "rm", at("/w"), check=False).returncode == 1
    removed = stack.dsec_json("sandbox", "rm", "-r", at("/w"))
    assert [entry["path"] for entry in removed] == [at("/w")]
    both = stack.dsec("sandbox", "rm", at("/tmp"), sandbox, check=False)
    assert both.returncode == 2


def _change_until(stack: Stack, sandbox: str, watching: subprocess.Popen[bytes]) -> None:
    """Change a file again and again: nobody is told when a watch stands."""
    while watching.poll() is None:
        stack.dsec("sandbox", "exec", "-c", sandbox, "echo x >> /w/deep/er/file")


def test_a_layer_import_shows_its_progress_to_people(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_bytes(os.urandom(20 << 20))
    master, slave = pty.openpty()
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:
                return
            shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    done = subprocess.run(
        stack.command(
            *("layer", "import", str(tmp_path / "tree"), "--kind", "workspace"),
            *("--name", "big", "--version", "1"),
        ),
        check=False,
        stdout=subprocess.PIPE,
        stderr=slave,
        env={**os.environ, "TERM": "xterm"},
        timeout=60,
    )
    os.close(slave)
    reader.join()
    os.close(master)
    assert done.returncode == 0, shown.decode()
    assert done.stdout.startswith(b"big@1  sha256:")
    assert b"upload" in shown
    assert b"MiB" in shown
    stack.dsec("layer", "rm", "big@1")


def test_nodes_are_listed_and_inspected(stack: Stack) -> None:
    nodes = stack.dsec_json("node", "list")["nodes"]
    assert [node["node"] for node in nodes] == list(stack.node_names)
    assert "ready" in stack.dsec("node", "list").stdout
    name = stack.node_names[0]
    assert stack.dsec_json("node", "inspect", name)["ready"] is True
    assert re.search(r"processors +\d", stack.dsec("node", "inspect", name).stdout)
    unknown = stack.dsec("node", "inspect", "nobody", check=False)
    assert unknown.returncode == 1
    assert "nobody" in unknown.stderr


def test_logs_print_the_text_form_and_parse_back(stack: Stack, sandbox: str) -> None:
    stack.dsec("sandbox", "exec", sandbox, "echo", "seen")
    for _ in range(20):
        lines = stack.dsec("logs", "--sandbox", sandbox).stdout.splitlines()
        if len(lines) >= 2:
            break
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\] agent=\S+ id=\S+ action=create .*", lines[0]
    )
    record = BehaviorLog.from_text(lines[1])
    assert record.action == "exec"
    assert record.attributes["command"] == "echo seen"
    documents = stack.dsec("logs", "--sandbox", sandbox, "--json").stdout.splitlines()
    assert {json.loads(line)["sandbox_id"] for line in documents} == {sandbox}


def test_logs_follow_goes_on_until_it_is_interrupted(stack: Stack, sandbox: str) -> None:
    with subprocess.Popen(
        stack.command("logs", "--follow", "--from-beginning", "--sandbox", sandbox),
        stdout=subprocess.PIPE,
        text=True,
    ) as follower:
        assert follower.stdout is not None
        assert "action=create" in follower.stdout.readline()
        stack.dsec("sandbox", "exec", sandbox, "echo", "later")
        assert "action=exec" in follower.stdout.readline()
        follower.send_signal(signal.SIGINT)
        assert follower.wait(30) == 130


def test_a_trace_is_shown_as_a_table_and_as_json(stack: Stack, sandbox: str) -> None:
    stack.dsec("sandbox", "exec", sandbox, "echo", "traced")
    for _ in range(20):
        done = stack.dsec("trace", sandbox, "--json", check=False)
        steps = json.loads(done.stdout)["steps"] if done.returncode == 0 else []
        if len(steps) >= 2:
            break
    assert [step["action"] for step in steps[:2]] == ["create", "exec"]
    assert "exec" in stack.dsec("trace", sandbox).stdout


def test_a_project_made_while_all_runs_works_at_once(stack: Stack) -> None:
    made = stack.dsec_json("project", "create", "team-cli")
    assert Path(made["credentials"]).stat().st_mode & 0o777 == 0o600
    assert "team-cli" in stack.dsec("project", "list").stdout
    listed = subprocess.run(
        stack.command("--credentials", made["credentials"], "sandbox", "list", "--json"),
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert json.loads(listed.stdout) == []
    again = stack.dsec("project", "create", "team-cli", check=False)
    assert again.returncode == 1
    assert "exists" in again.stderr
    for name in ("a.b", "*", ">", "a b", "x" * 300, "_sys"):
        bad = stack.dsec("project", "create", name, check=False)
        assert bad.returncode == 1, name
        assert "not a valid project name" in bad.stderr
    stack.dsec("project", "rm", "team-cli")
    # What everybody uses is not removed by a slip.
    refused = stack.dsec("project", "rm", "default", check=False)
    assert refused.returncode == 1
    assert "cannot be removed" in refused.stderr
    assert "default" in stack.dsec("project", "list").stdout
