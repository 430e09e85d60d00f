"""What betrays a task is found however it is dressed up, and what does not is let through."""

from __future__ import annotations

import base64
import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import sqlite3
import subprocess
import tarfile
import textwrap
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import cramjam
import msgspec
import pytest

from dsec.factory import Bounds, Evidence, Finding, evidence_of, look_through, read_secrets
from dsec.factory.evidence import NoSecret, secret_of
from dsec_common.errors import DsecError, ErrorCode

SOLUTION = textwrap.dedent(
    '''
    """How many ways there are to give change."""


    def count_ways(amount: int, coins: list[int]) -> int:
        ways = [1] + [0] * amount
        for coin in coins:
            for total in range(coin, amount + 1):
                ways[total] += ways[total - coin]
        return ways[amount]


    def smallest_change(amount: int, coins: list[int]) -> int:
        best = [0] + [amount + 1] * amount
        for total in range(1, amount + 1):
            best[total] = min(best[total - coin] + 1 for coin in coins if coin <= total)
        return best[amount]
    '''
).encode()
CANARY = "canary-5b1f0c9e-never-train-on-this"


@pytest.fixture
def evidence() -> Evidence:
    return evidence_of([secret_of("solution", "/app/change.py", SOLUTION)], [CANARY])


def look(root: Path, evidence: Evidence, **more: object) -> list[Finding]:
    return look_through(root, evidence, **more)  # type: ignore[arg-type]


def tar_of(name: str, data: bytes, mode: str = "w:gz") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:  # type: ignore[call-overload]
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def zip_of(name: str, data: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return packed.getvalue()


def sqlite_of(data: bytes) -> bytes:
    with sqlite3.connect(":memory:") as database:
        database.execute("create table notes (body text)")
        database.execute("insert into notes values (?)", (data.decode(),))
        database.commit()
        whole = database.serialize()
    database.close()
    return whole


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def split_base64(data: bytes) -> bytes:
    """Write it as a program would that hides it: short pieces, added up."""
    pieces = in_pieces(base64.b64encode(data), 13)
    return b"x = (\n" + b"".join(b"    '%s' +\n" % piece for piece in pieces)


def comments_of_base64(data: bytes) -> bytes:
    return b"".join(b"# %s\n" % piece for piece in in_pieces(base64.b64encode(data), 60))


def old_tar_of(name: str, data: bytes) -> bytes:
    """Return a tar as it was before there was a mark in it."""
    made = bytearray(tar_of(name, data, "w:"))
    made[257:265] = bytes(8)
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made[:512])
    return bytes(made)


def bundle_of(data: bytes) -> bytes:
    """Return what ``git bundle create`` writes: a pack behind a head."""
    kept = zlib.compress(data)
    size = bytes([0x30 | 0x80 | len(data) & 15, *git_size(len(data) >> 4)])
    head = b"# v2 git bundle\n%040x refs/heads/main\n\n" % 7
    return head + b"PACK\0\0\0\2\0\0\0\1" + size + kept + bytes(20)


def git_size(left: int) -> list[int]:
    return [left] if left < 0x80 else [left & 0x7F | 0x80, *git_size(left >> 7)]


