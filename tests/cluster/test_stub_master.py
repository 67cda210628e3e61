"""The stub master answers as a real one did, and refuses what that refuses."""

import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
from determined.common.api.errors import APIException
from determined.experimental import client

from stub_master import TOKEN_HEADER, USER_HEADER, StubMaster, shape

Json = dict[str, Any]

# Requests of trials and the answers of a real master, one trial a paragraph.
PARAGRAPHS = Path(__file__).with_name("recorded.jsonl").read_text().split("\n\n")
RECORDED = [[json.loads(line) for line in paragraph.splitlines()] for paragraph in PARAGRAPHS]
CUT_OFF = (HTTPException, OSError)


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


def steady(answer: Any) -> Any:
    """An answer without times."""
    return json.loads(re.sub(r'"[\d-]+T[\d:.]+Z"|(?<="wallClockTime": )[\d.]+', "0", json.dumps(answer)))


@pytest.mark.parametrize("trial", RECORDED, ids=lambda trial: trial[-1]["path"])
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
                master.preempt_at(0)
                report(master, 0, {"loss": 1})
            if "trial" in expected:
                master.hparams, last = expected["trial"]["hparams"], expected["trial"]["latestValidation"]
                master.stop_at(last["totalBatches"] if "STOPPING" in expected["trial"]["state"] else 10**9)
                report(master, last["totalBatches"], last["metrics"]["avgMetrics"], "validation")
            path = re.sub(r"resources/[0-9a-f-]{36}", "resources/res-0", exchange["path"].removeprefix("/api/v1/"))
            status, answer = send(master, exchange["method"], path, exchange["request"])
            assert (status, shape(answer)) == (exchange["status"], shape(expected)), exchange
            assert "user" in expected or steady(answer) == steady(expected), exchange
        assert master.violations == []


def test_refuses_requests(master: StubMaster) -> None:
    allocation, unknown = f"allocations/{master.allocation_id}", {"uuid": "x", "resources": {"resources": {}}}
    wrong: list[tuple[str, Any]] = [
        ("trials/7/early_exit", {"reason": "EXITED_REASON_USER_REQUESTED_STOP"}),
        ("runs/start", {"runId": 8, "checkpointStorage": {"type": "directory"}}),
        ("runs/start", {"runId": 7, "checkpointStorage": None}),
        (f"{allocation}/acceleratorData", {"allocationId": master.allocation_id, "acceleratorData": {}}),
        (f"{allocation}/signals/ack_preemption", None),
    ]
    progress: list[Any] = [None, "{", '{"progress": NaN, "is_raw": true}', [0.5]]
    progress += [{"progress": value, "is_raw": True} for value in (1.01, -1, True, "1")]
    refusals = [(400, "POST", path, body) for path, body in wrong + [("trials/7/progress", body) for body in progress]]
    refusals += [(400, "PATCH", "checkpoints", {"checkpoints": [unknown]})]
    refusals += [(404, "POST", "trials/7/nothing", {}), (404, "POST", "trials/8/progress", progress[-1])]
    unknown_paths = ("trials/7/metrics", "trials/8", "allocations/o.1/signals/preemption?timeout_seconds=0")
    refusals += [(404, "GET", path, None) for path in (*unknown_paths, f"{allocation}/resources/res-1/rendezvous")]
    for status, method, path, body in refusals:
        answer = send(master, method, path, body)
        assert (answer[0], refused(master)) == (status, 1), (method, path, body)
        assert shape(answer[1]) == {"error": {"code": "number", "reason": "str", "error": "str"}}
    assert master.acks == master.progress == []


def test_refuses_wrong_tokens(master: StubMaster) -> None:
    """A trial's own requests carry its run's token, those of a client the user's, each in a header of its own."""
    master.new_run()
    run, old, user = (f"Bearer {token}" for token in (master.session_token, "session-token-1", master.user_token))
    tokens = [({TOKEN_HEADER: token}, status, status) for token, status in ((run, 200), (old, 401), (user, 401))]
    tokens += [({USER_HEADER: user}, 200, 401), ({USER_HEADER: run}, 401, 401), ({"Accept": "*/*"}, 401, 401)]
    for headers, for_users, for_trials in tokens:
        for path in ("me", "trials/7"):
            assert send(master, "GET", path, None, headers)[0] == for_users, (path, headers)
        body = {"progress": 0, "is_raw": True}
        assert send(master, "POST", "trials/7/progress", body, headers)[0] == for_trials, headers
    assert refused(master) == 4 * 3 + 1


