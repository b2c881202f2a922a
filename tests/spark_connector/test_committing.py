"""The driver's part in the sink without servers: what a checkpoint says of a micro-batch, and what may be replayed."""

from __future__ import annotations

import logging
import pickle

import pytest

from dledger_core.control import TransactionId
from dledger_core.errors import FencedError, UnreachableError
from spark_connector.options import DLedgerOptions
from spark_connector.writing.attempts import AttemptMessage, CommittedBefore
from spark_connector.writing.committing import abort_attempts, check_target, commit_attempts

NOBODY = DLedgerOptions.for_writing({"peers": "n0-127.0.0.1:1", "fetchRetryMs": "1", "fetchTimeoutMs": "500"})
KEY = TransactionId("query", 5, "run")


def replay(known: CommittedBefore, input_id: str) -> None:
    commit_attempts([None, AttemptMessage(KEY, {}, {"orders": known})], NOBODY, input_id)


@pytest.mark.parametrize(
    ("known_input", "newest", "input_id"),
    [("x", 5, "x"), ("x", 9, "x"), ("", 5, "x"), ("x", 5, ""), ("", 5, "")],
)
def test_a_replay_of_the_same_micro_batch_writes_nothing(known_input: str, newest: int, input_id: str) -> None:
    replay(CommittedBefore(known_input, newest, 3, 3), input_id)


@pytest.mark.parametrize(
    ("known_input", "newest", "input_id"), [("x", 5, "y"), ("x", 9, "y"), ("x", 6, ""), ("", 6, "y")]
)
def test_another_querys_micro_batch_is_never_taken_for_a_replay(known_input: str, newest: int, input_id: str) -> None:
    with pytest.raises(FencedError, match="micro-batch 5 of query query was committed with other input") as caught:
        replay(CommittedBefore(known_input, newest, 3, 3), input_id)
    assert "group 'orders'" in str(caught.value)
    assert "new checkpoint" in str(caught.value)


def test_a_replay_with_another_number_of_rows_is_said(caplog: pytest.LogCaptureFixture) -> None:
    messages = [AttemptMessage(KEY, {}, {"orders": CommittedBefore("x", 5, 5, skipped)}) for skipped in (2, 2)]
    with caplog.at_level(logging.WARNING, "spark_connector"):
        commit_attempts(messages, NOBODY, "x")
    assert "micro-batch 5 was committed before with 5 rows, its replay has 4" in caplog.text
    assert pickle.loads(pickle.dumps(messages)) == messages


def test_nothing_to_commit_asks_nobody() -> None:
    commit_attempts([], NOBODY)
    commit_attempts([None, AttemptMessage(KEY), AttemptMessage(KEY, {"orders": []})], NOBODY)
    abort_attempts([None], NOBODY, "orders")


def test_what_cannot_be_written_to_is_refused_before_the_query() -> None:
    with pytest.raises(UnreachableError, match=r"option 'peers' = 'n0-127.0.0.1:1'"):
        check_target(NOBODY, "orders", started=False)


def test_an_abort_that_reaches_nobody_hides_no_other_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "spark_connector"):
        abort_attempts([AttemptMessage(KEY)], NOBODY, "orders")
        abort_attempts([], NOBODY, None, KEY)
    assert caplog.text.count("could not be aborted") == 2