DISGUISES: dict[str, Callable[[bytes], bytes]] = {
    "as it is": bytes,
    "among other text": lambda data: b"# notes\n" + data + b"\nthe end\n",
    "in capitals": bytes.upper,
    "in one line": lambda data: b" ".join(data.split()),
    "without spaces": lambda data: b"".join(data.split()),
    "with spaces everywhere": lambda data: b" ".join(bytes([byte]) for byte in data),
    "with other quotes": lambda data: data.replace(b'"', b"'"),
    "with zero-width spaces": lambda data: data.replace(b" ", b" \xe2\x80\x8b"),
    "with what nobody sees": lambda data: "\ufe0f\u034f\u180e\U000e0041\u2003".join(
        data.decode()
    ).encode(),
    "with CRLF and tabs": lambda data: data.replace(b"\n", b"\r\n").replace(b"    ", b"\t"),
    "as comments": lambda data: b"".join(b"# " + line for line in data.splitlines(True)),
    "UTF-16": lambda data: data.decode().encode("utf-16"),
    "UTF-16 big-endian": lambda data: data.decode().encode("utf-16-be"),
    "UTF-32": lambda data: data.decode().encode("utf-32"),
    "as JSON": lambda data: json.dumps({"messages": [{"content": data.decode()}]}).encode(),
    "as JSON in JSON": lambda data: json.dumps(json.dumps({"x": data.decode()})).encode(),
    "percent-encoded": lambda data: "".join(f"%{byte:02x}" for byte in data).encode(),
    "gzip": gzip.compress,
    "two gzips": lambda data: gzip.compress(b"nothing") + gzip.compress(data),
    "gzip with a false checksum": lambda data: gzip.compress(data)[:-8] + b"\0" * 8,
    "gzip behind a program": lambda data: b"#!/bin/sh\nexit\n" + gzip.compress(data) + b"end",
    "bzip2 behind a program": lambda data: b"#!/bin/sh\nexit\n" + bz2.compress(data) + b"end",
    "xz behind a program": lambda data: b"#!/bin/sh\nexit\n" + lzma.compress(data) + b"end",
    "gzip behind a torn one": lambda data: gzip.compress(bytes(99))[:-12] + gzip.compress(data),
    "gzip behind decoys": lambda data: b"\x1f\x8b\x08\0" * 99 + gzip.compress(data),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zlib": zlib.compress,
    "zstandard": lambda data: bytes(cramjam.zstd.compress(data)),
    "zstandard behind a frame that is passed over": lambda data: (
        b"\x5a\x2a\x4d\x18\4\0\0\0none" + bytes(cramjam.zstd.compress(data))
    ),
    "behind a tar's end": lambda data: (
        tar_of("a", b"nothing", "w:") + tar_of("b", zlib.compress(data), "w:")
    ),
    "tar without a mark": lambda data: old_tar_of("a", zlib.compress(data)),
    "a bundle of git": bundle_of,
    "a bundle of git behind decoys": lambda data: b"\nPACK\0\0\0\2" * 99 + bundle_of(data),
    "tar.gz": lambda data: tar_of("notes.txt", data),
    "zip": lambda data: zip_of("notes.txt", data),
    "zip behind something": lambda data: b"#!/bin/sh\n" + zip_of("notes.txt", data),
    "zip in tar.gz": lambda data: tar_of("a.zip", zip_of("notes.txt", data)),
    "base64": base64.b64encode,
    "base64 in lines": base64.encodebytes,
    "base64 in pieces": split_base64,
    "base64 behind letters": lambda data: b"blob" + base64.b64encode(data),
    "base64 for addresses": base64.urlsafe_b64encode,
    "base64 in UTF-16": lambda data: base64.b64encode(data).decode().encode("utf-16"),
    "base64 of gzip": lambda data: b"data: " + base64.b64encode(gzip.compress(data)),
    "base64 of gzip, in pieces": lambda data: split_base64(gzip.compress(data)),
    "base64 of gzip, in comments": lambda data: comments_of_base64(gzip.compress(data)),
    "base64 of gzip, behind letters": lambda data: b"x" + base64.b64encode(gzip.compress(data)),
    "base32": base64.b32encode,
    "hexadecimal": lambda data: data.hex().encode(),
    "hexadecimal in an array": lambda data: ", ".join(f"0x{byte:02x}" for byte in data).encode(),
    "hexadecimal with colons": lambda data: data.hex(":").encode(),
    "sqlite": sqlite_of,
}


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("secret", ["solution", "canary"])
def test_a_secret_is_found_in_any_of_its_disguises(
    tmp_path: Path, evidence: Evidence, disguise: str, secret: str
) -> None:
    data = SOLUTION if secret == "solution" else f"the mark is {CANARY} here\n".encode()
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/file").write_bytes(DISGUISES[disguise](data))
    (tmp_path / "innocent.py").write_text("print('hello')\n")
    findings = look(tmp_path, evidence)
    assert {finding.path for finding in findings} == {"/deep/file"}, findings
    assert secret in {finding.kind for finding in findings}


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(SOLUTION[SOLUTION.index(b"def smallest") :], id="a function"),
        pytest.param(
            SOLUTION[SOLUTION.index(b"def count") : SOLUTION.index(b"def smallest")].replace(
                b"count_ways", b"solve"
            ),
            id="a function under another name",
        ),
        pytest.param(b"\n# then\n".join(SOLUTION.splitlines()[5:9]), id="a few lines, torn"),
    ],
)
def test_a_part_of_the_solution_is_enough(tmp_path: Path, evidence: Evidence, part: bytes) -> None:
    (tmp_path / "notes.md").write_bytes(b"I found out:\n" + part)
    (finding,) = look(tmp_path, evidence)
    assert (finding.path, finding.kind) == ("/notes.md", "solution")
    assert "/app/change.py of the solution" in finding.reason


