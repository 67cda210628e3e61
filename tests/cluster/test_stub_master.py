"""The stub master answers as a real one did, and refuses what that refuses."""

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from stub_master import RECORDED, TOKEN_HEADER, USER_HEADER, Json, StubMaster, shape

TRIALS = [[json.loads(line) for line in trial.splitlines()] for trial in RECORDED.read_text().split("\n\n")]
PROGRESS: Json = {"progress": 0, "is_raw": True}


@pytest.fixture
def master() -> Iterator[StubMaster]:
    with StubMaster() as master:
        yield master


def send(master: StubMaster, method: str, path: str, body: Any = None, headers: Any = None) -> tuple[int, Any]:
    raw = body if isinstance(body, (str, type(None))) else json.dumps(body)
    with closing(HTTPConnection("127.0.0.1", master.port, timeout=10)) as connection:
        headers = headers or {TOKEN_HEADER: f"Bearer {master.session_token}"}
        connection.request(method, f"/api/v1/{path}", raw, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def report(master: StubMaster, step: Any, values: Any, group: Any = "training", **changes: Any) -> int:
    metrics = {"avgMetrics": values, "batchMetrics": None}
    body = {"metrics": metrics, "trialId": master.trial_id, "trialRunId": master.run_id, "reportTime": None}
    body |= {"stepsCompleted": step} | changes
    return send(master, "POST", f"trials/{master.trial_id}/metrics", {"group": group, "metrics": body})[0]


def save(master: StubMaster, step: Any, **changes: Any) -> int:
    body: Json = {"taskId": master.task_id, "allocationId": master.allocation_id, "uuid": str(uuid.uuid4())}
    body |= {"metadata": {"steps_completed": step}, "resources": {"a": "12", "dir/": "0"}, "training": {}}
    body |= {"state": "STATE_COMPLETED", "reportTime": "2026-01-01T00:00:00+00:00", "storageId": 1}
    return send(master, "POST", "checkpoints", body | changes)[0]


def refused(master: StubMaster) -> int:
    """How many requests were refused since the last call."""
    count = len(master.violations)
    master.violations.clear()
    return count


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial[-1]["path"])
def test_answers_as_the_recorded_master(trial: list[Json]) -> None:
    text = json.dumps(trial)
    trial_id, *_ = re.findall(r"trials/(\d+)", text)
    task_id, *_ = [*re.findall(r"\d+\.[0-9a-f-]{36}", text), "3.none"]
    with StubMaster(trial_id=int(trial_id), task_id=task_id) as master:
        for exchange in trial:
            expected = exchange["response"]
            if f'"trialRunId": {master.run_id + 1}' in json.dumps(exchange["request"]):
                master.new_run()
            if expected.get("preempt"):
                master.preempt_step = 0
                report(master, 0, {"loss": 1})
            if "STOPPING" in json.dumps(expected):
                master.stop_step = 60
                report(master, 60, {"validation_loss": 4.6}, "validation")
            path = re.sub(r"resources/[0-9a-f-]{36}", "resources/res-0", exchange["path"].removeprefix("/api/v1/"))
            status, answer = send(master, exchange["method"], path, exchange["request"])
            assert (status, shape(answer)) == (exchange["status"], shape(expected)), exchange
            if "trial" in expected:  # of the rest a script reads nothing
                answer, expected = answer["trial"]["state"], expected["trial"]["state"]
            assert answer == expected, exchange
        assert master.violations == []


