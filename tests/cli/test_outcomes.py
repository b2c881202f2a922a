"""An error with an unknown outcome names that, and what to do before a repeat, in text and in JSON."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from dledger_core.client.routing.outcomes import effect_of, plain_append, unknown
from dledger_core.errors import LeadershipLostError, RequestTimedOutError, UnreachableError
from dledger_core.net import messages
from dledger_core.net.protocol import Type
from dledger_core.rocketmq.client.log import append_all
from tests.cli.command import last_error, run, run_process
from tests.client.fake_group import FakeGroup, on_group

NAMED = {"q": "q", "b": 1, "r": "r"}
WRITES = {
    "append": messages.APPEND.encode(messages.AppendRequest(count=1), g="g"),
    "append of a producer": messages.APPEND.encode(
        messages.AppendRequest(count=1, producer_id="p", epoch=0, sequence=0), g="g"
    ),
    "append of a transaction": messages.APPEND.encode(
        messages.AppendRequest(count=1, transaction=NAMED | {"a": "a"}), g="g"
    ),
    "expire": messages.PRODUCER.encode(messages.ProducerRequest(producer_id="p", operation="expire"), g="g"),
    "commit": messages.TRANSACTION.encode(messages.TransactionRequest(operation="commit", transaction=NAMED), g="g"),
    "abort": messages.TRANSACTION.encode(messages.TransactionRequest(operation="abort", transaction=NAMED), g="g"),
    "transfer": messages.TRANSFER.encode(messages.TransferRequest(node="n1"), g="g"),
} | {
    operation: messages.MEMBER.encode(messages.MemberRequest(operation=operation, node="n1", address="h:1"), g="g")
    for operation in ("add", "remove", "promote", "replace")
}
READS = {
    "read": messages.READ.encode(messages.ReadRequest(start=0, end=1), g="g"),
    "members": messages.MEMBER.encode(messages.MemberRequest(operation="list"), g="g"),
    "producer": messages.PRODUCER.encode(messages.ProducerRequest(producer_id="p"), g="g"),
    "transaction": messages.TRANSACTION.encode(
        messages.TransactionRequest(operation="state", transaction=NAMED), g="g"
    ),
}
TIMED_OUT = RequestTimedOutError("no response in time", "h:1", "", {"seconds": 1})


@pytest.mark.parametrize("header", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("error", [TIMED_OUT, LeadershipLostError("leadership was lost")])
def test_write_with_unknown_outcome_has_a_remedy(header: dict[str, Any], error: Any) -> None:
    found = unknown(error, effect_of(header))
    assert type(found) is type(error)
    assert found.what.startswith(error.what)
    assert found.what != error.what, "it says that the request may have taken effect"
    assert found.remedy
    assert (found.where, found.values) == (error.where, error.values)


@pytest.mark.parametrize("header", READS.values(), ids=READS)
def test_read_without_response_says_that_nothing_was_changed(header: dict[str, Any]) -> None:
    found = unknown(TIMED_OUT, effect_of(header))
    assert (found.what, found.values) == (TIMED_OUT.what, TIMED_OUT.values)
    assert found.remedy


@pytest.mark.parametrize(
    "remedy",
    sorted(
        {
            *(effect_of(header).remedy for header in WRITES.values()),
            plain_append("g", " --protocol dledger-java").remedy,
        }
    ),
)
def test_commands_of_remedies_can_be_typed(remedy: str) -> None:
    for typed in re.findall(r"dledger ((?:member |producer |transaction )?[a-z]+(?: --?\S+(?: \w[\w-]*)?)*)", remedy):
        words = [word.strip("';,") for word in typed.split()]
        done = run(*words, "--peers", "n0-127.0.0.1:1", "--timeout", "0.2", code=2)  # well-formed, and no node answers
        assert last_error(done.stderr).code == "UNREACHABLE"


@on_group(timeout_ms=4000)
async def test_command_says_that_append_may_be_written_in_text_and_json(group: FakeGroup) -> None:
    group.nodes.n1.script[Type.APPEND] = ["apply and drop"]
    done = await asyncio.to_thread(
        run_process, "append", "x", "--peers", group.peers, "--timeout", "1", "--format", "json", code=2
    )
    assert group.log.end == 1
    found = json.loads(done.stdout)
    assert (found["error"], found["outcome_unknown"]) == ("TIMED_OUT", True)
    assert found["remedy"] in done.stderr


async def test_append_to_java_nodes_has_an_unknown_outcome_if_one_body_has() -> None:
    async def append_one(body: bytes) -> Any:
        await asyncio.sleep(0)
        raise UnreachableError("refused") if body == b"0" else RequestTimedOutError("no response")

    with pytest.raises(RequestTimedOutError) as caught:
        await append_all(append_one, [b"0", b"1"], 2)
    assert caught.value.values["appended"] == 0
