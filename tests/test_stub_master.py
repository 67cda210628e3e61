"""The stub master refuses what the real master refuses."""

import json
import threading
import time
import uuid
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from typing import Any

import pytest
from stub_master import TOKEN_HEADER, StubMaster


@pytest.fixture
def master() -> Iterator[StubMaster]:
    with StubMaster() as master:
        yield master


def send(master: StubMaster, method: str, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", master.port, timeout=10)
    raw = body if isinstance(body, (str, type(None))) else json.dumps(body)
    try:
        connection.request(method, "/api/v1/" + path, raw, {TOKEN_HEADER: f"Bearer {token or master.session_token}"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def metrics_body(master: StubMaster, step: Any, values: Any, group: Any = "training", **changes: Any) -> dict[str, Any]:
    report = {
        "metrics": {"avgMetrics": values, "batchMetrics": None},
        "trialId": master.trial_id,
        "trialRunId": master.run_id,
        "reportTime": None,
        "stepsCompleted": step,
    }
    return {"group": group, "metrics": report | changes}


def report(master: StubMaster, step: Any, values: Any, group: Any = "training", **changes: Any) -> int:
    path = f"trials/{master.trial_id}/metrics"
    return send(master, "POST", path, metrics_body(master, step, values, group, **changes))[0]


def checkpoint_body(master: StubMaster, step: Any, **changes: Any) -> dict[str, Any]:
    return {
        "uuid": str(uuid.uuid4()),
        "taskId": master.task_id,
        "allocationId": master.allocation_id,
        "metadata": {"steps_completed": step},
        "resources": {"a": "12", "dir/": "0"},
        "state": "STATE_COMPLETED",
        "training": {},
        "reportTime": "2026-01-01T00:00:00+00:00",
        "storageId": 1,
    } | changes


def test_accepts_a_well_formed_trial(master: StubMaster) -> None:
    storage = {"type": "directory", "container_path": "/storage"}
    assert send(master, "POST", "runs/start", {"runId": 7, "checkpointStorage": storage}) == (200, {"storageId": 1})
    assert report(master, 1, {"loss": 1.5, "step": 1}) == 200
    assert report(master, 1, {"lr": 0.1}) == 200, "other keys of the same step"
    assert report(master, 1, {"validation_loss": 0.25}, "validation") == 200
    assert report(master, None, {"agent": {"cpu": {"util": 3}}}, "cpu") == 200
    assert send(master, "POST", "trials/7/progress", {"progress": 1, "is_raw": True})[0] == 200
    assert send(master, "POST", "checkpoints", checkpoint_body(master, 1))[0] == 200
    assert master.violations == []
    assert master.latest_checkpoint() == master.checkpoints[0]["uuid"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "trials/7/nothing", {}, 404),
        ("GET", "trials/7/metrics", None, 404),
        ("POST", "trials/8/progress", {"progress": 0.5, "is_raw": True}, 404),
        ("POST", "trials/7/progress", None, 400),
        ("POST", "trials/7/progress", "{", 400),
        ("POST", "trials/7/progress", '{"progress": NaN, "is_raw": true}', 400),
        ("POST", "trials/7/progress", [0.5], 400),
        ("POST", "trials/7/progress", {"progress": 1.01, "is_raw": True}, 400),
        ("POST", "trials/7/progress", {"progress": True, "is_raw": True}, 400),
        ("POST", "trials/7/early_exit", {"reason": "EXITED_REASON_USER_REQUESTED_STOP"}, 400),
        ("POST", "runs/start", {"runId": 8, "checkpointStorage": {"type": "directory"}}, 400),
        ("POST", "runs/start", {"runId": 7, "checkpointStorage": None}, 400),
        ("GET", "allocations/other.1/signals/preemption?timeout_seconds=0", None, 404),
    ],
)
def test_refuses(master: StubMaster, method: str, path: str, body: Any, status: int) -> None:
    assert send(master, method, path, body)[0] == status
    assert len(master.violations) == 1


def test_refuses_a_wrong_token(master: StubMaster) -> None:
    master.new_run()
    assert send(master, "POST", "trials/7/progress", {"progress": 0, "is_raw": True}, "session-token-1")[0] == 401
    assert len(master.violations) == 1


@pytest.mark.parametrize(
    ("step", "values", "changes"),
    [
        (1, {"loss": "NaN"}, {}),
        (1, {"loss": "Infinity"}, {}),
        (1, {"loss": None}, {}),
        (1, {"loss": True}, {}),
        (1, {"loss": [1.0]}, {}),
        (1, "loss", {}),
        (1.0, {"loss": 1}, {}),
        (True, {"loss": 1}, {}),
        (-1, {"loss": 1}, {}),
        (None, {"loss": 1}, {}),
        (1, {"loss": 1}, {"group": ""}),
        (1, {"loss": 1}, {"group": "a.b"}),
        (1, {"epochs": "one"}, {"group": "extra"}),
        (1, {"loss": 1}, {"trialRunId": 2}),
        (1, {"loss": 1}, {"trialId": 8}),
        (1, {"loss": 1}, {"reportTime": "now"}),
        (1, {"other": 1}, {"group": "validation"}),
        (1, {"validation_loss": 1}, {"group": "validation", "time_metric": "epochs"}),
    ],
)
def test_refuses_metrics(master: StubMaster, step: Any, values: Any, changes: dict[str, Any]) -> None:
    master.time_metric = changes.pop("time_metric", None)
    assert report(master, step, values, **changes) == 400
    assert len(master.violations) == 1
    assert master.rows == []


@pytest.mark.parametrize("value", [1.0, 2.0])
def test_refuses_a_metric_reported_twice(master: StubMaster, value: float) -> None:
    assert report(master, 1, {"loss": 1.0}) == 200
    assert report(master, 1, {"loss": value, "lr": 0.1}) == 400
    assert len(master.violations) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"uuid": "not-a-uuid"},
        {"taskId": "other"},
        {"allocationId": None},
        {"state": "STATE_ACTIVE"},
        {"storageId": 2},
        {"reportTime": None},
        {"reportTime": "2026-01-01T00:00:00"},
        {"resources": {"a": 12}},
        {"metadata": {}},
        {"metadata": {"steps_completed": "1"}},
        {"metadata": {"steps_completed": True}},
    ],
)
def test_refuses_checkpoints(master: StubMaster, changes: dict[str, Any]) -> None:
    assert send(master, "POST", "checkpoints", checkpoint_body(master, 1, **changes))[0] == 400
    assert len(master.violations) == 1
    assert master.checkpoints == []


