"""Start the script, or a function of a test, on several ranks, and see that nothing is left running.

What the script imports takes a process seconds to load. So ranks are forked, in milliseconds, from a process that has
it loaded, and from there on behave as `python fsdp_train.py` under torchrun does, to the end of the interpreter. Only
variables that Python and its packages read as they load are those of pytest. `launch` and `torchrun` start commands.
"""

import ctypes
import faulthandler
import fcntl
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

from processes import kill_all, processes, send

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "fsdp_train.py"
HANG = 600  # seconds after which a job counts as hung
Env = dict[str, str] | None
# What tells a process of ranks and clusters.
FOREIGN = ("DET_", "TORCHELASTIC_", "PET_", "MASTER_", "RANK", "WORLD_", "LOCAL_", "GROUP_", "PYTHONPATH", "INTER_")

# What the script and determined import, some of it late, and what tests import. Nothing here may start a thread.
PRELOAD = """
    boto3 determined.core determined.experimental.client determined.tensorboard.metric_writers.pytorch psutil pytest
    torch._dynamo torch.distributed.checkpoint.format_utils torch.distributed.elastic.multiprocessing.errors
    torch.distributed.fsdp.sharded_grad_scaler torch.distributed.fsdp.wrap torch.profiler torch.utils.flop_counter
    tqdm.contrib.logging unittest.mock
"""
PORTS = itertools.count(random.SystemRandom().randrange(15000), 2)
LOCK = threading.Lock()  # multiprocessing loses exit codes when two threads look for them


class Outcome(NamedTuple):
    """How a job ended. A negative code is a signal."""

    code: int  # of the process that failed first, or 0
    text: str  # all stdout and stderr, rank 0 first
    codes: list[int]  # of each rank, or of each command
    texts: list[str]


class Job:
    """Ranks or commands that run side by side, with all that they start in turn."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pids: list[int] = []
        self.first_failure = 0
        self.folder = tempfile.TemporaryDirectory(prefix="job-")
        self.kill = weakref.finalize(self, kill_all, self.pids, self.folder.name)  # once: later the pids may be others'

    def add(self, env: Env, cwd: Path, become: Callable[..., None], *arguments: Any) -> None:
        """Fork a process that goes on as a rank or a command."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        environment |= {"TEST_JOB": self.folder.name} | (env or {})
        output = Path(self.folder.name, str(len(self.pids)))
        output.touch()
        child = (environment, cwd, output, become, arguments)
        process: Any = multiprocessing.get_context("forkserver").Process(target=_become, args=child)
        with LOCK:
            process.start()
        self.processes.append(process)
        self.pids.append(process.pid)

    def poll(self) -> list[int | None]:
        """The exit codes; None: still running."""
        with LOCK:
            codes = [process.exitcode for process in self.processes]
        self.first_failure = self.first_failure or next((code for code in codes if code), 0)
        return codes

    def texts(self) -> list[str]:
        """What each has written so far."""
        files = [Path(self.folder.name, str(index)) for index in range(len(self.pids))]
        return [file.read_text(errors="replace") for file in files]

    def wait_for(self, words: str) -> None:
        """Wait until `words` are in the output."""
        wait_until(lambda: words in "".join(self.texts()) or None not in self.poll(), HANG)
        if words not in (text := "\n".join(self.texts())):
            self.kill()
            raise AssertionError(f"no {words!r} in:\n{text}")

    def signal(self, signum: int, index: int | None = None) -> None:
        """Send a signal to one rank or command, or to all, but to nothing that these have started."""
        send(signum, self.pids if index is None else [self.pids[index]])

    def finish(
        self, timeout: float = HANG, grace: float = 10, during: Callable[["Job"], object] = lambda _: None
    ) -> Outcome:
        """Wait for the end, calling `during`; nothing may hang or be left. A failure's others have `grace` seconds."""

        def ended() -> bool:
            during(self)
            return None not in self.poll()

        ours = self.pids, self.folder.name
        try:
            in_time = wait_until(lambda: ended() or self.first_failure != 0, timeout)
            clean = in_time and (not wait_until(ended, grace) or wait_until(lambda: not processes(*ours), 3))
            if not in_time:
                send(signal.SIGABRT, processes(*ours))  # faulthandler says where every thread is
                time.sleep(1)
        finally:
            self.kill()
        wait_until(lambda: None not in self.poll(), HANG)
        texts = self.texts()
        self.folder.cleanup()
        text = "".join(texts)
        assert in_time, f"still running after {timeout} s:\n{text}"
        assert clean, f"left something running:\n{text}"
        return Outcome(self.first_failure, text, [code for code in self.poll() if code is not None], texts)


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.02) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(pause)
    return met


def run(*arguments: str, timeout: float = HANG, grace: float = 10, **options: Any) -> Outcome:
    """Run the script to its end, with the options of `start`."""
    return start(*arguments, **options).finish(timeout, grace)