def test_refuses_requests(master: StubMaster) -> None:
    allocation = f"allocations/{master.allocation_id}"
    storage = {"type": "directory"}
    refusals: list[tuple[int, str, str, Any]] = [
        (400, "POST", "trials/7/early_exit", {"reason": "EXITED_REASON_USER_REQUESTED_STOP"}),
        (400, "POST", "runs/start", {"runId": 8, "checkpointStorage": storage}),
        (400, "POST", "runs/start", {"runId": 7, "checkpointStorage": None}),
        (400, "POST", f"{allocation}/signals/ack_preemption", None),
        (404, "POST", "trials/7/nothing", {}),
        (404, "POST", "trials/8/progress", PROGRESS),
        (404, "GET", "trials/7/metrics", None),
        (404, "GET", "trials/8", None),
        (404, "GET", "allocations/o.1/signals/preemption?timeout_seconds=0", None),
        (404, "GET", f"{allocation}/resources/res-1/rendezvous", None),
    ]
    for progress in (1.01, -1, True, "1"):
        refusals.append((400, "POST", "trials/7/progress", PROGRESS | {"progress": progress}))
    for no_object in (None, "{", '{"progress": NaN, "is_raw": true}', [0.5]):
        refusals.append((400, "POST", "trials/7/progress", no_object))
    for status, method, path, body in refusals:
        answer = send(master, method, path, body)
        assert (answer[0], refused(master)) == (status, 1), (method, path, body)
        assert shape(answer[1]) == {"error": {"code": "number", "reason": "str", "error": "str"}}
    assert master.acks == master.progress == []


def test_refuses_wrong_tokens(master: StubMaster) -> None:
    """A trial's own requests carry its run's token, those of a client the user's, each in a header of its own."""
    master.new_run()
    run, old, user = (f"Bearer {token}" for token in (master.session_token, "session-token-1", master.user_token))
    for headers in ({TOKEN_HEADER: run}, {USER_HEADER: user}):
        assert send(master, "GET", "me", headers=headers)[0] == 200
    for headers in ({TOKEN_HEADER: old}, {TOKEN_HEADER: user}, {USER_HEADER: run}, {"Accept": "*/*"}):
        assert (send(master, "GET", "me", headers=headers)[0], refused(master)) == (401, 1), headers


def test_takes_and_refuses_metrics(master: StubMaster) -> None:
    assert report(master, 1, {"loss": 1.5}) == 200
    assert report(master, 1, {"lr": 0.1}) == 200, "other keys of the same step"
    assert report(master, None, {"agent": {"cpu": {"util": 3}}}, "cpu") == 200
    assert refused(master) == 0
    wrong: list[tuple[Any, Any, Json]] = [(1, {"loss": 1.5, "new": 0}, {}), (2, "loss", {})]
    wrong += [(2, {"loss": value}, {}) for value in ("NaN", "Infinity", None, True, [1.0])]
    wrong += [(step, {"loss": 1}, {}) for step in (2.0, True, -1, None)]
    wrong += [(2, {"loss": 1}, {name: 8}) for name in ("trialRunId", "trialId")]
    wrong += [(2, {"loss": 1}, {"group": group}) for group in ("", "a.b")]
    wrong += [(2, {"batches": 1}, {"group": "validation"})]
    for step, values, changes in wrong:
        assert (report(master, step, values, **changes), refused(master)) == (400, 1), (step, values, changes)
    assert len(master.rows) == 2


def test_takes_and_refuses_checkpoints(master: StubMaster) -> None:
    wrong: list[Json] = [{"uuid": "no"}, {"taskId": "other"}, {"allocationId": None}, {"state": "STATE_ACTIVE"}]
    wrong += [{"storageId": 2}, {"reportTime": None}, {"reportTime": "2026-01-01T00:00:00"}, {"resources": {"a": 12}}]
    wrong += [{"metadata": metadata} for metadata in ({}, {"steps_completed": "1"}, {"steps_completed": True})]
    for changes in wrong:
        assert (save(master, 1, **changes), refused(master)) == (400, 1), changes
    assert [save(master, step) for step in (3, 9, 5)] == [200, 200, 200]
    assert master.latest_checkpoint() == master.checkpoints[1]["uuid"], "the one with the most steps"
    assert refused(master) == 0
    assert (save(master, 9, uuid=master.latest_checkpoint()), refused(master)) == (400, 1), "twice"
