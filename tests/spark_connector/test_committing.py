"""The driver's part in the sink without servers: which committed micro-batches may be replayed."""

from __future__ import annotations

import logging
import pickle

import pytest

from dledger_core.control import TransactionId
from dledger_core.errors import FencedError, UnreachableError
from spark_connector.options import DLedgerOptions
from spark_connector.writing.transactions import (
    AttemptMessage,
    CommittedBefore,
    abort_attempts,
    check_target,
    commit_attempts,
)

UNREACHABLE = DLedgerOptions.for_writing({"peers": "n0-127.0.0.1:1", "fetchRetryMs": "1", "fetchTimeoutMs": "500"})
KEY = TransactionId("query", 5, "run")


def replay(known: CommittedBefore, input_id: str) -> None:
    commit_attempts([None, AttemptMessage(KEY, {}, {"orders": known})], UNREACHABLE, input_id)


@pytest.mark.parametrize(
    ("known_input", "newest", "input_id"),
    [("x", 5, "x"), ("x", 9, "x"), ("", 5, "x"), ("x", 5, ""), ("", 5, "")],
)
def test_replay_of_same_micro_batch_is_accepted(known_input: str, newest: int, input_id: str) -> None:
    replay(CommittedBefore(known_input, newest, 3, 3), input_id)


@pytest.mark.parametrize(
    ("known_input", "newest", "input_id"), [("x", 5, "y"), ("x", 9, "y"), ("x", 6, ""), ("", 6, "y")]
)
def test_replay_of_other_query_is_fenced(known_input: str, newest: int, input_id: str) -> None:
    with pytest.raises(FencedError, match="micro-batch 5 of query query") as caught:
        replay(CommittedBefore(known_input, newest, 3, 3), input_id)
    assert "group 'orders'" in str(caught.value)


def test_replay_with_other_row_count_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    messages = [AttemptMessage(KEY, {}, {"orders": CommittedBefore("x", 5, 5, skipped)}) for skipped in (2, 2)]
    with caplog.at_level(logging.WARNING, "spark_connector"):
        commit_attempts(messages, UNREACHABLE, "x")
    assert "batch_id=5 committed_rows=5 rows=4" in caplog.text
    assert pickle.loads(pickle.dumps(messages)) == messages


def test_commit_without_parts_sends_no_request() -> None:
    commit_attempts([], UNREACHABLE)
    commit_attempts([None, AttemptMessage(KEY), AttemptMessage(KEY, {"orders": []})], UNREACHABLE)
    abort_attempts([None], UNREACHABLE, "orders")


def test_unreachable_target_is_rejected_before_query() -> None:
    with pytest.raises(UnreachableError, match=r"n0-127.0.0.1:1"):
        check_target(UNREACHABLE, "orders", started=False)


def test_failed_abort_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    # In the millisecond of UNREACHABLE a busy machine does not learn that the connection is refused.
    options = UNREACHABLE.model_copy(update={"fetch_retry_ms": 1_000})
    with caplog.at_level(logging.WARNING, "spark_connector"):
        abort_attempts([AttemptMessage(KEY)], options, "orders")
        abort_attempts([], options, None, KEY)
    assert caplog.text.count("UNREACHABLE") == 2