def start(
    *arguments: str, ranks: int = 1, nodes: int = 1, cwd: Path, env: Env = None, script: Path = SCRIPT, before: str = ""
) -> Job:
    """Start a script; with 0 ranks one process that knows of none. Each runs the source `before` first."""
    return _start_ranks(ranks, nodes, cwd, env, _run_script, str(script), arguments, before)


def on_ranks(
    function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any, nodes: int = 1, timeout: float = HANG
) -> list[Any]:
    """What `function(core_context, *arguments)`, of a module, returns on each rank. They work in `folder`."""
    with tempfile.TemporaryDirectory() as results:
        outcome = _start_ranks(ranks, nodes, folder, None, _call, function, arguments, results).finish(timeout)
        assert outcome.code == 0, outcome.text
        return [pickle.loads(Path(results, str(rank)).read_bytes()) for rank in range(ranks)]


def launch(commands: Sequence[list[str]], cwd: Path, envs: Sequence[dict[str, str]] | None = None) -> Job:
    """Start commands side by side."""
    job = Job()
    for command, env in zip(commands, envs or [{}] * len(commands), strict=True):
        job.add({"PYTHONFAULTHANDLER": "1"} | env, cwd, os.execvp, command[0], command)
    return job


def torchrun(*arguments: str, ranks: int, cwd: Path, script: Path = SCRIPT) -> Outcome:
    """Run the script under torchrun itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return launch([[*command, str(script), *arguments]], cwd).finish()


def free_port() -> int:
    """A port from 17000 to 31999 that nothing listens on, another at each call: jobs start side by side."""
    while True:
        port = 17000 + next(PORTS) % 15000
        with suppress(OSError), socket.create_server(("", port)):
            return port


def _start_ranks(ranks: int, nodes: int, cwd: Path, env: Env, become: Callable[..., None], *arguments: Any) -> Job:
    job, port, local = Job(), free_port(), max(ranks // nodes, 1)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks}
    shared |= {"LOCAL_WORLD_SIZE": local, "GROUP_WORLD_SIZE": nodes}
    for rank in range(ranks or 1):
        place = {"RANK": rank, "LOCAL_RANK": rank % local, "GROUP_RANK": rank // local} | shared if ranks else {}
        place["INTER_TRAIN_PROCESS_COMM_PORT_1"] = port - 15000  # it and the next
        job.add({name: str(value) for name, value in place.items()} | (env or {}), cwd, become, *arguments)
    return job


# ---- In the forked process ----


def _become(environment: dict[str, str], cwd: Path, output: Path, become: Callable[..., None], arguments: Any) -> None:
    """Make the forked process what a new one would be."""
    import torch
    from determined import core

    os.setsid()
    if parent := multiprocessing.parent_process():  # pytest: when its end of a pipe closes, SIGIO ends this process
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(1, 2)
    faulthandler.enable()
    tempfile.tempdir = None  # found anew, by the new TMPDIR
    # Determined read its ports when it was imported, before the fork.
    port = int(environment.get("INTER_TRAIN_PROCESS_COMM_PORT_1", 0))
    init: Any = core.DistributedContext.__init__
    init.__kwdefaults__.update(pub_port=port, pull_port=port + 1)
    gc.freeze()  # else the interpreter's end takes three times as long: it goes through all that was ever loaded
    torch.default_generator.seed()  # no state that all ranks share: a seed that is missing must show
    torch.set_num_threads(1)  # where OMP_NUM_THREADS is looked at no more
    become(*arguments)


def _run_script(script: str, arguments: tuple[str, ...], before: str) -> None:
    """Do what `python script arguments` does, to the end of the interpreter, which the fork server would skip."""
    # No folder of pytest's path: a copy of the script must not find the modules of this one.
    tests = ROOT / "tests"
    others = [path for path in sys.path if (place := Path(path).resolve()) != ROOT and tests not in place.parents]
    sys.argv, sys.path = [script, *arguments], [str(Path(script).parent), *others, str(tests / "tools")]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    exec(before, {"__name__": "before"})
    # As the interpreter does it: prints an error, and ends the process at a sys.exit().
    failed = ctypes.pythonapi.PyRun_SimpleString(b"exec(compile(open(__file__, 'rb').read(), __file__, 'exec'))")
    ctypes.pythonapi.Py_Exit(-failed)


def _call(function: Callable[..., Any], arguments: Any, results: str) -> None:
    from fsdp_train import connect, core, dist, read_place, torch

    read_place()
    channel = connect(torch.device("cpu"))
    with core.init(distributed=channel, checkpoint_storage=str(Path("checkpoints").resolve())) as core_context:
        result = function(core_context, *arguments)
    Path(results, str(dist.get_rank())).write_bytes(pickle.dumps(result))
    dist.barrier()


if multiprocessing.current_process().name == "MainProcess":
    compiled = tempfile.TemporaryDirectory(prefix="compiled-")  # none that was made earlier, for other instructions
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled.name
    os.environ["OMP_NUM_THREADS"] = "1"  # of ranks and commands; and numpy's OpenBLAS would start threads at its import
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    forkserver.set_forkserver_preload(PRELOAD.split())
    forkserver.ensure_running()  # which loads at once, while pytest still collects the tests
