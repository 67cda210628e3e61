"""A stand-in for the Determined 0.38.1 master, to run a Core API script as a managed trial without a cluster.

`StubMaster` answers what the processes of a trial ask, checks every request and keeps what it received. A request that
the real master refuses, or accepts and lives to regret (a NaN for the searcher, a metric reported twice), is answered
4xx and noted in `violations`: a test ends with `assert master.violations == []`.

The faults (`fail`, `fail_for`, `reset`, `drop`, `delay`, `away`) strike requests whose "METHOD path?query" matches a
regular expression.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

Json = dict[str, Any]
Answer = tuple[int, Json]
OK: Answer = (200, {})

TOKEN_HEADER = "Grpc-Metadata-x-allocation-token"  # of the trial's own requests
USER_HEADER = "Authorization"  # of a client's, such as determined.experimental.client
PROFILING_GROUPS = {"gpu", "cpu", "memory", "disk", "network"}
STOPPING = "STATE_STOPPING_COMPLETED"
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
INJECTED = "fault injected by the test"
DATABASE_AWAY = "unable to connect to `host=determined-db`: dial tcp 10.0.0.2:5432: connect: connection refused"


class Refusal(Exception):
    """A request that breaks the protocol, with the status and the message of the answer: recorded as a violation."""


def error(status: int, message: str) -> Answer:
    """An error in the form of the master's gateway."""
    codes = {400: (3, "InvalidArgument"), 401: (16, "Unauthenticated"), 404: (5, "NotFound"), 503: (14, "Unavailable")}
    code, reason = codes.get(status, (13, "Internal"))
    return status, {"error": {"code": code, "reason": reason, "error": message}}


def parse(raw: bytes) -> Any:
    """The JSON value of a request's body, None without a body, or the text if it is not JSON."""
    try:
        return json.loads(raw, parse_constant=int) if raw else None  # int refuses NaN, which is no JSON
    except ValueError:
        return raw.decode(errors="replace")


