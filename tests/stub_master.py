"""A stand-in for the Determined 0.38.1 master, to run a Core API script as a managed trial without a cluster.

`StubMaster` answers what the processes of a trial ask, checks every request and keeps what it received. A request that
the real master refuses, or accepts and lives to regret (a NaN for the searcher, a metric reported twice), is answered
4xx and noted in `violations`: a test ends with `assert master.violations == []`.

The faults (`fail`, `reset`, `drop`, `delay`, `away`) strike requests whose "METHOD path?query" matches a regular
expression.
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
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

TOKEN_HEADER = "Grpc-Metadata-x-allocation-token"
PROFILING_GROUPS = {"gpu", "cpu", "memory", "disk", "network"}

Json = dict[str, Any]
Answer = tuple[int, Json]
OK: Answer = (200, {})


class Refusal(Exception):
    """A request that breaks the protocol: answered with `status` and recorded as a violation."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def get(body: Json, name: str, kind: type) -> Any:
    """A required field of a given JSON type."""
    value = body.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Refusal(f"{name} is {value!r}, not of type {kind.__name__}")
    return value


def parse(raw: bytes) -> Any:
    """The JSON value of a request's body, None without a body, or the text if it is not JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return json.loads(raw, parse_constant=refuse) if raw else None
    except ValueError:
        return raw.decode(errors="replace")


def check_time(text: str) -> None:
    """Raises Refusal unless `text` is an RFC 3339 time, which has a time zone."""
    try:
        zoned = datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        zoned = False
    if not zoned:
        raise Refusal(f"reportTime is {text!r}, not a time with its zone")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass
class Fault:
    """What happens to the next `count` matching requests (None: to all)."""

    kind: str
    pattern: str
    count: int | None
    value: float = 0
    skip: int = 0  # matching requests that pass before


@dataclass
class Row:
    """One metrics report, as a row of the master's database."""

    run_id: int
    group: str
    step: int
    values: Json
    archived: bool = False

    @property
    def partition(self) -> str:
        return self.group if self.group in ("training", "validation") else "generic"


