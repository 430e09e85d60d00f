"""The spool on disk: order, locks, adoption, damage and its bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from rocksdict import Options, Rdict

from dsec_common.behavior import BehaviorLog
from dsec_common.errors import DsecError, ErrorCode
from dsec_common.log_frame import CorruptFrameError, LogRecord, decode_frame, encode_frame
from dsec_common.log_shed import SPOOL_SHED, Shedder
from dsec_common.log_spool import FRAME_OVERHEAD_BYTES, Spool
from dsec_common.topics import BEHAVIOR_LOGS, METERING


def row(text: str, *, detail: str = "") -> LogRecord:
    log = BehaviorLog(sandbox_id="node-1.a", action=text, output_text=detail)
    return LogRecord(BEHAVIOR_LOGS, b"node-1.a", log.serialize(), 1, is_behavior=True)


def actions(spool: Spool) -> list[str]:
    return [
        BehaviorLog.parse(record.value).action
        for _, records in spool.peek(1000, 1 << 30)
        for record in records
    ]


def test_a_frame_reads_back_as_it_was_written() -> None:
    records = [row("a"), LogRecord(METERING, b"\x00\xff", b"", 0, is_behavior=False)]
    assert decode_frame(encode_frame(records)) == records


@pytest.mark.parametrize("position", [0, 3, 5, 12, -1])
def test_a_frame_with_one_changed_byte_is_refused(position: int) -> None:
    frame = bytearray(encode_frame([row("a")]))
    frame[position] ^= 1
    with pytest.raises(CorruptFrameError):
        decode_frame(bytes(frame))


def test_a_truncated_frame_is_refused() -> None:
    frame = encode_frame([row("a")])
    for length in (0, 3, 7, len(frame) - 1):
        with pytest.raises(CorruptFrameError):
            decode_frame(frame[:length])


def test_frames_come_back_in_order_after_a_restart(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path, "test")
    for number in range(300):
        spool.put([row(f"a{number}")])
    spool.delete([1, 2, 3])
    spool.close()
    spool = Spool.create(tmp_path, "test")
    assert actions(spool) == [f"a{number}" for number in range(3, 300)]
    assert spool.put([row("last")])
    assert actions(spool)[-1] == "last"
    spool.delete(range(1, 400))
    assert spool.pending_bytes == 0
    spool.close()
    assert not any(tmp_path.iterdir())


def test_two_processes_of_one_name_never_share_a_directory(tmp_path: Path) -> None:
    first = Spool.create(tmp_path, "test")
    second = Spool.create(tmp_path, "test")
    assert first.directory != second.directory
    assert Spool.adopt(first.directory) is None
    first.close()
    second.close()
    assert Spool.adopt(first.directory) is None


def test_a_spool_is_taken_over_only_under_its_own_name(tmp_path: Path) -> None:
    left = Spool.create(tmp_path, "node-agent")
    left.put([row("a")])
    left.close()
    other = Spool.create(tmp_path, "node")
    assert other.pending_frames == 0
    same = Spool.create(tmp_path, "node-agent")
    assert actions(same) == ["a"]
    other.close()
    same.close()


def test_frames_move_from_an_adopted_spool_and_leave_nothing(tmp_path: Path) -> None:
    left = Spool.create(tmp_path, "left")
    for number in range(10):
        left.put([row(f"a{number}")])
    left.close()
    spool = Spool.create(tmp_path, "test")
    adopted = Spool.adopt(left.directory)
    assert adopted is not None
    assert not spool.move_from(adopted, max_bytes=1)
    assert adopted.pending_frames == 9
    assert spool.move_from(adopted, max_bytes=1 << 20)
    adopted.close()
    assert actions(spool) == [f"a{number}" for number in range(10)]
    spool.close()
    assert [path.name for path in tmp_path.iterdir()] == [spool.directory.name]


def test_a_damaged_frame_is_counted_and_does_not_block_the_others(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path, "test")
    for number in range(3):
        spool.put([row(f"a{number}")])
    spool.close()
    database = Rdict(str(spool.directory / "frames"), options=Options(raw_mode=True))
    database[(2).to_bytes(8, "big")] = b"DSF1 rubbish"
    database.close()
    spool = Spool.create(tmp_path, "test")
    assert actions(spool) == ["a0", "a2"]
    assert spool.corrupt_frames == 1
    assert spool.pending_frames == 2
    spool.close()


def test_a_database_that_cannot_be_opened_is_set_aside_and_kept(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path, "test")
    spool.put([row("a")])
    spool.close()
    for path in (spool.directory / "frames").iterdir():
        if path.name.startswith(("CURRENT", "MANIFEST", "OPTIONS")):
            path.write_bytes(b"rubbish")
        else:
            path.unlink()
    spool = Spool.create(tmp_path, "test")
    spool.put([row("b")])
    assert "b" in actions(spool)
    spool.delete(range(10))
    spool.close()


def test_a_spool_root_that_is_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    root = tmp_path / "spool"
    root.write_text("")
    with pytest.raises(DsecError, match=str(root)):
        Spool.create(root, "test")


def test_a_full_spool_sheds_detail_first_and_whole_records_last(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path, "test")
    shedder = Shedder(spool, 30_000, "test")
    for number in range(200):
        shedder.make_room(700, in_flight=0)
        spool.put([row(f"a{number}", detail="x" * 500)])
        assert spool.pending_bytes <= 30_000
        if shedder.records_shed:
            assert shedder.details_shed > shedder.records_shed
    left = actions(spool)
    assert left[-1] == "a199"
    assert left == [f"a{number}" for number in range(200 - len(left), 200)]
    assert shedder.records_shed == 200 - len(left)
    spool.delete(range(1000))
    spool.close()


def test_frames_in_flight_are_never_shed(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path, "test")
    shedder = Shedder(spool, 5_000, "test")
    for number in range(20):
        shedder.make_room(700, in_flight=2)
        spool.put([row(f"a{number}", detail="x" * 500)])
    frames = spool.peek(2, 1 << 20)
    assert [number for number, _ in frames] == [1, 2]
    assert all(b"x" * 500 in records[0].value for _, records in frames)
    spool.delete(range(1000))
    spool.close()


def test_what_was_shed_is_said_for_each_topic_and_that_is_not_shed_itself(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path, "test")
    shedder = Shedder(spool, 1_000_000, "test")
    assert shedder.report(0.0) == []
    shedder.count("dsec-behavior-logs.other", details=3, records=1)
    shedder.count(METERING, records=2)
    other, metering = shedder.report(0.0)
    said = BehaviorLog.parse(other.value)
    assert (said.action, said.project) == (SPOOL_SHED, "other")
    assert said.attributes["details_shed_total"] == "3"
    assert said.attributes["records_shed_total"] == "1"
    assert metering.topic == BEHAVIOR_LOGS
    shedder.reported(0.0)
    shedder.count("dsec-behavior-logs.other", details=1)
    assert shedder.report(0.5) == []
    assert len(shedder.report(1.5)) == 1
    spool.put([other])
    Shedder(spool, 0, "test")._shed_detail(1)
    assert spool.peek(1, 1)[0][1] == [other]
    spool.delete([1])
    spool.close()


def test_a_spool_of_tiny_frames_has_a_bound_too(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path, "test")
    spool.put([LogRecord("t", b"", b"", 0, is_behavior=False)])
    assert spool.pending_bytes > FRAME_OVERHEAD_BYTES
    spool.delete([1])
    assert spool.pending_bytes == 0
    spool.close()


def test_a_database_that_refuses_raises_a_typed_error(tmp_path: Path) -> None:
    spool = Spool.create(tmp_path, "test")
    spool.put([row("a")])
    working = spool._database
    spool._database = Rdict(str(tmp_path / "broken"), options=Options(raw_mode=True))
    spool._database.close()
    with pytest.raises(DsecError) as refused:
        spool.put([row("b")])
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert refused.value.retryable
    spool._database = working
    assert actions(spool) == ["a"]
    spool.close()
