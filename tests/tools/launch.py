"""Start the script, or a function of a test, on several ranks, and see that nothing is left running.

What the script imports takes a process seconds to load. So ranks are forked, in milliseconds, from a process that has
it loaded, and from there on behave as `python fsdp_train.py` under torchrun does, to the end of the interpreter. Only
variables that Python and its packages read as they load are those of pytest. `launch` and `torchrun` start commands.
"""

import ctypes
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import pickle
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

from processes import kill_all, processes, send

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent.parent
SCRIPT = ROOT / "fsdp_train.py"
HANG = 600  # seconds after which a job counts as hung
Env = dict[str, str] | None
FOREIGN = (
    "DET_",
    "TORCHELASTIC_",
    "PET_",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "PYTHONPATH",
    "INTER_TRAIN",
)

# What the script and determined import, some of it late, and what tests import. Nothing here may start a thread.
PRELOAD = """
    boto3 determined.core determined.experimental.client determined.tensorboard.metric_writers.pytorch psutil pytest
    torch._dynamo torch.distributed.checkpoint.format_utils torch.distributed.elastic.multiprocessing.errors
    torch.distributed.fsdp.sharded_grad_scaler torch.distributed.fsdp.wrap torch.profiler torch.utils.flop_counter
    tqdm.contrib.logging unittest.mock
"""
LOCK = threading.Lock()  # multiprocessing loses exit codes when two threads look for them


class Outcome(NamedTuple):
    """How a job ended. A negative code is a signal."""

    code: int  # of the process that failed first, or 0
    text: str  # all stdout and stderr, rank 0 first
    codes: list[int]  # of each rank, or of each command
    texts: list[str]