def test_archives_what_a_later_run_repeats(master: StubMaster) -> None:
    for step in (1, 2, 3, 4):
        report(master, step, {"loss": step})
        report(master, step, {"validation_loss": step}, "validation")
    master.new_run()
    report(master, 3, {"loss": 30})
    assert [row[:2] for row in master.history("training")] == [(1, 1), (1, 2), (2, 3)]
    assert [row[:2] for row in master.history("validation")] == [(1, 1), (1, 2), (1, 3)]
    report(master, 3, {"validation_loss": 30}, "validation")
    assert [row[:2] for row in master.history("validation")] == [(1, 1), (1, 2), (2, 3)]
    assert len(master.rows) == 10
    assert master.violations == []


def test_history_is_in_the_order_of_arrival(master: StubMaster) -> None:
    for step in (2, 1):
        report(master, step, {"loss": step})
    assert [row[1] for row in master.history("training")] == [2, 1]


def test_refuses_an_acknowledgement_of_nothing(master: StubMaster) -> None:
    path = f"allocations/{master.allocation_id}/signals/ack_preemption"
    assert send(master, "POST", path)[0] == 400
    assert master.acks == []
    assert len(master.violations) == 1


def test_latest_checkpoint_has_the_most_steps(master: StubMaster) -> None:
    most = checkpoint_body(master, 9)
    for body in (checkpoint_body(master, 3), most, checkpoint_body(master, 5)):
        send(master, "POST", "checkpoints", body)
    assert master.latest_checkpoint() == most["uuid"]


def test_preemption_answers_the_long_poll_at_once(master: StubMaster) -> None:
    master.preempt_at(2)
    path = f"allocations/{master.allocation_id}/signals/preemption"
    report(master, 1, {"loss": 1})
    assert send(master, "GET", f"{path}?timeout_seconds=0") == (200, {"preempt": False})
    start = time.monotonic()
    threading.Timer(0.2, report, (master, 2, {"loss": 1})).start()
    assert send(master, "GET", f"{path}?timeout_seconds=60") == (200, {"preempt": True})
    assert time.monotonic() - start < 5
    assert send(master, "POST", f"allocations/{master.allocation_id}/signals/ack_preemption")[0] == 200
    assert master.acks == [master.allocation_id]


def test_faults(master: StubMaster) -> None:
    master.fail("POST .*/metrics", 1, 503)
    assert report(master, 1, {"loss": 1}) == 503
    master.reset("POST .*/metrics")
    with pytest.raises((HTTPException, OSError)):
        report(master, 1, {"loss": 1})
    assert master.rows == []

    master.drop("POST .*/(metrics|checkpoints)", 2)
    body = checkpoint_body(master, 1)
    with pytest.raises((HTTPException, OSError)):
        report(master, 1, {"loss": 1})
    with pytest.raises((HTTPException, OSError)):
        send(master, "POST", "checkpoints", body)
    assert report(master, 1, {"loss": 1}) == 200
    assert send(master, "POST", "checkpoints", body)[0] == 500
    assert len(master.rows) == len(master.checkpoints) == 1
    assert len(master.redelivered) == 2
    assert master.violations == []


def test_away_and_back_on_the_same_port(master: StubMaster) -> None:
    port = master.port
    master.away(0.5, "POST .*/metrics")
    with pytest.raises((HTTPException, OSError)):
        report(master, 1, {"loss": 1})
    with pytest.raises(ConnectionRefusedError):
        report(master, 1, {"loss": 1})
    time.sleep(0.7)
    assert report(master, 1, {"loss": 1}) == 200
    assert master.port == port
    assert master.violations == []


def test_away_loses_answers_under_way(master: StubMaster) -> None:
    master.delay("POST .*/metrics", 0.3, 1)
    threading.Timer(0.1, master.away, (0.4,)).start()
    with pytest.raises((HTTPException, OSError)):
        report(master, 1, {"loss": 1})
    time.sleep(0.6)
    assert report(master, 1, {"loss": 1}) == 200
    assert len(master.rows) == len(master.redelivered) == 1
    assert master.violations == []
