from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from dsec_common.behavior import BehaviorLog
from dsec_sandboxd.network.netlink import attribute, packed
from dsec_sandboxd.network.plan import DEVICE_INDEX_BASE
from dsec_sandboxd.network.refusals import SAMPLES_AT_ONCE, Refusal, Samples, refusals
from dsec_sandboxd.network_door import DenialSteps
from dsec_sandboxd.step_log import PLATFORM_ACTIONS, StepLog
from network_world import record_of


class Written:
    def __init__(self) -> None:
        self.records: list[BehaviorLog] = []

    def append(self, record: BehaviorLog) -> None:
        self.records.append(record)


def test_what_was_refused_is_a_step_of_the_platforms_own() -> None:
    written = Written()
    told = {"address": "10.9.9.9", "protocol": "tcp", "port": "443"}
    DenialSteps(StepLog("n1", written))(record_of("a"), told)
    (step,) = written.records
    assert (step.action, step.status, step.sandbox_id) == ("network_denied", "denied", "n1.a")
    assert step.attributes == told
    assert {"network_denied", "set_network", "enter_agent_phase", "open_port"} <= PLATFORM_ACTIONS


def test_a_few_samples_pass_at_once_and_then_one_a_second() -> None:
    samples = Samples()
    assert sum(samples.take(100.0) for _ in range(1000)) == SAMPLES_AT_ONCE
    assert not samples.take(100.5)
    assert samples.take(101.5)
    assert samples.seen == 1002


def _logged(index: int, packet: bytes) -> bytes:
    body = bytes(4) + attribute(4, struct.pack(">I", index)) + attribute(9, packet)
    return packed(4 << 8, 0, 0, body)


def _ipv4(protocol: int, rest: bytes) -> bytes:
    return bytes([0x45]) + bytes(8) + bytes([protocol]) + bytes(6) + bytes([10, 1, 2, 3]) + rest


def test_a_refused_packet_tells_who_wanted_what() -> None:
    tcp = _ipv4(6, struct.pack(">HH", 40000, 443))
    icmp = bytes([0x60]) + bytes(5) + bytes([58, 64]) + bytes(16) + bytes([0xFD] + [0] * 14 + [9])
    data = _logged(DEVICE_INDEX_BASE + 7, tcp) + _logged(DEVICE_INDEX_BASE, icmp)
    assert list(refusals(data)) == [
        Refusal(7, "10.1.2.3", "tcp", 443),
        Refusal(0, "fd00::9", "icmp", 0),
    ]


def test_packets_of_other_devices_and_cut_ones_tell_nothing() -> None:
    for data in (_logged(5, _ipv4(6, b"")), _logged(DEVICE_INDEX_BASE, b"\x45"), b"", b"\1"):
        assert list(refusals(data)) == []


@given(st.binary(max_size=200), st.binary(max_size=100))
def test_no_packet_of_a_sandbox_breaks_the_reader(data: bytes, packet: bytes) -> None:
    list(refusals(data))
    list(refusals(_logged(DEVICE_INDEX_BASE, packet)))