def test_lines_spread_over_many_files_are_added_up(tmp_path: Path, evidence: Evidence) -> None:
    for number, line in enumerate(SOLUTION.splitlines()):
        (tmp_path / f"{number}.txt").write_bytes(line)
    found = look(tmp_path, evidence)
    assert any("files together hold" in finding.reason for finding in found), found


def test_one_line_that_others_write_too_betrays_nothing(tmp_path: Path, evidence: Evidence) -> None:
    (tmp_path / "other.py").write_text("for total in range(1, amount + 1):\n    print(total)\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "prose").write_text("The quick brown fox jumps over the lazy dog. " * 4096)
    assert look(tmp_path, evidence) == []


def test_a_canary_is_found_in_names_and_where_links_lead(
    tmp_path: Path, evidence: Evidence
) -> None:
    (tmp_path / CANARY).mkdir()
    (tmp_path / "link").symlink_to(f"/nowhere/{CANARY.upper()}")
    reasons = {finding.path: finding.reason for finding in look(tmp_path, evidence)}
    assert "its name" in reasons[f"/{CANARY}"]
    assert "where it leads" in reasons["/link"]


def test_names_that_are_no_text_can_be_told(tmp_path: Path, evidence: Evidence) -> None:
    Path(os.fsdecode(bytes(tmp_path) + b"/a\xff")).write_text(CANARY)
    (tmp_path / "b").write_bytes(tar_of(os.fsdecode(b"c\xfe"), zlib.compress(SOLUTION)))
    found = look(tmp_path, evidence)
    assert {(finding.path, finding.inside) for finding in found} == {
        ("/a\\xff", ()),
        ("/b", ("gzip", "tar:c\\xfe", "zlib")),
    }
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[Finding]) == found


def test_a_link_out_of_the_tree_is_not_followed(tmp_path: Path, evidence: Evidence) -> None:
    (tmp_path / "secret").write_bytes(SOLUTION)
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").symlink_to(tmp_path / "secret")
    (root / "directory").symlink_to(tmp_path)
    assert look(root, evidence) == []


def test_text_that_is_not_ascii_is_found_in_utf_16(tmp_path: Path) -> None:
    evidence = evidence_of([], ["żółta łódź płynie"])
    (tmp_path / "note").write_bytes("tu żółta łódź płynie dalej".encode("utf-16-le"))
    (finding,) = look(tmp_path, evidence)
    assert finding.inside == ("utf-16-le",)


# --- Repositories ------------------------------------------------------------------------------


def git(directory: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "gc.auto=0", *arguments],
        cwd=directory,
        check=True,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": str(directory), "GIT_CONFIG_NOSYSTEM": "1"},
    ).stdout.strip()


def repository_with_history(root: Path) -> Path:
    """Return a repository whose one commit is innocent; the fix was committed and reset away."""
    where = root / "repo"
    where.mkdir()
    git(where, "init", "-q", "-b", "main")
    broken = SOLUTION.replace(b"+=", b"-=").replace(b"min(", b"max(")
    (where / "change.py").write_bytes(b"# nothing yet\n")
    git(where, "add", ".")
    git(where, "commit", "-qm", "begin")
    (where / "change.py").write_bytes(broken + b"\n# the first attempt\n")
    git(where, "commit", "-qam", "try")
    (where / "change.py").write_bytes(SOLUTION + b"\n# the first attempt\n")
    git(where, "commit", "-qam", "fix")
    return where


@pytest.mark.parametrize("state", ["loose", "packed", "packed under another name"])
def test_a_fix_that_was_reset_away_is_found_in_the_repository(
    tmp_path: Path, evidence: Evidence, state: str
) -> None:
    where = repository_with_history(tmp_path)
    if state != "loose":
        git(where, "repack", "-adfq", "--depth=50")
    git(where, "reset", "-q", "--hard", "HEAD~2")
    if state == "packed under another name":
        (pack,) = (where / ".git/objects/pack").glob("*.pack")
        pack.rename(tmp_path / "data.bin")
        git(where, "init", "-q")
    found = look(tmp_path, evidence)
    kinds = {(Path(finding.path).suffix, finding.inside[:1]) for finding in found}
    wanted = {
        "loose": ("", ("zlib",)),
        "packed": (".pack", ("git pack",)),
        "packed under another name": (".bin", ("git pack",)),
    }
    assert wanted[state] in kinds, found


