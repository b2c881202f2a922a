"""The seeds of each target, by name: from our own encoders and from stores that Java wrote."""

from __future__ import annotations

import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pyarrow as pa

from dledger_core.control import Part, pack
from dledger_core.errors import BusyError, NotLeaderError
from dledger_core.ids import NO_INDEX, NO_TERM, NUMBER_MAX, Index, NodeId, Term
from dledger_core.net import codec
from dledger_core.net.frame import encode_frame
from dledger_core.net.hello import Hello
from dledger_core.net.messages import TABLES
from dledger_core.net.pieces import BulkQueue
from dledger_core.net.protocol import PREFACE, Type
from dledger_core.raft import messages as raft
from dledger_core.raft.batch import Batch
from dledger_core.raft.ready import HardState
from dledger_core.record import Columns, Records, encode, index_records
from dledger_core.rocketmq.message.layout import RECORD_BYTES_MIN
from dledger_core.storage.files.index_file import IndexFile
from dledger_core.storage.files.layout import Layout, LogMeta, save_log_meta
from dledger_core.storage.files.members_file import ConfigurationEntry, KnownConfigurations, members_file
from dledger_core.storage.files.meta_files import Checkpoint, hard_state_file, save_checkpoint
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.tables.tables import LogTables
from tests.fuzz.targets.messages import packed
from tests.fuzz.targets.peers import step
from tests.fuzz.targets.scanning import SEGMENT_BYTES
from tests.rocketmq.golden import NAMES as GOLDEN_MESSAGES
from tests.rocketmq.golden import messages
from tests.rocketmq.remoting.record_frames import recorded
from tests.support.faulty_files import FaultyFiles
from tests.support.field_values import header_of

Seeds = Iterator[tuple[str, bytes]]
STORES = Path(__file__).parents[1] / "storage" / "testdata"
N0, N1 = NodeId("n0"), NodeId("n1")


def _joined(buffers: list) -> bytes:
    return b"".join(map(bytes, buffers))


def encoded(bodies: list[bytes], first: int = 0, term: int = 1, position: int = 0, **more: object) -> Records:
    """Return one batch as stored on disk."""
    place = {"first_index": first, "term": term, "position": position, "timestamp_ms": 1001}
    return encode(Columns.from_bodies(bodies), **place, segment_bytes=SEGMENT_BYTES, **more)


def _batches() -> tuple:
    batches, first, position = [], 5, 96
    for bodies, term in (([b"a", b"bb" * 20], 2), ([b""], 3)):
        records = encoded(bodies, first, term, position)
        batch = Batch(Index(first), records.count, Term(term), records.nbytes, records)
        first, position = first + batch.count, position + batch.nbytes
        batches.append(batch)
    return tuple(batches)


def raft_messages() -> list:
    ends = {"sender": N0, "target": N1, "term": Term(3)}
    appended = {"prev_index": Index(4), "prev_term": Term(1), "commit_index": Index(2)}
    refused = {"hint_term": Term(1), "hint_first_index": Index(2), "last_index": Index(9)}
    return [
        raft.RequestVote(**ends, last_index=Index(7), last_term=Term(2), pre=True, transfer=False),
        raft.RequestVoteResponse(**ends, granted=True, pre=False),
        raft.AppendEntries(**ends, **appended, batches=_batches()),
        raft.AppendEntries(**ends, **appended, batches=()),
        raft.AppendEntriesResponse(**ends, accepted=False, match_index=Index(4), **refused),
        raft.Heartbeat(**ends, commit_index=Index(7), round=3),
        raft.HeartbeatResponse(**ends, round=3, last_index=Index(9)),
        raft.TimeoutNow(**ends),
    ]


def _hello(role: str = "peer") -> dict:
    return Hello(role, N1, "0" * 32, (3, 4), "127.0.0.1:1").to_header()


