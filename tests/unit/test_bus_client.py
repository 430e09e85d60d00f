"""Which messages go the short way: those in which nothing is out of the ordinary."""

from __future__ import annotations

import pytest

from dsec_common.bus_client import DirectClient, header_block, plain_headers


def test_plain_headers_come_out_as_they_went_in() -> None:
    headers = {"content-type": "application/msgpack", "Nats-Service-Error": "invalid: ü"}
    block = header_block(headers)
    assert block == (
        b"NATS/1.0\r\ncontent-type: application/msgpack\r\n"
        b"Nats-Service-Error: invalid: \xc3\xbc\r\n\r\n"
    )
    assert plain_headers(block) == headers


@pytest.mark.parametrize(
    "headers",
    [
        {"text": "two\r\nlines"},
        {"text": "two\nlines"},
        {"text": "half\ra line"},
        {"two words": "x"},
        {"": "x"},
        {"a:b": "x"},
        {"ü": "x"},
    ],
)
def test_what_could_be_taken_for_more_headers_is_left_to_the_library(
    headers: dict[str, str],
) -> None:
    assert header_block(headers) is None


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1\r\n\r\n",
        b"NATS/1.0\r\ntwo words: x\r\n\r\n",
        b"NATS/1.0\r\n folded: x\r\n\r\n",
    ],
)
def test_status_lines_and_odd_names_are_left_to_the_library(block: bytes) -> None:
    assert plain_headers(block) is None


def test_white_space_around_a_value_and_bytes_that_are_no_text_are_read_as_by_the_library() -> None:
    block = b"NATS/1.0\r\na:b\r\nc: \t d \r\ne: \xff\r\n\r\n"
    assert plain_headers(block) == {"a": "b", "c": "d", "e": "\ufffd"}


def test_without_a_connection_nothing_goes_the_short_way() -> None:
    assert not DirectClient().publish_at_once("a.b", "", b"", None)