class Job:
    """Forked ranks or commands that run side by side, with all that they start in turn."""

    def __init__(self, forked: bool) -> None:
        self.forked = forked
        self.pids: list[int] = []
        self.polls: list[Callable[[], int | None]] = []
        self.first_failure = 0
        self.folder = tempfile.TemporaryDirectory(prefix="job-")
        self.mark = {"TEST_JOB": self.folder.name}  # environment variable that all commands of the job inherit
        self.kill = weakref.finalize(self, kill_all, self.pids, **self.mark)  # once: later the pids may be others'

    def environment(self, env: Env) -> dict[str, str]:
        """Ours, less what would tell a process of ranks and clusters, and `env`."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return inherited | self.mark | (env or {})

    def poll(self) -> list[int | None]:
        """The exit codes; None: still running."""
        with LOCK:
            codes = [poll() for poll in self.polls]
        self.first_failure = self.first_failure or next((code for code in codes if code), 0)
        return codes

    def texts(self) -> list[str]:
        """What each has written so far."""
        files = [Path(self.folder.name, str(index)) for index in range(len(self.pids))]
        return [file.read_text(errors="replace") if file.exists() else "" for file in files]

    def wait_for(self, words: str, timeout: float = HANG) -> None:
        """Wait until there is a line with `words` in the output."""
        deadline, ended = time.monotonic() + timeout, False
        while not any(words in line for text in self.texts() for line in text.splitlines()):
            if ended:
                self.kill()
                raise AssertionError("\n".join([f"no {words!r} in:", *self.texts()]))
            time.sleep(0.02)
            ended = None not in self.poll() or time.monotonic() > deadline

    def signal(self, signum: int, rank: int | None = None) -> None:
        """Send a signal to a rank, or to all forked ranks or all commands, but to nothing that these have started."""
        pids = self.pids
        if rank is not None:
            pids = [pids[rank]] if self.forked else processes((), **self.mark, RANK=str(rank))
        send(signum, pids)

    def finish(
        self, timeout: float = HANG, grace: float = 10, during: Callable[["Job"], object] = lambda _: None
    ) -> Outcome:
        """Wait for the end, calling `during` all the while. Fails if the job hangs or leaves a process behind.

        When one process has failed, the others are killed after `grace` seconds.
        """
        deadline, failed = time.monotonic() + timeout, False
        try:
            while None in (codes := self.poll()) and time.monotonic() < deadline:
                if self.first_failure and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + grace)
                time.sleep(0.02)
                during(self)
            ended, hung = None not in codes, None in codes and not failed
            deadline = time.monotonic() + 3
            while (left := processes(self.pids, **self.mark)) and ended and time.monotonic() < deadline:
                time.sleep(0.02)
            if hung:
                send(signal.SIGABRT, left)  # faulthandler says where every thread is
                time.sleep(1)
        finally:
            self.kill()
        while None in (codes := self.poll()):
            time.sleep(0.01)
        texts = self.texts()
        self.folder.cleanup()
        text = "".join(texts)
        assert not hung, f"still running after {timeout} s:\n{text}"
        assert not (ended and left), f"left something running:\n{text}"
        return Outcome(self.first_failure, text, [code for code in codes if code is not None], texts)


# ---- Forked ranks ----


def run(*arguments: str, timeout: float = HANG, grace: float = 10, **options: Any) -> Outcome:
    """Run the script to its end, with the options of `start`."""
    return start(*arguments, **options).finish(timeout, grace)


def start(
    *arguments: str, ranks: int = 1, nodes: int = 1, cwd: Path, env: Env = None, script: Path = SCRIPT, before: str = ""
) -> Job:
    """Start a script on `ranks` ranks; 0 is one process that knows of no ranks.

    before: Python source that each rank runs before the script; it can import the modules beside this one.
    """
    # No folder of pytest's path: a copy of the script must not find the modules of this one.
    found = [path for path in sys.path if not Path(path).resolve().is_relative_to(ROOT / "tests")]
    path = [str(script.parent), *(p for p in found if Path(p).resolve() != ROOT), str(TOOLS)]
    return _fork(ranks, nodes, cwd, env, _run_script, str(script), arguments, before, path)


def on_ranks(
    function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any, nodes: int = 1, timeout: float = HANG
) -> list[Any]:
    """Call `function(core_context, *arguments)` on `ranks` ranks; returns what each returned.

    The function must be at the top of a module; checkpoints go to `folder`/checkpoints.
    """
    call = pickle.dumps((function, arguments))
    with tempfile.TemporaryDirectory() as results:
        outcome = _fork(ranks, nodes, folder, None, _call, call, str(folder / "checkpoints"), results).finish(timeout)
        assert outcome.code == 0, outcome.text
        return [pickle.loads(Path(results, str(rank)).read_bytes()) for rank in range(ranks)]


def free_port() -> int:
    """A port that nothing listens on, outside the range of outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def _fork(ranks: int, nodes: int, cwd: Path, env: Env, become: Callable[..., None], *arguments: Any) -> Job:
    job, port, local = Job(forked=True), free_port(), max(ranks // nodes, 1)
    for rank in range(ranks or 1):
        place = {"RANK": rank, "LOCAL_RANK": rank % local, "GROUP_RANK": rank // local, "MASTER_PORT": port}
        place |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": local, "GROUP_WORLD_SIZE": nodes}
        variables = {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in place.items()}
        environment = job.environment((variables if ranks else {}) | (env or {}))
        child = (environment, str(cwd), f"{job.folder.name}/{rank}", become, arguments)
        process = multiprocessing.get_context("forkserver").Process(target=_become, args=child)
        with LOCK:
            process.start()
        job.pids.append(process.pid or 0)
        job.polls.append(lambda process=process: process.exitcode)  # type: ignore[misc]
    return job


def _become(environment: dict[str, str], cwd: str, output: str, become: Callable[..., None], arguments: Any) -> None:
    """Make a forked process what a new one would be."""
    from determined import core

    os.setsid()
    if parent := multiprocessing.parent_process():  # pytest: when its end of a pipe closes, SIGIO ends this process
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    sys.stdout = open(1, "w", buffering=1 if "PYTHONUNBUFFERED" in environment else -1, closefd=False)  # noqa: SIM115
    faulthandler.enable()
    tempfile.tempdir = None  # found anew, by the new TMPDIR
    multiprocessing.set_start_method(None, force=True)  # back to the default
    # Determined read its ports when it was imported, before the fork.
    master = environment.get("MASTER_PORT", "")
    port = 2000 + (int(master) % 10000 if master.isdecimal() else 0)
    port = int(environment.get("INTER_TRAIN_PROCESS_COMM_PORT_1", port))
    init: Any = core.DistributedContext.__init__
    init.__kwdefaults__.update(pub_port=port, pull_port=port + 1)
    gc.freeze()  # else the interpreter's end takes three times as long: it goes through all that was ever loaded

    import numpy as np
    import torch

    np.random.seed()  # as in a new process: not what all ranks inherited
    torch.default_generator.seed()
    torch.set_num_threads(1)  # where OMP_NUM_THREADS is looked at no more
    become(*arguments)


def _run_script(script: str, arguments: tuple[str, ...], before: str, path: list[str]) -> None:
    """Do what `python script arguments` does, to the exit."""
    sys.argv, sys.path = [script, *arguments], path
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    code: Any = 0
    try:
        exec(compile(before, "<before>", "exec"), {"__name__": "before"})
        exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        here = error.__traceback__
        sys.excepthook(type(error), error.with_traceback(here and here.tb_next), here and here.tb_next)
        code = 1
    # The end of the interpreter, which sys.exit() would not reach from here: the fork server calls os._exit().
    ctypes.pythonapi.Py_Exit(code)


def _call(call: bytes, storage: str, results: str) -> None:
    import torch.distributed as dist
    from determined import core

    try:
        function, arguments = pickle.loads(call)
        with core.init(distributed=_connect(), checkpoint_storage=storage) as core_context:
            result = function(core_context, *arguments)
        Path(results, str(dist.get_rank())).write_bytes(pickle.dumps(result))
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def _connect() -> Any:
    """Join the process group; returns the DistributedContext."""
    import torch

    import fsdp_train

    fsdp_train.read_place()
    return fsdp_train.connect(torch.device("cpu"))


# ---- Commands ----


def launch(commands: Sequence[Sequence[str]], cwd: Path, envs: Sequence[dict[str, str]] | None = None) -> Job:
    """Start commands side by side."""
    job = Job(forked=False)
    for index, (command, more) in enumerate(zip(commands, envs or [{}] * len(commands), strict=True)):
        env = job.environment({"PYTHONFAULTHANDLER": "1"} | more)
        with Path(job.folder.name, str(index)).open("wb") as out:
            process = subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=out, start_new_session=True)
        job.pids.append(process.pid)
        job.polls.append(process.poll)
    return job


def torchrun(*arguments: str, ranks: int, cwd: Path, env: Env = None, script: Path = SCRIPT) -> Outcome:
    """Run the script under torchrun itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return launch([[*command, str(script), *arguments]], cwd, [env or {}]).finish()


if multiprocessing.current_process().name == "MainProcess":
    os.environ["OMP_NUM_THREADS"] = "1"  # of ranks and commands; and numpy's OpenBLAS would start threads at its import
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    forkserver.set_forkserver_preload(PRELOAD.split())
    forkserver.ensure_running()  # which loads at once, while pytest still collects the tests
