"""A stand-in for the Determined 0.38.1 master, to run a Core API script as a managed trial without a cluster.

`StubMaster` answers what the processes of a trial ask, checks every request and keeps what it received. A request that
the real master refuses, or accepts and lives to regret (a NaN for the searcher, a metric reported twice), is answered
4xx and noted in `violations`: a test ends with `assert master.violations == []`.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

Json = dict[str, Any]
Answer = tuple[int, Json]
OK: Answer = (200, {})

TOKEN_HEADER = "Grpc-Metadata-x-allocation-token"  # of the trial's own requests
USER_HEADER = "Authorization"  # of a client's, such as determined.experimental.client
PROFILING_GROUPS = {"gpu", "cpu", "memory", "disk", "network"}
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
# What a real master was asked and what it answered, one trial a paragraph.
RECORDED = Path(__file__).parents[1] / "cluster/recorded.jsonl"


class Refusal(Exception):
    """A request that breaks the protocol, with the status and the message of the answer: recorded as a violation."""


def error(status: int, message: str) -> Answer:
    """An error in the form of the master's gateway."""
    return status, {"error": {"code": 13, "reason": "Stub", "error": message}}


def parse(raw: bytes) -> Any:
    """The JSON value of a request's body, None without a body, or the text if it is not JSON."""
    try:
        return json.loads(raw, parse_constant=int) if raw else None  # int refuses NaN, which is no JSON
    except ValueError:
        return raw.decode(errors="replace")