def shape(value: Any) -> Any:
    """The keys and types of a JSON value."""
    if isinstance(value, dict):
        return {key: shape(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shape(part) for part in value]
    return "number" if type(value) in (int, float) else type(value).__name__


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def check(value: Any, wanted: Any, name: str = "the body") -> None:
    """Refuses what is not the value wanted, or not of the type, pattern, predicate or fields wanted."""
    if isinstance(wanted, dict) and isinstance(value, dict):
        for key, part in wanted.items():
            check(value.get(key), part, key)
        return
    if isinstance(wanted, re.Pattern):
        right = isinstance(value, str) and bool(wanted.fullmatch(value))
    elif isinstance(wanted, type):
        right = type(value) is wanted
    else:
        right = wanted(value) if callable(wanted) else type(value) is type(wanted) and value == wanted
    if not right:
        raise Refusal(400, f"{name} is {value!r}, not {getattr(wanted, '__name__', wanted)}")


@dataclass
class Fault:
    """What happens to the next `count` matching requests (None: to all)."""

    kind: str
    pattern: str
    count: int | None = None
    value: float = 0
    lasts: float = math.inf  # seconds from the first request that it strikes
    until: float = math.inf


@dataclass
class Row:
    """One metrics report, as a row of the master's database."""

    run_id: int
    group: str
    step: int
    values: Json
    archived: bool = False


@dataclass(eq=False)
class StubMaster:
    """One experiment with one trial. The fields from `state` on record what the trial did."""

    searcher_metric: str = "validation_loss"
    time_metric: str | None = None
    hparams: Json = field(default_factory=dict)
    storage: Json = field(default_factory=dict)  # the experiment's `checkpoint_storage`; {}: next to the trial's files
    trial_id: int = 7
    run_id: int = 1
    task_id: str = field(default_factory=lambda: f"3.{uuid.uuid4()}")  # 3 is the experiment
    user_token: str = "user-token"
    containers: list[tuple[str, int]] = field(default_factory=lambda: [("127.0.0.1", 2)])  # address, slots
    context: bytes = b""  # the .tar.gz that containers unpack in their working directory

    state: str = field(default="STATE_RUNNING", init=False)
    requests: list[tuple[str, Any]] = field(default_factory=list, init=False)
    violations: list[str] = field(default_factory=list, init=False)
    redelivered: list[str] = field(default_factory=list, init=False)
    rows: list[Row] = field(default_factory=list, init=False)
    late_validations: list[Row] = field(default_factory=list, init=False)  # after the search had stopped the trial
    profiled: set[str] = field(default_factory=set, init=False)
    checkpoints: list[Json] = field(default_factory=list, init=False)
    progress: list[float] = field(default_factory=list, init=False)
    acks: list[str] = field(default_factory=list, init=False)
    early_exits: list[str] = field(default_factory=list, init=False)

    def __enter__(self) -> StubMaster:
        self._started = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self._faults: list[Fault] = []
        self.unanswered: list[tuple[str, bytes]] = []  # processed, but the client does not know
        self._preempted = False
        self._preempt_step = self._stop_step = math.inf
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._absence: threading.Thread | None = None
        self._server = Server(0, self)
        self.port = self._server.server_port
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._absence is not None:
            self._absence.join()
        self._server.stop()
        with self._changed:
            self._changed.notify_all()

    @property
    def allocation_id(self) -> str:
        return f"{self.task_id}.{self.run_id}"

    @property
    def session_token(self) -> str:
        return f"session-token-{self.run_id}"

    def history(self, group: str) -> list[tuple[int, int, Json]]:
        """The reports of a group that no later run archived, as (run id, step, values), in the order of arrival."""
        return [(row.run_id, row.step, row.values) for row in self.rows if row.group == group and not row.archived]

    def latest_checkpoint(self) -> str | None:
        """The uuid that the next run gets: of all runs' checkpoints not deleted, the one with the most steps."""
        whole = [checkpoint for checkpoint in self.checkpoints if checkpoint["state"] == "STATE_COMPLETED"]
        return max(whole, key=lambda c: c["metadata"]["steps_completed"], default={"uuid": None})["uuid"]

    def new_run(self) -> None:
        """Starts the trial's next run: new run id, allocation and token, no preemption signal."""
        with self._changed:
            self.run_id += 1
            self._preempted, self._preempt_step = False, math.inf
            self.unanswered.clear()
            self._changed.notify_all()

    def preempt_at(self, step: int) -> None:
        """Turns on the preemption signal as soon as the current run reports a training metric at `step` or later."""
        self._preempt_step = step

    def stop_at(self, step: int) -> None:
        """Lets the search stop the trial at its first validation at `step` or later. Only the trial's state says so."""
        self._stop_step = step

    def fail(self, pattern: str, count: int | None = 1, status: int = 500) -> None:
        """Answers the next matching requests with `status`, unprocessed."""
        self._faults.append(Fault("fail", pattern, count, status))

    def fail_for(self, pattern: str, seconds: float) -> None:
        """Answers 500 for some time, from the next matching request on, as if the database were down."""
        self._faults.append(Fault("fail", pattern, None, 500, seconds))

    def heal(self) -> None:
        """Ends all faults."""
        self._faults.clear()

    def reset(self, pattern: str, count: int | None = 1) -> None:
        """Closes the connection of the next matching requests, unprocessed."""
        self._faults.append(Fault("reset", pattern, count))

    def drop(self, pattern: str, count: int | None = 1) -> None:
        """Processes the next matching requests, then closes the connection without an answer.

        The client repeats them, as it does what `away` cuts off. Repeats are in `redelivered`, are no violation and are
        answered as by the real master: it takes a metric of equal value, and has an error 500 for a known checkpoint.
        """
        self._faults.append(Fault("drop", pattern, count))

    def delay(self, pattern: str, seconds: float, count: int | None = None) -> None:
        """Waits before matching requests are processed."""
        self._faults.append(Fault("delay", pattern, count, seconds))

    def away(self, seconds: float, pattern: str | None = None) -> None:
        """Cuts all connections and refuses new ones for a while: at once, or from a matching request on."""
        if pattern is not None:
            self._faults.append(Fault("away", pattern, 1, seconds))
            return
        self._server.stop()
        self._server = server = Server(self.port, self)

        def return_later() -> None:
            if not self._closing.wait(seconds) and server is self._server:
                server.start()

        self._absence = threading.Thread(target=return_later, daemon=True)
        self._absence.start()

    def serve(self, request: str, tokens: Json, raw: bytes) -> Answer | None:
        """Answers one request, "METHOD path?query"; None means that the connection is closed instead."""
        body = parse(raw)
        with self._changed:
            self.requests.append((request, body))
            moment = time.monotonic()
            active = [fault for fault in self._faults if fault.count != 0 and moment < fault.until]
            fault = next((fault for fault in active if re.search(fault.pattern, request)), Fault("none", ""))
            fault.count = fault.count and fault.count - 1
            fault.until = min(fault.until, moment + fault.lasts)
        if fault.kind == "fail":
            return error(int(fault.value), INJECTED if fault.lasts == math.inf else DATABASE_AWAY)
        if fault.kind == "delay":
            self._closing.wait(fault.value)
        if fault.kind == "away":
            self.away(fault.value)
        if fault.kind in ("reset", "away"):
            return None
        with self._changed:
            try:
                answer = self._process(request, tokens, raw, body)
            except Refusal as refusal:
                answer = error(*refusal.args)
                self.violations.append(f"{request}: {refusal.args[1]}; body: {json.dumps(body)[:500]}")
            if fault.kind == "drop" and answer == OK:
                self.unanswered.append((request, raw))
        return None if fault.kind == "drop" else answer

    def _process(self, request: str, tokens: Json, raw: bytes, body: Any) -> Answer:
        path, _, query = request.replace(" /api/v1/", " ").partition("?")
        allocation, trial = f"allocations/{self.allocation_id}", f"trials/{self.trial_id}"
        for_users: dict[str, Callable[..., Answer]] = {"GET me": self._get_user, f"GET {trial}": self._get_trial}
        handlers = for_users | {
            "POST runs/start": self._start_run,
            f"GET {allocation}/signals/preemption": self._watch_preemption,
            f"POST {allocation}/signals/ack_preemption": self._acknowledge_preemption,
            f"POST {trial}/metrics": self._report_metrics,
            f"POST {trial}/progress": self._report_progress,
            f"POST {trial}/early_exit": self._report_early_exit,
            "POST checkpoints": self._report_checkpoint,
            "PATCH checkpoints": self._delete_checkpoints,
            f"GET tasks/{self.task_id}/context_directory": self._send_context,
            f"POST {allocation}/acceleratorData": self._take_accelerator_data,
        }
        for rank in range(len(self.containers)):
            handlers[f"GET {allocation}/resources/res-{rank}/rendezvous"] = functools.partial(self._rendezvous, rank)
        handler = handlers.get(path)
        users = {USER_HEADER: f"Bearer {self.user_token}"} if path in for_users else {}
        if not tokens or tokens not in (users, {TOKEN_HEADER: f"Bearer {self.session_token}"}):
            raise Refusal(401, f"invalid credentials {tokens}")
        if handler is None:
            raise Refusal(404, "no such endpoint in this run of the trial")
        if path.startswith("POST") and (request, raw) in self.unanswered:
            self.unanswered.remove((request, raw))
            self.redelivered.append(request)
            if handler == self._report_metrics:
                return OK
            if handler == self._report_checkpoint:
                return error(500, "error adding checkpoint metadata: duplicate key")
        if not path.startswith("GET") and not isinstance(body, dict) and handler != self._acknowledge_preemption:
            raise Refusal(400, "the body is not a JSON object")
        return handler(body, **dict(parse_qsl(query)))

    def _get_user(self, _: None) -> Answer:
        user: Json = {"id": 1, "username": "determined", "displayName": "", "agentUserGroup": None, "active": True}
        user |= {"admin": False, "remote": False, "modifiedAt": self._started, "lastAuthAt": self._started}
        return 200, {"user": user}

    def _get_trial(self, _: None) -> Answer:
        def workload(row: Row) -> Json:
            values = {"avgMetrics": row.values, "batchMetrics": []}
            return {"endTime": self._started, "metrics": values, "numInputs": 0, "totalBatches": row.step}

        rows = [row for row in self.rows if not row.archived]
        validations = [row for row in rows if row.group == "validation"]
        best = min(validations, key=lambda row: row.values[self.searcher_metric], default=None)
        trial: Json = {"id": self.trial_id, "experimentId": int(self.task_id.split(".")[0]), "state": self.state}
        trial |= {"taskId": self.task_id, "taskIds": [self.task_id], "hparams": self.hparams, "restarts": 0}
        trial |= {"startTime": self._started, "endTime": None, "wallClockTime": 1.5, "runnerState": ""}
        trial |= {"totalBatchesProcessed": max((row.step for row in rows), default=0), "searcherMetricValue": 0}
        trial |= {"latestValidation": workload(validations[-1]) if best else None}
        trial |= {"bestValidation": workload(best) if best else None, "bestCheckpoint": None}
        trial |= {"checkpointCount": 0, "totalCheckpointSize": "0", "warmStartCheckpointUuid": ""}
        return 200, {"trial": trial}

    def _start_run(self, body: Json) -> Answer:
        check(body, {"runId": self.trial_id, "checkpointStorage": {"type": str}})
        return 200, {"storageId": 1}

    def _watch_preemption(self, _: None, timeout_seconds: str = "0") -> Answer:
        run_id, end = self.run_id, time.monotonic() + float(timeout_seconds)
        while not (self._preempted or self._closing.is_set() or self.run_id != run_id or time.monotonic() >= end):
            self._changed.wait(end - time.monotonic())
        return 200, {"preempt": self._preempted and self.run_id == run_id}

    def _acknowledge_preemption(self, _: Any) -> Answer:
        if not self._preempted:
            raise Refusal(400, "an acknowledgement without a signal: the finished trial would be queued again")
        self.acks.append(self.allocation_id)
        return OK

    def _report_metrics(self, body: Json) -> Answer:
        ids = {"trialId": self.trial_id, "trialRunId": self.run_id}
        check(body, {"group": re.compile(r"[^.]+"), "metrics": {"metrics": {"avgMetrics": dict}} | ids})
        group, report = body["group"], body["metrics"]
        values, batches = report["metrics"]["avgMetrics"], report["metrics"].get("batchMetrics") or []
        if not all(isinstance(batch, dict) for batch in batches):
            raise Refusal(400, "batchMetrics is not a list of objects")
        if report.get("reportTime") is not None:
            check(report, {"reportTime": TIME})
        if group in PROFILING_GROUPS:
            self.profiled.add(group)
            return OK
        check(report, {"stepsCompleted": is_count})
        row, counted = Row(self.run_id, group, report["stepsCompleted"], values), {"training", "validation"}
        numbers = set(values) if group in counted else {"epoch", "epochs"} & set(values)
        if group == "validation":
            numbers |= {name for name in (self.searcher_metric, self.time_metric) if name}
        check(values, dict.fromkeys(sorted(numbers), is_number))
        for old in self.rows:
            repeated = sorted(set(old.values) & set(values))
            if repeated and (old.run_id, old.group, old.step) == (row.run_id, row.group, row.step):
                raise Refusal(400, f"{group} metrics {repeated} of step {row.step} reported twice")
        for old in self.rows:
            same_partition = old.group == group or not {old.group, group} & counted
            old.archived |= old.run_id < row.run_id and old.step > row.step - same_partition
        self.rows.append(row)
        if group == "training" and row.step >= self._preempt_step:
            self._preempted = True
            self._changed.notify_all()
        if group == "validation" and self.state == STOPPING:
            self.late_validations.append(row)
        elif group == "validation" and row.step >= self._stop_step:
            self.state = STOPPING
        return OK

    def _report_progress(self, body: Json) -> Answer:
        check(body, {"progress": lambda value: is_number(value) and 0 <= value <= 1, "is_raw": True})
        self.progress.append(body["progress"])
        return OK

    def _report_early_exit(self, body: Json) -> Answer:
        check(body, {"reason": "EXITED_REASON_INVALID_HP"})
        self.early_exits.append(body["reason"])
        return OK

    def _report_checkpoint(self, body: Json) -> Answer:
        here = {"taskId": self.task_id, "allocationId": self.allocation_id, "storageId": 1}
        what = {"uuid": UUID, "state": "STATE_COMPLETED", "metadata": {"steps_completed": is_count}, "training": dict}
        check(body, here | what | {"resources": dict, "reportTime": TIME})
        check(body["resources"], dict.fromkeys(body["resources"], re.compile("[0-9]+")))
        if body["uuid"] in [checkpoint["uuid"] for checkpoint in self.checkpoints]:
            raise Refusal(400, f"checkpoint {body['uuid']} reported twice")
        self.checkpoints.append(dict(body))
        return OK

    def _delete_checkpoints(self, body: Json) -> Answer:
        known = {checkpoint["uuid"]: checkpoint for checkpoint in self.checkpoints}
        check(body, {"checkpoints": list})
        for change in body["checkpoints"]:
            check(change, {"uuid": known.__contains__, "resources": {"resources": dict}})
            left = change["resources"]["resources"]
            known[change["uuid"]]["state"] = "STATE_PARTIALLY_DELETED" if left else "STATE_DELETED"
        return OK

    def _send_context(self, _: None) -> Answer:
        return 200, {"b64Tgz": base64.b64encode(self.context).decode()}

    def _take_accelerator_data(self, body: Json) -> Answer:
        names = dict.fromkeys(("acceleratorType", "containerId", "nodeName"), str) | {"acceleratorUuids": list}
        here = {"allocationId": self.allocation_id}
        check(body, here | {"acceleratorData": here | {"taskId": self.task_id} | names})
        return OK

    def _rendezvous(self, rank: int, _: None) -> Answer:
        addresses, slots = zip(*self.containers, strict=True)
        return 200, {"rendezvousInfo": {"addresses": addresses, "rank": rank, "slots": slots}}


class Server(ThreadingHTTPServer):
    """Owns its port from the start, but refuses connections until `start()`."""

    request_queue_size = 128

    def __init__(self, port: int, master: StubMaster) -> None:
        super().__init__(("127.0.0.1", port), Handler, bind_and_activate=False)
        self.master = master
        self.connections: set[socket.socket] = set()
        self.loop = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self.server_bind()

    def start(self) -> None:
        self.server_activate()
        self.loop.start()

    def stop(self) -> None:
        if self.loop.is_alive():
            self.shutdown()
        self.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # an OSError is a client that hung up
            self.master.violations.append(f"the stub failed: {error!r}")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: Server

    def serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{self.command} {self.path}"
        tokens = {name: self.headers[name] for name in (TOKEN_HEADER, USER_HEADER) if name in self.headers}
        answer = self.server.master.serve(request, tokens, raw)
        if answer is None:
            self.close_connection = True
            return
        text = json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
        try:
            self.wfile.flush()
        except OSError:
            self.server.master.unanswered.append((request, raw))
            raise

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = serve

    def log_message(self, format: str, *args: Any) -> None:
        pass
