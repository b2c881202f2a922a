"""OpenTelemetry spans of appends, from the client's call to the node's response."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.integration]

Span = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.traced_appends", str(tmp_path_factory.mktemp("traced"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def below(found: dict[str, Any], name: str) -> tuple[list[Span], list[Span]]:
    """Return the client's and the nodes' spans in the trace of a span of the user."""
    (user,) = [span for span in found["spans"] if span["name"] == name]
    calls = [span for span in found["spans"] if span["parent"] == user["id"]]
    requests = [span for span in found["spans"] if span["parent"] in {call["id"] for call in calls}]
    assert {span["trace"] for span in calls + requests} == {user["trace"]}
    assert {span["kind"] for span in calls} == {"CLIENT"}
    assert {span["kind"] for span in requests} == {"SERVER"}
    return calls, requests


def test_append_without_tracer_provider_loads_and_records_no_trace(found: dict[str, Any]) -> None:
    assert not found["loaded"]
    assert min(span["attributes"].get("dledger.first_index", 9) for span in found["spans"]) > 2


@pytest.mark.parametrize("name", ["plain", "producer", "attempt"])
def test_request_of_node_is_child_of_call_in_trace_of_caller(name: str, found: dict[str, Any]) -> None:
    (call,), (request,) = below(found, name)
    places = ("dledger.first_index", "dledger.last_index", "dledger.term")
    for key in ("messaging.destination.name", "messaging.batch.message_count", *places):
        assert call["attributes"][key] == request["attributes"][key], key
    assert call["attributes"]["messaging.destination.name"] == "default"
    assert request["attributes"]["dledger.node"] in {"n0", "n1", "n2"}
    assert request["events"] == ["proposed", "committed"]


def test_joined_calls_have_spans_of_their_own_and_one_request(found: dict[str, Any]) -> None:
    calls, (request,) = below(found, "joined")
    first, second = sorted(call["attributes"]["dledger.first_index"] for call in calls)
    assert second == first + 1
    assert (request["attributes"]["dledger.first_index"], request["attributes"]["dledger.last_index"]) == (
        first,
        second,
    )


def test_refused_append_has_name_of_its_error_on_both_sides(found: dict[str, Any]) -> None:
    (call,), (request,) = below(found, "refused")
    for span in (call, request):
        assert (span["status"], span["attributes"]["error.type"]) == ("ERROR", "SEQUENCE_GAP")


def test_wrong_traceparent_starts_trace_of_its_own(found: dict[str, Any]) -> None:
    (alone,) = [span for span in found["spans"] if span["kind"] == "SERVER" and span["parent"] is None]
    assert alone["events"] == ["proposed", "committed"]