@functools.cache
def recorded_answer(path: str) -> Json:
    """The first recorded answer to a GET of a path that ends so."""
    exchanges = [json.loads(line) for line in RECORDED.read_text().splitlines() if line]
    return next(e["response"] for e in exchanges if e["method"] == "GET" and re.search(f"{path}$", e["path"]))


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

    searcher: str = "single"
    searcher_metric: str = "validation_loss"
    storage: Json = field(default_factory=dict)  # the experiment's `checkpoint_storage`; {}: next to the trial's files
    trial_id: int = 7
    run_id: int = 1
    task_id: str = field(default_factory=lambda: f"3.{uuid.uuid4()}")  # 3 is the experiment
    user_token: str = "user-token"
    containers: list[tuple[str, int]] = field(default_factory=lambda: [("127.0.0.1", 2)])  # address, slots
    context: str = ""  # the .tar.gz, in base64, that containers unpack in their working directory

    # The signal to pause comes once the current run reports a training metric at this step or later.
    preempt_step: float = math.inf
    # The search stops the trial at its first validation at this step or later. Only the trial's state says so.
    stop_step: float = math.inf

    state: str = "STATE_RUNNING"
    faults: list[Any] = field(default_factory=list)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    redelivered: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    profiled: set[str] = field(default_factory=set)
    checkpoints: list[Json] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)
    acks: list[str] = field(default_factory=list)
    early_exits: list[str] = field(default_factory=list)

    def __enter__(self) -> StubMaster:
        self.unanswered: list[tuple[str, bytes]] = []  # processed, but the client does not know
        self._preempted, self._away_until = False, 0.0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.master, self.port = self, self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
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
        by_steps = sorted(self.checkpoints, key=lambda checkpoint: checkpoint["metadata"]["steps_completed"])
        return by_steps[-1]["uuid"] if by_steps else None

    def new_run(self) -> None:
        """Starts the trial's next run: new run id, allocation and token, no preemption signal."""
        with self._changed:
            self.run_id += 1
            self._preempted, self.preempt_step = False, math.inf
            self.unanswered.clear()
            self._changed.notify_all()

    def inject(self, kind: str, pattern: str, count: float = 1, seconds: float = 0) -> None:
        """Let a fault strike the next `count` requests whose "METHOD path?query" matches `pattern`.

        fail: answers 500, unprocessed. delay: waits some seconds before processing.
        reset: closes the connection, unprocessed, and for some seconds every other one.
        drop: processes, then closes the connection without an answer. The client repeats such a request. Repeats are in
        `redelivered`, and a metric of equal value is taken, as by the real master.
        """
        self.faults.append(SimpleNamespace(kind=kind, pattern=pattern, count=count, seconds=seconds))

    def serve(self, request: str, tokens: Json, raw: bytes) -> Answer | None:
        """Answers one request, "METHOD path?query"; None means that the connection is closed instead."""
        body = parse(raw)
        with self._changed:
            self.requests.append((request, body))
            if time.monotonic() < self._away_until:
                return None
            active = [fault for fault in self.faults if fault.count > 0 and re.search(fault.pattern, request)]
            fault = active[0] if active else SimpleNamespace(kind="none", count=1)
            fault.count -= 1
        if fault.kind == "fail":
            return error(500, "unable to connect to the database")
        if fault.kind == "delay":
            self._closing.wait(fault.seconds)
        if fault.kind == "reset":
            self._away_until = time.monotonic() + fault.seconds
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
        handlers: dict[str, Callable[..., Answer]] = {
            "GET me": lambda _: (200, recorded_answer("/me")),
            f"GET {trial}": self._get_trial,
            "POST runs/start": self._start_run,
            f"GET {allocation}/signals/preemption": self._watch_preemption,
            f"POST {allocation}/signals/ack_preemption": self._acknowledge_preemption,
            f"POST {trial}/metrics": self._report_metrics,
            f"POST {trial}/progress": self._report_progress,
            f"POST {trial}/early_exit": self._report_early_exit,
            "POST checkpoints": self._report_checkpoint,
            "PATCH checkpoints": self._delete_checkpoints,
            f"GET tasks/{self.task_id}/context_directory": lambda _: (200, {"b64Tgz": self.context}),
            f"POST {allocation}/acceleratorData": lambda _: OK,
        }
        for rank in range(len(self.containers)):
            handlers[f"GET {allocation}/resources/res-{rank}/rendezvous"] = functools.partial(self._rendezvous, rank)
        handler = handlers.get(path)
        if tokens not in ({TOKEN_HEADER: f"Bearer {self.session_token}"}, {USER_HEADER: f"Bearer {self.user_token}"}):
            raise Refusal(401, f"invalid credentials {tokens}")
        if handler is None:
            raise Refusal(404, "no such endpoint in this run of the trial")
        if path.startswith("POST") and (request, raw) in self.unanswered:
            self.unanswered.remove((request, raw))
            self.redelivered.append(request)
            if handler == self._report_metrics:
                return OK
        if not path.startswith("GET") and not isinstance(body, dict) and handler != self._acknowledge_preemption:
            raise Refusal(400, "the body is not a JSON object")
        return handler(body, **dict(parse_qsl(query)))

    def _get_trial(self, _: None) -> Answer:
        trial = recorded_answer(r"/trials/\d+")["trial"]
        return 200, {"trial": trial | {"id": self.trial_id, "state": self.state}}

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
        values = report["metrics"]["avgMetrics"]
        if group in PROFILING_GROUPS:
            self.profiled.add(group)
            return OK
        check(report, {"stepsCompleted": is_count})
        row = Row(self.run_id, group, report["stepsCompleted"], values)
        check(values, dict.fromkeys(values, is_number))
        if group == "validation":
            check(values, {self.searcher_metric: is_number})
        for old in self.rows:
            repeated = sorted(set(old.values) & set(values))
            if repeated and (old.run_id, old.group, old.step) == (row.run_id, row.group, row.step):
                raise Refusal(400, f"{group} metrics {repeated} of step {row.step} reported twice")
        for old in self.rows:
            old.archived |= old.run_id < row.run_id and old.step > row.step - (old.group == group)
        self.rows.append(row)
        if group == "training" and row.step >= self.preempt_step:
            self._preempted = True
            self._changed.notify_all()
        if group == "validation" and row.step >= self.stop_step:
            self.state = "STATE_STOPPING_COMPLETED"
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
        gone = [change["uuid"] for change in body["checkpoints"]]
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint["uuid"] not in gone]
        return OK

    def _rendezvous(self, rank: int, _: None) -> Answer:
        addresses, slots = zip(*self.containers, strict=True)
        return 200, {"rendezvousInfo": {"addresses": addresses, "rank": rank, "slots": slots}}


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    master: StubMaster

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