def frame() -> Seeds:
    sent = [_joined(codec.message_to_frame(7, message)) for message in raft_messages()]
    yield "messages", b"\1\6" + b"".join(sent)
    yield "hello", b"\3\0" + _joined(encode_frame(_hello()))
    yield "large", b"\0\x7f" + _joined(encode_frame({"t": 15, "n": 1}, bytes(66_000)))[:400]
    queue = BulkQueue()
    queue.add(encode_frame({"t": 42, "n": 1}, bytes(66_000)))
    yield "pieces", b"\5\xff" + _joined([*queue.take(), *encode_frame({"t": 44}), *queue.take()])
    yield "too-long", b"\1\0" + struct.pack(">III", 1 << 31, 1, 0) + b"\x80"
    yield "nested-arrays", b"\3\0" + struct.pack(">III", 308, 300, 0) + b"\x82\xa1t\1\xa1x" + b"\xdc\1\0" * 98


def connection() -> Seeds:
    beat = _joined(codec.message_to_frame(7, raft_messages()[5]))
    yield "accepted", b"\1\0" + PREFACE + _joined(encode_frame(_hello())) + beat
    yield "client", b"\1\x60" + PREFACE + _joined(encode_frame(_hello("client"))) + beat
    answer = Hello("peer", N1, "0" * 32, (3, 4)).to_response()
    yield "answer", b"\3\3" + _joined(encode_frame(answer)) + beat
    refusal = {"t": Type.FAILURE, "e": NotLeaderError("no", "here", "retry", {"leader": "n0"}).to_wire()}
    yield "refusal", b"\3\x70" + _joined(encode_frame(refusal))
    yield "tls", b"\0\0\x16\3\1"
    yield "http", b"\0\0GET / HTTP/1.1\r\n\r\n"
    yield "preface", b"\0\0" + PREFACE


def message() -> Seeds:
    for each in raft_messages():
        sent = _joined(codec.message_to_frame(7, each))
        size = int.from_bytes(sent[4:8], "big")
        name = type(each).__name__.lower() + ("-probe" if getattr(each, "batches", None) == () else "")
        yield (
            name,
            packed(sent[12 : 12 + size], sent[12 + size :], 1 if "k" in msgpack.unpackb(sent[12:][:size]) else 0),
        )
    huge = NUMBER_MAX
    record = encoded([b"x"], huge, 3)
    header = {"t": 42, "g": "g", "s": "n0", "to": "n1", "term": 3, "pi": huge - 1, "pt": 1, "c": -1, "n": 1}
    yield "last-index", packed(header | {"b": [[huge, 1, 3]]}, _joined(codec.records_payload([record])), 1)


def peer_session() -> Seeds:
    frames = dict(message())
    yield "frames", b"".join(step(0, data) for data in frames.values())
    for name, data in frames.items():
        yield f"{name}-restart", step(0, data) + step(4) + step(0, data) + step(3)
    yield "continue", step(1, b"\2\14\14new") + step(1, b"\3\15\15newer") + step(4) + step(1, b"\3\16\16")
    yield "overwrite-committed", step(1, b"\3\5\13other") + step(4) + step(1, b"\4\5\5other")
    yield "overwrite-tail", step(1, b"\3\14\13a") + step(1, b"\4\14\14b") + step(3) + step(1, b"\5\14\14c")
    yield "campaign", step(2, b"\170") + step(0, frames["requestvoteresponse"]) + step(4) + step(2, b"\170")
    vote = raft.RequestVote(sender=N1, target=N0, term=Term(9), last_index=Index(99), last_term=Term(8), pre=False)
    sent = _joined(codec.message_to_frame(7, vote))
    size = int.from_bytes(sent[4:8], "big")
    yield "vote", step(0, packed(sent[12 : 12 + size], sent[12 + size :])) + step(4) + step(2, b"\170")