@dataclass(eq=False)
class StubMaster:
    """One experiment with one trial. The fields from `requests` on record what the trial did."""

    searcher_metric: str = "validation_loss"
    time_metric: str | None = None
    trial_id: int = 7
    run_id: int = 1
    task_id: str = field(default_factory=lambda: f"3.{uuid.uuid4()}")
    containers: list[tuple[str, int]] = field(default_factory=lambda: [("127.0.0.1", 2)])  # address, slots
    context: bytes = b""  # the .tar.gz that containers unpack in their working directory

    requests: list[tuple[str, Any]] = field(default_factory=list, init=False)
    violations: list[str] = field(default_factory=list, init=False)
    redelivered: list[str] = field(default_factory=list, init=False)
    rows: list[Row] = field(default_factory=list, init=False)
    profiled: set[str] = field(default_factory=set, init=False)
    checkpoints: list[Json] = field(default_factory=list, init=False)
    progress: list[float] = field(default_factory=list, init=False)
    acks: list[str] = field(default_factory=list, init=False)
    early_exits: list[str] = field(default_factory=list, init=False)

    def __enter__(self) -> StubMaster:
        self._faults: list[Fault] = []
        self.unanswered: list[tuple[str, bytes]] = []  # processed, but the client does not know
        self._preempted = False
        self._preempt_step: float = math.inf
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
        """The uuid that the next run gets: of all runs' checkpoints, the one with the most steps."""
        return max(self.checkpoints, key=lambda c: c["metadata"]["steps_completed"], default={"uuid": None})["uuid"]

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

    def fail(self, pattern: str, count: int | None = 1, status: int = 500, skip: int = 0) -> None:
        """Answers the next matching requests, or those after `skip` more, with `status`, unprocessed."""
        self._faults.append(Fault("fail", pattern, count, status, skip))

    def reset(self, pattern: str, count: int | None = 1) -> None:
        """Closes the connection of the next matching requests, unprocessed."""
        self._faults.append(Fault("reset", pattern, count))

    def drop(self, pattern: str, count: int | None = 1) -> None:
        """Processes the next matching requests, then closes the connection without an answer.

        The client sends such a request again, as it does when `away` cuts off an answer. Those repeats are in
        `redelivered`, are no violation and are answered as by the real master: it takes a metric of equal value, and
        has an error 500 for a checkpoint it knows.
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

    def serve(self, request: str, token: str | None, raw: bytes) -> Answer | None:
        """Answers one request, "METHOD path?query"; None means that the connection is closed instead."""
        body = parse(raw)
        with self._changed:
            self.requests.append((request, body))
            matching = [f for f in self._faults if f.count != 0 and re.search(f.pattern, request)]
            fault = next((f for f in matching if not f.skip), Fault("none", "", None))
            for other in matching:
                other.skip -= other.skip > 0
            fault.count = fault.count and fault.count - 1
        if fault.kind == "fail":
            return int(fault.value), {"message": "fault injected by the test"}
        if fault.kind == "delay":
            self._closing.wait(fault.value)
        if fault.kind == "away":
            self.away(fault.value)
        if fault.kind in ("reset", "away"):
            return None
        with self._changed:
            try:
                answer = self._process(request, token, raw, body)
            except Refusal as refusal:
                self.violations.append(f"{request}: {refusal}; body: {json.dumps(body)[:500]}")
                answer = refusal.status, {"message": str(refusal)}
            if fault.kind == "drop" and answer == OK:
                self.unanswered.append((request, raw))
        return None if fault.kind == "drop" else answer

    def _process(self, request: str, token: str | None, raw: bytes, body: Any) -> Answer:
        path, _, query = request.partition("?")
        allocation, trial = f"allocations/{self.allocation_id}", f"trials/{self.trial_id}"
        handlers: dict[str, Callable[..., Answer]] = {
            "POST runs/start": self._start_run,
            f"GET {allocation}/signals/preemption": self._watch_preemption,
            f"POST {allocation}/signals/ack_preemption": self._acknowledge_preemption,
            f"POST {trial}/metrics": self._report_metrics,
            f"POST {trial}/progress": self._report_progress,
            f"POST {trial}/early_exit": self._report_early_exit,
            "POST checkpoints": self._report_checkpoint,
            f"GET tasks/{self.task_id}/context_directory": self._send_context,
            f"POST {allocation}/acceleratorData": self._take_accelerator_data,
        }
        for rank in range(len(self.containers)):
            rendezvous = f"GET {allocation}/resources/res-{rank}/rendezvous"
            handlers[rendezvous] = functools.partial(self._rendezvous, rank=rank)
        handler = handlers.get(path.replace(" /api/v1/", " "))
        if token != f"Bearer {self.session_token}":
            raise Refusal(f"{TOKEN_HEADER} is {token!r}", 401)
        if handler is None:
            raise Refusal("no such endpoint in this run of the trial", 404)
        if path.startswith("POST") and (request, raw) in self.unanswered:
            self.unanswered.remove((request, raw))
            self.redelivered.append(request)
            if handler == self._report_metrics:
                return OK
            if handler == self._report_checkpoint:
                return 500, {"message": "error adding checkpoint metadata: duplicate key"}
        if path.startswith("POST") and not isinstance(body, dict) and handler != self._acknowledge_preemption:
            raise Refusal("the body is not a JSON object")
        return handler(body, **dict(parse_qsl(query)))

    def _start_run(self, body: Json) -> Answer:
        if get(body, "runId", int) != self.trial_id:
            raise Refusal(f"runId is {body['runId']}, not {self.trial_id}")
        get(get(body, "checkpointStorage", dict), "type", str)
        return 200, {"storageId": 1}

    def _watch_preemption(self, _: None, timeout_seconds: str = "0") -> Answer:
        run_id, end = self.run_id, time.monotonic() + float(timeout_seconds)
        while not (self._preempted or self._closing.is_set() or self.run_id != run_id or time.monotonic() >= end):
            self._changed.wait(end - time.monotonic())
        return 200, {"preempt": self._preempted and self.run_id == run_id}

    def _acknowledge_preemption(self, _: Any) -> Answer:
        if not self._preempted:
            raise Refusal("an acknowledgement without a signal: the finished trial would be queued again")
        self.acks.append(self.allocation_id)
        return OK

    def _report_metrics(self, body: Json) -> Answer:
        group, report = get(body, "group", str), get(body, "metrics", dict)
        values = get(get(report, "metrics", dict), "avgMetrics", dict)
        if not group or "." in group:
            raise Refusal(f"bad metrics group {group!r}")
        if get(report, "trialId", int) != self.trial_id or get(report, "trialRunId", int) != self.run_id:
            raise Refusal(f"invalid run id, {report['trialRunId']} (reported) != {self.run_id} (expected)")
        if not all(isinstance(batch, dict) for batch in report["metrics"].get("batchMetrics") or []):
            raise Refusal("batchMetrics is not a list of objects")
        if report.get("reportTime") is not None:
            check_time(get(report, "reportTime", str))
        if group in PROFILING_GROUPS:
            self.profiled.add(group)
            return OK
        row = Row(self.run_id, group, get(report, "stepsCompleted", int), values)
        numbers = set(values) if group in ("training", "validation") else {"epoch", "epochs"} & set(values)
        if group == "validation":
            numbers |= {name for name in (self.searcher_metric, self.time_metric) if name}
        for name in sorted(numbers):
            if not is_number(values.get(name)):
                raise Refusal(f"{group} metric {name!r} is {values.get(name, 'missing')!r}, not a finite number")
        if row.step < 0:
            raise Refusal(f"stepsCompleted is {row.step}")
        for old in self.rows:
            repeated = sorted(set(old.values) & set(values))
            if repeated and (old.run_id, old.group, old.step) == (row.run_id, row.group, row.step):
                raise Refusal(f"{group} metrics {repeated} of step {row.step} reported twice")
        for old in self.rows:
            last = row.step - 1 if old.partition == row.partition else row.step
            old.archived |= old.run_id < row.run_id and old.step > last
        self.rows.append(row)
        if group == "training" and row.step >= self._preempt_step:
            self._preempted = True
            self._changed.notify_all()
        return OK

    def _report_progress(self, body: Json) -> Answer:
        if not is_number(body.get("progress")) or not 0 <= body["progress"] <= 1 or not get(body, "is_raw", bool):
            raise Refusal(f"bad progress: {body}")
        self.progress.append(body["progress"])
        return OK

    def _report_early_exit(self, body: Json) -> Answer:
        if body.get("reason") != "EXITED_REASON_INVALID_HP":
            raise Refusal(f"should not report special exit reason {body.get('reason')!r} to the master")
        self.early_exits.append(body["reason"])
        return OK

    def _report_checkpoint(self, body: Json) -> Answer:
        if not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", get(body, "uuid", str)):
            raise Refusal(f"bad checkpoint uuid {body['uuid']!r}")
        expected = {"taskId": self.task_id, "allocationId": self.allocation_id, "state": "STATE_COMPLETED"}
        for name, value in expected.items():
            if body.get(name) != value:
                raise Refusal(f"checkpoint {name} is {body.get(name)!r}, not {value!r}")
        if not all(isinstance(size, str) and size.isdecimal() for size in get(body, "resources", dict).values()):
            raise Refusal(f"checkpoint resources are not sizes in bytes: {body['resources']}")
        get(body, "training", dict)
        if get(body, "storageId", int) != 1:
            raise Refusal(f"storageId is {body['storageId']}, not that of the run's start")
        check_time(get(body, "reportTime", str))
        if get(get(body, "metadata", dict), "steps_completed", int) < 0:
            raise Refusal("checkpoint steps_completed is negative")
        if body["uuid"] in [checkpoint["uuid"] for checkpoint in self.checkpoints]:
            raise Refusal(f"checkpoint {body['uuid']} reported twice")
        self.checkpoints.append(body)
        return OK

    def _send_context(self, _: None) -> Answer:
        return 200, {"b64Tgz": base64.b64encode(self.context).decode()}

    def _take_accelerator_data(self, body: Json) -> Answer:
        get(body, "acceleratorData", dict)
        return OK

    def _rendezvous(self, _: None, rank: int) -> Answer:
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
        answer = self.server.master.serve(request, self.headers.get(TOKEN_HEADER), raw)
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