def test_takes_and_refuses_metrics(master: StubMaster) -> None:
    assert report(master, 1, {"loss": 1.5, "step": 1}) == 200
    assert report(master, 1, {"lr": 0.1}) == 200, "other keys of the same step"
    assert report(master, None, {"agent": {"cpu": {"util": 3}}}, "cpu") == 200
    assert refused(master) == 0
    wrong: list[tuple[Any, Any, Json]] = [(1, {"loss": 1.5, "new": 0}, {}), (2, "loss", {})]
    wrong += [(2, {"loss": value}, {}) for value in ("NaN", "Infinity", None, True, [1.0])]
    wrong += [(step, {"loss": 1}, {}) for step in (2.0, True, -1, None)]
    wrong += [(2, {"loss": 1}, {name: 8}) for name in ("trialRunId", "trialId", "reportTime")]
    wrong += [(2, {"loss": 1}, {"group": group}) for group in ("", "a.b", "validation")]
    wrong += [(2, {"epochs": "one"}, {"group": "extra"}), (2, {"loss": 1}, {"reportTime": "now"})]
    wrong += [(2, {"validation_loss": 1}, {"group": "validation", "time_metric": "epochs"})]
    for step, values, changes in wrong:
        master.time_metric = changes.pop("time_metric", None)
        assert (report(master, step, values, **changes), refused(master)) == (400, 1), (step, values, changes)
    assert len(master.rows) == 2


def test_takes_and_refuses_checkpoints(master: StubMaster) -> None:
    wrong: list[Json] = [{"uuid": "no"}, {"taskId": "other"}, {"allocationId": None}, {"state": "STATE_ACTIVE"}]
    wrong += [{"storageId": 2}, {"reportTime": None}, {"reportTime": "2026-01-01T00:00:00"}, {"resources": {"a": 12}}]
    wrong += [{"metadata": metadata} for metadata in ({}, {"steps_completed": "1"}, {"steps_completed": True})]
    for changes in wrong:
        assert (save(master, 1, **changes), refused(master)) == (400, 1), changes
    assert [save(master, step) for step in (3, 9, 5)] == [200, 200, 200]
    assert [saved["metadata"]["steps_completed"] for saved in master.checkpoints] == [3, 9, 5]
    for latest in (1, 2):
        assert master.latest_checkpoint() == master.checkpoints[latest]["uuid"], "the one with the most steps"
        deleted = {"uuid": master.checkpoints[latest]["uuid"], "resources": {"resources": {}}}
        assert send(master, "PATCH", "checkpoints", {"checkpoints": [deleted]}) == (200, {})
    assert refused(master) == 0


def test_archives_what_a_later_run_repeats(master: StubMaster) -> None:
    for step in (1, 2, 4, 3):
        report(master, step, {"loss": step})
        report(master, step, {"validation_loss": step}, "validation")
    assert [row[1] for row in master.history("training")] == [1, 2, 4, 3], "in the order of arrival"
    master.new_run()
    report(master, 3, {"loss": 30})
    assert [row[:2] for row in master.history("training")] == [(1, 1), (1, 2), (2, 3)]
    assert [row[:2] for row in master.history("validation")] == [(1, 1), (1, 2), (1, 3)]
    report(master, 3, {"validation_loss": 30}, "validation")
    assert [row[:2] for row in master.history("validation")] == [(1, 1), (1, 2), (2, 3)]
    assert (len(master.rows), refused(master)) == (10, 0)


def test_preemption_answers_the_long_poll_at_once(master: StubMaster) -> None:
    master.preempt_at(2)
    path = f"allocations/{master.allocation_id}/signals/preemption?timeout_seconds="
    report(master, 1, {"loss": 1})
    assert send(master, "GET", f"{path}0") == (200, {"preempt": False})
    start = time.monotonic()
    threading.Timer(0.2, report, (master, 2, {"loss": 1})).start()
    assert send(master, "GET", f"{path}60") == (200, {"preempt": True})
    assert time.monotonic() - start < 5


