"""Records frames as Java DLedger's own classes encode them: ``python -m tests.rocketmq.remoting.record_frames``.

Every message is built with the setters of the release's protocol classes, turned into JSON by its fastjson and into a
frame by its ``RemotingCommand.encode``, as ``DLedgerClientRpcNettyService`` and ``DLedgerRpcNettyService`` do. What
comes out lies in ``testdata/frames-<version>.json``: hex, by name. ``tests/interop/test_java_clients.py`` checks that
the classes still make the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.interop.java_dledger import JavaDLedger, jvm

TESTDATA = Path(__file__).with_name("testdata")
VERSIONS = ("0.3.1.2", "0.4.0")
BODY = bytes(range(256)) + b"after all bytes"
BASE = {"Group": "g-1", "RemoteId": "n1"}
CODES = {
    "metadata": 50000,
    "append": 50001,
    "get": 50002,
    "vote": 51001,
    "heart-beat": 51002,
    "pull": 51003,
    "push": 51004,
    "leadership-transfer": 51005,
}


class Recorder:
    """Builds messages in a JVM that has DLedger's classes."""

    def __init__(self, java: JavaDLedger) -> None:
        self._java = java.java
        self._protocol = java.classes.protocol
        self._classes = java.classes
        remoting = java.java.org.apache.rocketmq.remoting.protocol
        self._command, self._type = remoting.RemotingCommand, remoting.SerializeType
        self._generation_a = java.generation_a

    def message(self, kind: str, **fields: Any) -> Any:
        made = getattr(self._protocol, kind)()
        for name, value in fields.items():
            getattr(made, f"set{name}")(value)
        return made

    def entry(self, index: int, body: bytes) -> Any:
        made = self._classes.entry.DLedgerEntry()
        made.setMagic(1)
        made.setIndex(index)
        made.setTerm(3)
        made.setPos(index * 100)
        made.setBody(body)
        made.setSize(48 + len(body))
        return made

    def frame(self, command: Any, message: Any, opaque: int, *, binary: bool = False) -> bytes:
        if message is not None:
            command.setBody(self._java.com.alibaba.fastjson.JSON.toJSONString(message).encode())
        command.setOpaque(opaque)
        if binary:
            command.setSerializeTypeCurrentRPC(self._type.ROCKETMQ)
        buffer = command.encode()
        return bytes(buffer.array())[: buffer.limit()]

    def request(self, name: str, message: Any, opaque: int, *, binary: bool = False) -> bytes:
        return self.frame(self._command.createRequestCommand(CODES[name], None), message, opaque, binary=binary)

    def response(self, message: Any, opaque: int, *, binary: bool = False) -> bytes:
        command = self._command.createResponseCommand(200, None)
        command.markResponseType()
        return self.frame(command, message, opaque, binary=binary)

    def push(self) -> Any:
        made = self.message("PushEntryRequest", **BASE, LocalId="n0", LeaderId="n0", Term=3, CommitIndex=8)
        if self._generation_a:
            made.setEntry(self.entry(9, BODY))
        else:
            made.setPreLogIndex(8)
            made.setPreLogTerm(3)
            made.addEntry(self.entry(9, BODY))
            made.addEntry(self.entry(10, b""))
        return made

    def requests(self) -> Iterator[tuple[str, str, Any]]:
        peer = BASE | {"LocalId": "n0", "LeaderId": "n0", "Term": 3}
        long = self._java.java.lang.Long
        yield "metadata", "metadata", self.message("MetadataRequest", **BASE)
        yield "append", "append", self.message("AppendEntryRequest", **BASE, Body=BODY)
        yield "append-empty", "append", self.message("AppendEntryRequest", **BASE, Body=b"")
        yield "append-null", "append", self.message("AppendEntryRequest", **BASE)
        bodies = self._java.java.util.ArrayList()
        for body in (b"one", b"", BODY):
            bodies.add(body)
        yield "append-batch", "append", self.message("BatchAppendEntryRequest", **BASE, BatchMsgs=bodies)
        yield "get", "get", self.message("GetEntriesRequest", **BASE, BeginIndex=long(1 << 40))
        transfer = {"TransferId": "n1", "TransfereeId": "n2", "Term": 7}
        yield "transfer", "leadership-transfer", self.message("LeadershipTransferRequest", **BASE, **transfer)
        vote = self.message("VoteRequest", **peer, LedgerEndIndex=41, LedgerEndTerm=2)
        yield "vote", "vote", vote
        yield "heart-beat", "heart-beat", self.message("HeartBeatRequest", **peer)
        yield "pull", "pull", self.message("PullEntriesRequest", **BASE, NodeId="n2", BeginIndex=long(5))
        yield "push", "push", self.push()

    def responses(self) -> Iterator[tuple[str, Any]]:
        peers = self._java.java.util.TreeMap()
        peers.put("n0", "localhost:20911")
        peers.put("n1", "localhost:20912")
        yield "metadata", self.message("MetadataResponse", Group="g-1", LeaderId="n1", Peers=peers)
        yield "metadata-no-leader", self.message("MetadataResponse", Group="g-1", Peers=peers)
        yield "append", self.message("AppendEntryResponse", Group="g-1", LeaderId="n1", Term=3, Index=9, Pos=900)
        failed = BASE | {"LeaderId": "n2", "Code": 404}
        yield "append-not-leader", self.message("AppendEntryResponse", **failed)
        entries = self._java.java.util.ArrayList()
        entries.add(self.entry(9, BODY))
        yield "get", self.message("GetEntriesResponse", Group="g-1", Entries=entries)
        yield "get-out-of-range", self.message("GetEntriesResponse", **BASE, Code=410, LeaderId="n1")
        yield "transfer", self.message("LeadershipTransferResponse", Term=4, Code=200)

    def frames(self) -> dict[str, str]:
        """Returns every frame as hex, by name."""
        found: dict[str, bytes] = {}
        for opaque, (name, code, message) in enumerate(self.requests(), 100):
            found[f"request/{name}"] = self.request(code, message, opaque)
            found[f"request-binary/{name}"] = self.request(code, message, opaque, binary=True)
        for opaque, (name, message) in enumerate(self.responses(), 200):
            found[f"response/{name}"] = self.response(message, opaque)
            found[f"response-binary/{name}"] = self.response(message, opaque, binary=True)
        remark = self._command.createResponseCommand(3, " request type 10 not supported")
        remark.markResponseType()
        found["response/not-supported"] = self.frame(remark, None, 300)
        found["response-binary/not-supported"] = self.frame(remark, None, 300, binary=True)
        fields = self._command.createRequestCommand(59999, None)
        fields.addExtField("requestTypeCode", "17")
        fields.addExtField("café", "x" * 70)
        found["request/user-define"] = self.frame(fields, None, 301)
        found["request-binary/user-define"] = self.frame(fields, None, 301, binary=True)
        return {name: frame.hex() for name, frame in found.items()}


def recorded(version: str) -> dict[str, bytes]:
    """Returns the frames that lie in the repository."""
    held = json.loads((TESTDATA / f"frames-{version}.json").read_text())
    return {name: bytes.fromhex(frame) for name, frame in held.items()}


def main() -> None:
    TESTDATA.mkdir(exist_ok=True)
    for version in VERSIONS:
        with jvm(version) as java:
            frames = Recorder(JavaDLedger(java, version)).frames()
        (TESTDATA / f"frames-{version}.json").write_text(json.dumps(frames, indent=1) + "\n")


if __name__ == "__main__":
    main()