def test_a_delta_in_a_pack_is_put_together(tmp_path: Path) -> None:
    where = tmp_path / "repo"
    where.mkdir()
    git(where, "init", "-q", "-b", "main")
    filler = [f"line {number} of what is long enough for a delta" for number in range(400)]
    (where / "a.txt").write_text("\n".join(filler))
    git(where, "add", ".")
    git(where, "commit", "-qm", "one")
    # Its two halves are in two objects; only together are they the canary.
    (where / "a.txt").write_text("\n".join(["never-say-this", *filler]))
    git(where, "commit", "-qam", "two")
    (where / "a.txt").write_text("\n".join(["never-say-this", "aloud-or-written", *filler[:-3]]))
    git(where, "commit", "-qam", "three")
    git(where, "repack", "-adfq", "--depth=50", "--window=50")
    git(where, "checkout", "-q", "HEAD~2")
    (where / "a.txt").unlink()
    text = "never-say-this\naloud-or-written\nline 0 of what is long"
    found = look(tmp_path, evidence_of([], [text]))
    assert [finding.inside for finding in found] == [("git pack",)]


# --- Bounds ------------------------------------------------------------------------------------


def test_a_bomb_is_unreadable_and_costs_no_more_than_the_bounds(
    tmp_path: Path, evidence: Evidence
) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    for name, data in {
        "bomb.gz": bomb,
        "bomb.zip": zip_of("zeros", bytes(64 << 20)),
        "bomb.zst": bytes(cramjam.zstd.compress(bytes(64 << 20))),
        "large": bytes(9 << 20),
    }.items():
        (tmp_path / name).write_bytes(data)
    bounds = Bounds(file_bytes=8 << 20, unfolded_bytes=16 << 20)
    found = look(tmp_path, evidence, bounds=bounds)
    assert {(finding.path, finding.kind) for finding in found} == {
        (f"/{name}", "unreadable") for name in ("bomb.gz", "bomb.zip", "bomb.zst", "large")
    }


def test_what_is_packed_too_often_or_closed_is_told_and_may_be_allowed(
    tmp_path: Path, evidence: Evidence
) -> None:
    data = SOLUTION
    for _ in range(7):
        data = gzip.compress(data)
    (tmp_path / "deep.gz").write_bytes(data)
    letters = SOLUTION
    for _ in range(6):
        letters = base64.b64encode(letters)
    (tmp_path / "deep.txt").write_bytes(letters)
    (tmp_path / "closed.lz4").write_bytes(bytes(cramjam.lz4.compress(SOLUTION)))
    (tmp_path / "closed.7z").write_bytes(b"7z\xbc\xaf\x27\x1c" + bytes(64))
    (tmp_path / "torn.pack").write_bytes(b"PACK\0\0\0\2\0\0\0\5" + bytes(64))
    closed = bytearray(zip_of("a", SOLUTION))
    closed[6] |= 1
    closed[closed.rindex(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "closed.zip").write_bytes(closed)
    found = look(tmp_path, evidence)
    reasons = {finding.path: finding.reason for finding in found if finding.kind == "unreadable"}
    assert "packed more than 5 times" in reasons["/deep.gz"]
    assert "packed more than 5 times" in reasons["/deep.txt"]
    assert "lz4" in reasons["/closed.lz4"]
    assert "7z" in reasons["/closed.7z"]
    assert "git pack" in reasons["/torn.pack"]
    assert "password" in reasons["/closed.zip"]
    assert look(tmp_path, evidence, allow=("/deep.*", "**/closed.*", "/torn.pack")) == []


def test_a_path_that_is_too_long_to_be_followed_is_told(tmp_path: Path, evidence: Evidence) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=here)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    (found,) = look(tmp_path, evidence)
    assert (found.kind, found.path.count("/")) == ("unreadable", len(found.path) // 251)
    assert "too long" in found.reason


# --- Credentials and residue ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5v\n",
        "AWS_ACCESS_KEY_ID=AKIAZ7XQ3LMN2KPQRSTU",
        "token: ghp_" + "a1B2c3D4e5F6" * 3,
        "OPENAI_API_KEY=sk-proj-" + "Zx9" * 15,
        "https://builder:Tr0ub4dor-and-3@registry.example.org/simple",
        "-----BEGIN USER NKEY SEED-----\nSU" + "AB2" * 18 + "AB\n",
    ],
)
def test_a_credential_is_found_by_how_it_looks(tmp_path: Path, text: str) -> None:
    (tmp_path / "plain").write_text(text)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"x" + text.encode().join([b"\n", b"\n"])))
    found = look(tmp_path, Evidence())
    assert {(finding.path, finding.kind) for finding in found} == {
        ("/plain", "credential"),
        ("/packed.gz", "credential"),
    }
    assert all(text[12:40] not in str(finding) for finding in found)