def test_a_search_stops_the_trial_without_a_signal(
    master: StubMaster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the state says so, which the client asks for with what a container has in its environment."""
    variables = {"DET_MASTER": f"http://127.0.0.1:{master.port}", "DET_USER": "determined", "NO_PROXY": "*"}
    variables |= {"DET_USER_TOKEN": master.user_token, "XDG_CONFIG_HOME": str(tmp_path)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(client, "_determined", None)
    master.stop_at(10)
    states, late = [], []
    for step in (5, 10, 11):
        assert report(master, step, {"validation_loss": 1}, "validation") == report(master, step, {"loss": 1}) == 200
        states.append(client.get_trial(7).state)
        late.append([row.step for row in master.late_validations])
    stopped = client.TrialState.STOPPING_COMPLETED
    assert (states, late) == ([client.TrialState.RUNNING, stopped, stopped], [[], [], [11]])
    path = f"allocations/{master.allocation_id}/signals/preemption?timeout_seconds=0"
    assert send(master, "GET", path) == (200, {"preempt": False})

    master.fail_for("GET .*/trials/7$", 0.5)
    for _ in range(2):
        with pytest.raises(APIException, match=r"dial tcp .*: connect: connection refused"):
            client.get_trial(7)
    time.sleep(0.6)
    assert client.get_trial(7).state == stopped
    assert refused(master) == 0


def test_rendezvous_of_two_nodes(master: StubMaster) -> None:
    master.containers = [("127.0.0.1", 2), ("127.0.0.2", 4)]
    for rank in (0, 1):
        answer = send(master, "GET", f"allocations/{master.allocation_id}/resources/res-{rank}/rendezvous")
        assert answer[1]["rendezvousInfo"] == {"addresses": ["127.0.0.1", "127.0.0.2"], "rank": rank, "slots": [2, 4]}


def test_faults(master: StubMaster) -> None:
    assert report(master, 1, {"loss": 1}) == 200
    master.fail("POST .*/metrics", 2, 503)
    assert [report(master, 2, {"loss": 1}) for _ in range(3)] == [503, 503, 200]
    master.fail("POST .*/progress", None)
    progress = ("POST", "trials/7/progress", {"progress": 0, "is_raw": True})
    assert [send(master, *progress)[0] for _ in range(2)] == [500, 500]
    master.heal()
    assert send(master, *progress)[0] == 200
    master.reset("POST .*/metrics")
    with pytest.raises(CUT_OFF):
        report(master, 3, {"loss": 1})
    assert len(master.rows) == 2

    master.drop("POST .*/(metrics|checkpoints)", 2)
    name = str(uuid.uuid4())
    with pytest.raises(CUT_OFF):
        report(master, 3, {"loss": 1})
    with pytest.raises(CUT_OFF):
        save(master, 1, uuid=name)
    assert (report(master, 3, {"loss": 1}), save(master, 1, uuid=name)) == (200, 500)
    assert (len(master.rows), len(master.checkpoints), len(master.redelivered), refused(master)) == (3, 1, 2, 0)


def test_away(master: StubMaster) -> None:
    """Back on the same port; the answers under way are lost."""
    port = master.port
    master.away(0.5, "POST .*/metrics")
    with pytest.raises(CUT_OFF):
        report(master, 1, {"loss": 1})
    with pytest.raises(ConnectionRefusedError):
        report(master, 1, {"loss": 1})
    time.sleep(0.7)
    assert (report(master, 1, {"loss": 1}), master.port) == (200, port)

    master.delay("POST .*/metrics", 0.3, 1)
    threading.Timer(0.1, master.away, (0.4,)).start()
    with pytest.raises(CUT_OFF):
        report(master, 2, {"loss": 1})
    time.sleep(0.6)
    assert report(master, 2, {"loss": 1}) == 200
    assert (len(master.rows), len(master.redelivered), refused(master)) == (2, 1, 0)
