"""Offsets inside messages: set where they must be, and no other byte is touched."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core.rocketmq import encode_messages
from dledger_core.rocketmq.convert.messages import QueueCounters, located_in, patch
from dledger_core.rocketmq.message.integrity import own_crc_rows

TOPICS = st.sampled_from(["a", "orders", "t" * 200, "主题"])
INT64 = st.integers(-(2**63), 2**63 - 1)
MESSAGE = st.fixed_dictionaries(
    {
        "topic": TOPICS,
        "queue_id": st.integers(0, 2),
        "body": st.binary(max_size=40),
        "sys_flag": st.sampled_from([0, 0, 0, 4, 8, 12]),
        "queue_offset": st.integers(0, 2**62),
        "physical_offset": INT64,
        "store_host": st.sampled_from(["127.0.0.1:1", "[::1]:2"]),
    }
)
BODY = st.one_of(st.binary(max_size=120), MESSAGE, MESSAGE)


def encoded(rows: list[bytes | dict]) -> list[bytes]:
    """Bodies: the dicts as message records, the rest as they are."""
    return [
        row if isinstance(row, bytes) else encode_messages(**{n: [v] for n, v in row.items()})[0].as_py()
        for row in rows
    ]


def with_own_crc(record: bytes) -> bytes:
    """The record with RocketMQ's CRC property behind its others, as a broker with enabledAppendPropCRC writes it."""
    name = b"__CRC32#\x01"
    size = len(record) + len(name) + 11
    at = _properties_at(record)
    length = struct.unpack_from(">h", record, at)[0] + len(name) + 11
    plain = struct.pack(">i", size) + record[4:at] + struct.pack(">h", length) + record[at + 2 :]
    digits = f"{zlib.crc32(plain) & 0x7FFFFFFF:010d}"[::-1].encode()
    return plain + name + digits + b"\x02"


def _properties_at(record: bytes) -> int:
    flags = struct.unpack_from(">i", record, 36)[0]
    at = 84 + (12 if flags & 0x10 else 0) + (12 if flags & 0x20 else 0)
    at += 4 + struct.unpack_from(">i", record, at)[0]
    wide = struct.unpack_from(">i", record, 4)[0] == -626843477
    return at + (2 + struct.unpack_from(">h", record, at)[0] if wide else 1 + record[at])


def columns(bodies: list[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
    lengths = np.array([len(body) for body in bodies], np.int64)
    return b"".join(bodies), np.cumsum(lengths) - lengths, lengths


@settings(deadline=None)
@given(st.lists(BODY, min_size=1, max_size=12), st.randoms(use_true_random=False), st.booleans())
def test_patch_changes_offsets_only(rows: list[bytes | dict], chance: object, signed: bool) -> None:
    bodies = encoded(rows)
    if signed:
        bodies = [with_own_crc(b) if isinstance(row, dict) else b for b, row in zip(bodies, rows, strict=True)]
    blob, starts, lengths = columns(bodies)
    located = located_in(blob, starts, lengths)
    messages = [n for n, row in enumerate(rows) if isinstance(row, dict)]
    assert set(messages) <= set(located.rows.tolist())
    chosen = np.array([chance.random() < 0.7 for _ in located.rows], np.bool_)
    physical = np.array([chance.randrange(2**63) for _ in located.rows], np.int64)
    queue = np.array([chance.randrange(2**40) for _ in located.rows], np.int64)
    data = patch(located, chosen, physical, queue).tobytes()
    for place, row in enumerate(located.rows.tolist()):
        old = bodies[row]
        new = data[starts[row] : starts[row] + lengths[row]]
        if not chosen[place]:
            assert new == old
            continue
        assert struct.unpack_from(">qq", new, 20) == (queue[place], physical[place])
        end = len(old) - 11 if signed and row in messages else len(old)
        assert (new[:20], new[36:end]) == (old[:20], old[36:end])
        if signed and row in messages:
            crc = zlib.crc32(new[:-20]) & 0x7FFFFFFF
            assert (int(new[-11:-1][::-1]), new[-1]) == (crc, 2)
    others = set(range(len(bodies))) - set(located.rows.tolist())
    assert all(data[starts[n] : starts[n] + lengths[n]] == bodies[n] for n in others)


def test_wrong_crc_property_is_not_updated() -> None:
    (record,) = encoded([{"topic": "a", "queue_id": 0, "body": b"x"}])
    right = with_own_crc(record)
    wrong = bytearray(right)
    wrong[-3] = ord("0") + (wrong[-3] - ord("0") + 1) % 10
    blob, starts, lengths = columns([right, bytes(wrong), record])
    assert own_crc_rows(located_in(blob, starts, lengths)).tolist() == [0]


@settings(deadline=None)
@given(st.lists(st.lists(MESSAGE, max_size=8), max_size=6), st.integers(0, 20))
def test_queue_offsets_continue_after_broker_offsets(pieces: list[list[dict]], broker: int) -> None:
    counters = QueueCounters()
    expected: dict[tuple[str, int], int] = {}
    seen = 0
    for rows in pieces:
        blob, starts, lengths = columns(encoded(rows))
        located = located_in(blob, starts, lengths)
        kept = np.arange(seen, seen + len(rows)) < broker
        counters = QueueCounters.restored(counters.saved())
        given_out = counters.assign(located, kept).tolist()
        wanted = []
        for row, stays in zip(rows, kept.tolist(), strict=True):
            queue = (row["topic"], row["queue_id"])
            if row["sys_flag"] in {4, 12}:
                wanted.append(row["queue_offset"] if stays else 0)
            elif stays:
                wanted.append(row["queue_offset"])
                expected[queue] = max(expected.get(queue, 0), row["queue_offset"] + 1)
            else:
                wanted.append(expected.get(queue, 0))
                expected[queue] = wanted[-1] + 1
        assert given_out == wanted
        seen += len(rows)