def client_answers() -> Seeds:
    yield "right", b""
    yield "all-kinds", b"".join(step(kind % 6, msgpack.packb({"n": kind, "next": 3})) for kind in range(24))
    for kind in (1, 3, 5):
        for fields in ({"first": -1}, {"n": 1 << 62}, {"next": 1}, {"rows": [[1]]}, {"code": 401, "values": {"x": []}}):
            yield f"{kind}-{next(iter(fields))}", step(kind, msgpack.packb(fields)) * 12
    yield "payload", step(0) + step(0) + step(2, b"\0\x60\1\2\3") * 8
    yield "indexes", (step(0) + step(2, b"\0\x10\0\0\0\0\0\0\0\1")) * 6
    yield "garbage", step(4, PREFACE + bytes(40)) * 6
    busy = {"code": BusyError.code, "what": "busy", "values": {"retry_after_ms": 1 << 40}}
    yield "retry-later", step(5, msgpack.packb(busy)) * 9


def request() -> Seeds:
    base = {"r": 1, "g": "g"}
    columns = _joined(codec.columns_payload(Columns.from_bodies([b"a", b"", b"ccc"])))
    for table in TABLES:
        header = header_of(table) | base
        is_append = table.number is Type.APPEND
        yield table.number.name.lower(), packed(header | ({"n": 3} if is_append else {}), columns if is_append else b"")
    commit = {"op": "commit", "x": {"q": "query", "b": 7, "r": "run"}, "n": 1}
    yield "commit", packed(base | {"t": Type.TRANSACTION} | commit, _joined(codec.parts_payload([Part(1, 4, 4, 99)])))
    seen = _joined(codec.seen_payload({"g": codec.SeenLog(3, "uuid"), "other": codec.SeenLog(1)}))
    yield "await-two", packed(base | {"t": Type.AWAIT, "n": 2, "wait": 0}, seen)
    error = NotLeaderError("no", "here", "retry", {"leader": "n0"}).to_wire()
    yield "failure", packed(base | {"t": Type.FAILURE, "e": error}, b"")


def remoting() -> Seeds:
    frames = recorded("0.3.1.2")
    for name in ("append", "append-batch", "get", "metadata", "push", "transfer", "user-define", "vote"):
        yield name, frames[f"request/{name}"]
    yield "binary", b"".join(frames[f"request-binary/{name}"] for name in ("append", "get", "user-define"))
    yield "replies", b"".join(frame for name, frame in frames.items() if name.startswith("response/"))


def records() -> Seeds:
    for name, batch in (("few", encoded([b"a", b"", b"c" * 30], 3)), ("control", encoded([], 9, control=b"\x80"))):
        yield name, bytes([1, batch.count]) + _joined(codec.records_payload([batch]))
    many = encoded([b"%d" % number for number in range(20)], 100)
    yield "many", bytes([0, many.count]) + _joined(codec.records_payload([many]))


def _rows(batches: list[Records]) -> bytes:
    files = FaultyFiles()
    path = Path("/disk/index")
    files.mkdir(path)
    rows = IndexFile(Segments.load(files, path, SEGMENT_BYTES, write=True))
    for batch in batches:
        rows.write(int(batch.headers["index"][0]), index_records(batch))
    return b"".join(bytes(files.content(name)) for name in sorted(files.names))


def scan() -> Seeds:
    first = encoded([b"a" * 90, b"b"], 0)
    second = encoded([b"c" * 700], 2, 2, first.nbytes)
    third = encoded([b"d", b""], 3, 2, SEGMENT_BYTES)
    head = bytes(first.data) + bytes(second.data)
    blank = struct.pack(">ii", -1, SEGMENT_BYTES - len(head))
    data = (head + blank).ljust(SEGMENT_BYTES, b"\0") + bytes(third.data).ljust(SEGMENT_BYTES, b"\0")
    for rules in range(4):
        yield f"rolled-{rules}", bytes([rules]) + data + _rows([first, second, third]).rstrip(b"\0")
    yield "no-index", b"\0" + data.rstrip(b"\0")
    for generation, rules in (("0.3.1.2", 2), ("0.4.0", 3)):
        with tarfile.open(STORES / f"dledger-{generation}-single.tar.gz") as archive:
            name = min(m.name for m in archive if "/data/0" in m.name and m.isfile())
            data = archive.extractfile(name).read(600)
            rows = archive.extractfile(name.replace("/data/", "/index/")).read(160)
        yield f"java-{generation}", bytes([rules]) + data.ljust(2 * SEGMENT_BYTES, b"\0") + rows