def test_what_builds_leave_is_found_by_its_path(tmp_path: Path) -> None:
    for path in ("root/.ssh/known_hosts", "app/.git/HEAD", "app/main.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    found = look(tmp_path, Evidence(), residue=("**/.ssh", "**/.git"))
    assert {finding.path for finding in found} == {
        "/app/.git",
        "/app/.git/HEAD",
        "/root/.ssh",
        "/root/.ssh/known_hosts",
    }


# --- What is known anyway ------------------------------------------------------------------------


def test_what_a_broken_file_shares_with_the_solution_is_no_secret(
    tmp_path: Path, evidence: Evidence
) -> None:
    broken = SOLUTION.replace(b"ways[total] += ways", b"ways[total] -= ways")
    less = evidence.without({"/app/change.py": broken})
    (tmp_path / "change.py").write_bytes(broken)
    assert look(tmp_path, evidence)
    assert look(tmp_path, less) == []
    (tmp_path / "change.py.bak").write_bytes(SOLUTION)
    assert [finding.path for finding in look(tmp_path, less)] == ["/change.py.bak"]


def test_a_secret_of_which_nothing_is_left_is_refused_rather_than_not_looked_for(
    evidence: Evidence,
) -> None:
    comments = b"".join(b"# " + line for line in SOLUTION.splitlines(True))
    for shown in (SOLUTION, comments):
        with pytest.raises(NoSecret, match="every line of /app/change") as caught:
            evidence.without({"/app/change.py": b"before\n" + shown})
        assert caught.value.code is ErrorCode.INVALID
    with pytest.raises(DsecError, match="write a canary"):
        evidence_of([secret_of("solution", "/a", b"x = 2\n")])
    short = [secret_of("solution", "/a", b"x = 2\n# marker-marker-marker\n")]
    assert evidence_of(short, ["marker-marker-marker"]).secrets
    with pytest.raises(DsecError, match="too short"):
        evidence_of([], ["' '"])


def test_secrets_are_read_with_the_paths_where_they_are_laid(tmp_path: Path) -> None:
    (tmp_path / "solution/app").mkdir(parents=True)
    (tmp_path / "solution/app/change.py").write_bytes(SOLUTION)
    (tmp_path / "solution/app/link").symlink_to("/etc/passwd")
    (secret,) = read_secrets("solution", tmp_path / "solution")
    assert secret.path == "/app/change.py"
    assert "the function count_ways" in secret.blocks.values()
    with pytest.raises(DsecError) as caught:
        read_secrets("tests", tmp_path / "none")
    assert caught.value.code is ErrorCode.NOT_FOUND


def test_what_the_documents_say_is_not_seen_is_not_seen(tmp_path: Path, evidence: Evidence) -> None:
    """Should one of these be found some day, the page is to say so."""
    (tmp_path / "turned").write_bytes(codecs.encode(SOLUTION.decode(), "rot13").encode())
    (tmp_path / "reversed").write_bytes(SOLUTION[::-1])
    (tmp_path / "base85").write_bytes(base64.b85encode(SOLUTION))
    (tmp_path / "decimal").write_text(", ".join(map(str, SOLUTION)))
    (tmp_path / "entities").write_text("".join(f"&#{byte};" for byte in SOLUTION))
    (tmp_path / "octal").write_text("".join(f"\\{byte:03o}" for byte in SOLUTION))
    (tmp_path / "uuencode").write_bytes(codecs.encode(SOLUTION, "uu"))
    (tmp_path / "deflate").write_bytes(zlib.compress(SOLUTION, wbits=-15))
    assert look(tmp_path, evidence) == []
