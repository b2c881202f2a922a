from __future__ import annotations

import logging
import pickle

import pytest

from dledger_core import EntryCheck
from spark_connector.errors import (
    DataLossError,
    GroupGoneError,
    LogRecreatedError,
    LossPolicy,
    OffsetBeyondEndError,
    RetentionError,
    TermMismatchError,
)

LOSSES = [
    (RetentionError.of("orders", 1200, 1874), "RETENTION", "[1200, 1874) (674 entries)", 1874),
    (RetentionError.of("orders", 1200, 1874, 1300), "RETENTION", "[1200, 1300) (100 entries)", 1874),
    (LogRecreatedError.of("orders", "aa", "bb", 50, 0, 9), "LOG_RECREATED", "log aa", 0),
    (LogRecreatedError.of("orders", "aa", "bb", 50, 2, 9), "LOG_RECREATED", "[2, 9) (7", 2),
    (LogRecreatedError.of("orders", "aa", "bb", 50, 2, 90), "LOG_RECREATED", "[2, 50) (48", 2),
    (TermMismatchError.of("orders", 50, EntryCheck(3, 255), EntryCheck(4, 16), 2), "TERM_MISMATCH", "entry 49", 2),
    (OffsetBeyondEndError.of("orders", 50, 9), "OFFSET_BEYOND_END", "[9, 50) (41 entries)", 9),
    (GroupGoneError.of("orders", 50, ["other"]), "GROUP_GONE", "other", 50),
]


@pytest.mark.parametrize(("error", "code", "part", "resume"), LOSSES)
def test_loss_text_has_code_range_and_remedy(error: DataLossError, code: str, part: str, resume: int) -> None:
    text = str(error)
    assert text.startswith(f"[DLEDGER_DATA_LOSS.{code}] group 'orders': ")
    assert part in text
    assert f'startingOffsets={{"orders": {resume}}}' in text
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.values) == (type(error), text, error.values)


def test_accepted_loss_is_logged_and_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    loss = RetentionError.of("orders", 1200, 1874)
    with pytest.raises(RetentionError):
        LossPolicy(fail=True).report(loss)
    policy = LossPolicy(fail=False)
    with caplog.at_level(logging.WARNING, "spark_connector"):
        policy.report(loss)
        policy.report(loss)
    assert (policy.events, policy.entries) == (1, 674)
    assert len(caplog.records) == 1
    assert "[1200, 1874)" in caplog.text