def _step(which: int, kind: int, place: int, given: bytes = b"") -> bytes:
    return struct.pack(">BBHB", which, kind, place, len(given)) + given


def store() -> Seeds:
    for which in range(4):
        yield f"whole-{which}", bytes([which])
        yield f"flip-{which}", bytes([which]) + _step(1, 0, 60, b"\1")
        yield f"cut-{which}", bytes([which]) + _step(3, 2, 300)
        yield f"moved-{which}", bytes([which]) + _step(2, 4, 0, b"\0\x80\4")
    yield "gone", b"\0" + _step(0, 5, 0) + _step(4, 5, 0)
    yield "zeros", b"\1" + _step(2, 6, 48, b"\4")
    yield "stale", b"\1" + _step(2, 7, 1)
    yield "overwritten", b"\3" + _step(5, 1, 30, b"9" * 6) + _step(6, 3, 0, b"x")


def hard_state() -> Seeds:
    for name, term, vote in (("vote", 5, NodeId("n0")), ("none", 3, None), ("old", 2, NodeId("n0"))):
        yield (
            name,
            _written(lambda files, path, state: hard_state_file(path).save(files, state), HardState(Term(term), vote)),
        )


def _written(save, value) -> bytes:
    files, path = FaultyFiles(), Path("/disk/meta/file")
    files.mkdir(path.parent)
    save(files, path, value)
    return bytes(files.content(path))


def log_json() -> Seeds:
    made = {"profile": "B", "group": "g", "node_id": "n0", "data_segment_bytes": 4096, "index_segment_bytes": 1024}
    yield "new", _written(save_log_meta, LogMeta(**made))
    later = {"log_uuid": "0" * 32, "first_position": 8192, "first_index": 77, "previous_term": 3, "foreign_end": 5}
    yield "later", _written(save_log_meta, LogMeta(**made, **later))
    yield "profile-a", _written(save_log_meta, LogMeta(**made | {"profile": "A"}, broker_end_index=4))


def checkpoint() -> Seeds:
    yield "one", _written(save_checkpoint, Checkpoint(99, 90, 123_456))
    yield "none", _written(save_checkpoint, Checkpoint(-1, -1, 0))


def members() -> Seeds:
    def save(files, path, value) -> None:
        members_file(Layout(path.parent.parent)).save(files, value)
        files.replace(path, files.read(path.parent / "members"))

    bootstrapped = ConfigurationEntry(NO_INDEX, NO_TERM, b"bootstrapped")
    later = ConfigurationEntry(Index(77), Term(3), bytes(range(256)))
    yield "bootstrapped", _written(save, KnownConfigurations((bootstrapped,)))
    yield "later", _written(save, KnownConfigurations((bootstrapped, later), next_start=(Index(500), (later,))))
    yield "lost", _written(save, KnownConfigurations(lost=True))


def _bodies() -> list[bytes]:
    transaction = {"q": "query", "b": 1, "r": "run"}
    kinds = [
        {},
        {"k": "log", "u": "0" * 32},
        {"k": "producer", "p": "p", "e": 0, "s": 0, "n": 3, "c": 7},
        {"k": "attempt", "a": "u1", "n": 2, "c": 8} | transaction,
        {"k": "attempt", "a": "u2", "n": 1, "c": 9} | transaction,
        {"k": "commit", "parts": [[13, 14, 2, 8]]} | transaction,
        {"k": "attempt", "a": "u3", "n": 2, "c": 8} | transaction | {"b": 2},
        {"k": "abort"} | transaction | {"b": 2},
        {"k": "attempt", "a": "u4", "n": 2, "c": 8} | transaction | {"b": 3, "r": "run2"},
        {"k": "attempt", "a": "", "n": 0, "c": 0, "f": 0, "o": True} | transaction | {"q": "unknown"},
        {"k": "abort"} | transaction | {"q": "unknown"},
    ]
    return [pack(fields) for fields in kinds]


def tables() -> Seeds:
    made = LogTables()
    yield "empty", b"\0" + made.snapshot()
    for number, body in enumerate(_bodies()):
        made.apply(Index(4 * number), 1000 * number, body)
    yield "full", b"\0" + made.snapshot()
    yield "mutable", b"\1" + made.snapshot()


def _framed(rows: list[bytes]) -> bytes:
    return b"".join(struct.pack(">H", len(row)) + row for row in rows)


def control() -> Seeds:
    yield "all", _framed(_bodies())
    for number, body in enumerate(_bodies()):
        yield f"kind-{number}", _framed([body])


def config() -> Seeds:
    yield "small", b'peers = "n0-127.0.0.1:40001"\nself-id = "n0"\n'
    yield (
        "full",
        (
            b'peers = "n0-a:1;n1-b:2;n2-c:3"\nself-id = "n1"\ngroup = ["a", "b,c"]\ndir = "/srv/log"\n'
            b'host = "0.0.0.0"\n'
            b'profile = "A"\ndurability = "page-cache"\ndata-segment-bytes = "1GiB"\nindex-segment-bytes = 1048576\n'
            b'tick-ms = 10\nelection-ms = 500\npreferred-leaders = ["n1"]\ninflight-bytes = "64 MiB"\n'
        ),
    )


def broker_conf() -> Seeds:
    yield (
        "full",
        (
            b"# a broker\nbrokerName = b\nenableDLegerCommitLog=true\ndLegerGroup=g\ndLegerSelfId:n0\n"
            b"dLegerPeers=n0-127.0.0.1:40911;\\\n  n1-127.0.0.1:40912\nstorePathRootDir=/data/store\n"
            b"mappedFileSizeCommitLog=1073741824\n"
        ),
    )
    yield "escapes", b"dLegerGroup=\\u0067\ndLegerPeers=n0-h:1\ndLegerSelfId=n0\n! note\n"


def principals() -> Seeds:
    digest = b"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    yield "full", b'[ingest]\ntoken-sha256 = ["' + digest + b'"]\nread = ["a", "b"]\nappend = ["*"]\nadmin = []\n'
    yield "quoted", b'["a@b"]\nread = ["*"]\n["c"]\n'


def peers() -> Seeds:
    yield "three", b"n0-127.0.0.1:40001;n1-host.example:40002;n2-[::1]:40003"
    yield "spaces", b" n0-a:1 ; ;n1-b:2;"


def _compressed(row: bytes, kind: int, body: bytes) -> bytes:
    """Returns a V1 record of IPv4 hosts with another body, compressed."""
    codec_name = {1: "lz4", 2: "zstd"}.get(kind)
    if codec_name:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, codec_name) as stream:
            stream.write(body)
        opened = sink.getvalue().to_pybytes()
    else:
        opened = zlib.compress(body)
    old = int.from_bytes(row[84:88], "big")
    changed = row[:36] + struct.pack(">i", 1 | kind << 8) + row[40:84] + struct.pack(">i", len(opened)) + opened
    changed += row[88 + old :]
    return struct.pack(">i", len(changed)) + changed[4:]


def rocketmq() -> Seeds:
    seen = set()
    for name in GOLDEN_MESSAGES:
        for row in messages(name).values():
            key = row[:8][4:], row[36:40], len(row) // 256
            if len(row) < 600 and key not in seen and len(seen) < 8:
                seen.add(key)
                yield f"golden-{len(seen)}", _framed([row])
    plain = next(row for row in messages(GOLDEN_MESSAGES[0]).values() if row[36:40] == bytes(4))
    yield "compressed", _framed([_compressed(plain, kind, b"body" * 9) for kind in (0, 1, 2)])
    yield "short-and-null", _framed([plain, plain[: RECORD_BYTES_MIN - 1], plain[:-1]]) + b"\xff\xff"


def properties() -> Seeds:
    yield "two", _framed([b"KEYS\1k\2TAGS\1t\2", b"", b"a\1b\2a\1c"])
    yield "odd", _framed([b"\1x\2y\1\2\2TAGS\1\1\2", b"\2\2", b"\xff\1\xfe\2TAGS\1\xc3"])
