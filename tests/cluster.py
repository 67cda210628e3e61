"""Run a script as a trial of a Determined cluster, against a `StubMaster`.

`run_trial` needs no privileges: it starts the workers under torchrun, and each worker puts the trial's ClusterInfo in
place before it runs the script. `launch_line` does what task containers do, with nothing replaced: `prep_container`,
rendezvous and `exec.launch` with the experiment's own entrypoint. It needs root, for a private /run and /tmp per
container (`can_unshare`).

Every process of a trial is found by its allocation id and is gone when these functions return.
"""

from __future__ import annotations

import functools
import io
import json
import os
import random
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from stub_master import StubMaster

if TYPE_CHECKING:
    from typing_extensions import Unpack

Json = dict[str, Any]

# One task container: its own /run and /tmp, with the host directories that the arguments name kept visible.
CONTAINER = """
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/tmp /run/determined/info /run/determined/workdir /run/determined/train/model
mount --bind /tmp /run/tmp
mount -t tmpfs -o mode=1777 tmpfs /tmp
for dir in "$@"; do mkdir -p "$dir" && mount --bind "/run$dir" "$dir"; done
cd /run/determined/workdir
python3 -m determined.exec.prep_container --download_context_directory --resources --proxy
python3 -m determined.exec.prep_container --rendezvous
exec python3 -m determined.exec.launch
"""


class Options(TypedDict, total=False):
    """What the ways to run a trial have in common.

    slots: per container, default 2. latest_checkpoint: a uuid, default the one that the master would give.
    storage: the `checkpoint_storage` of the experiment, default a directory "storage" next to the working directory.
    during: called every 50 ms or so while the trial runs. env: added to the environment.
    """

    slots: int
    latest_checkpoint: str
    storage: Json
    during: Callable[[], None]
    env: dict[str, str]


class Outcome(NamedTuple):
    """How a trial's process tree (or one container's) ended. A negative code is a signal, as for `subprocess`."""

    code: int
    text: str  # stdout and stderr


def run_trial(master: StubMaster, script: Path, workdir: Path, hparams: Json, **options: Unpack[Options]) -> Outcome:
    """Run `script` in `workdir` as the trial's current run, on one node."""
    slots = options.get("slots", 2)
    master.containers = [("127.0.0.1", slots)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(slots)]
    command += ["--max-restarts", "0", str(Path(__file__).resolve()), str(script.resolve())]
    # Not under pytest's tmp_path: the sockets that determined creates there need a short path.
    with tempfile.TemporaryDirectory(prefix="trial-", dir="/tmp") as tmp:
        env = task_environment(master, workdir, f"python3 {script}", hparams, options) | {"TMPDIR": tmp}
        return run_all(master, [(command, env)], workdir, options.get("during"))[0]


def launch_line(
    master: StubMaster, entrypoint: str, workdir: Path, hparams: Json, nodes: int = 1, **options: Unpack[Options]
) -> list[Outcome]:
    """Run an entrypoint line in containers, with addresses of their own and the files of `workdir` as their context."""
    master.containers = [(f"127.0.0.{1 + node}", options.get("slots", 2)) for node in range(nodes)]
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w:gz") as archive:
        archive.add(workdir, ".")
    master.context = context.getvalue()
    env = task_environment(master, workdir, entrypoint, hparams, options)
    storage = json.loads(env["DET_EXPERIMENT_CONFIG"])["checkpoint_storage"]
    needed = (storage.get("container_path", "/"), sys.prefix, sys.base_prefix)
    visible = [str(Path(path).resolve()) for path in needed]
    command = ["unshare", "-m", "sh", "-c", CONTAINER, "container", *(p for p in visible if p.startswith("/tmp/"))]
    containers = [
        (command, env | {f"DET_{name.upper()}_ID": f"{name}-{node}" for name in ("agent", "container")})
        for node in range(nodes)
    ]
    for node, (_, variables) in enumerate(containers):
        variables["DET_RESOURCES_ID"] = f"res-{node}"
    return run_all(master, containers, workdir, options.get("during"))


@functools.cache
def can_unshare() -> bool:
    """Whether `launch_line` works here."""
    trial = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/run"]
    return shutil.which("unshare") is not None and subprocess.run(trial, capture_output=True).returncode == 0


def processes(allocation_id: str, **variables: str) -> list[int]:
    """The ids of the processes of an allocation, or of those with, say, `RANK="1"` in their environment."""
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    wanted.add(f"DET_ALLOCATION_ID={allocation_id}".encode())
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted <= set(environ.read_bytes().split(b"\0")):
                found.append(int(environ.parent.name))
    return sorted(found)


def free_port() -> int:
    """A port that is free together with the next two, outside the range of outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with ExitStack() as stack, suppress(OSError):
            for offset in range(3):
                stack.enter_context(socket.socket()).bind(("", port + offset))
            return port


def experiment_config(master: StubMaster, entrypoint: str, hparams: Json, storage: Json) -> Json:
    """The experiment config as the master hands it to a trial, as far as a Core API script and its launcher read it."""
    return {
        "name": "stub",
        "entrypoint": entrypoint,
        "hyperparameters": {name: {"type": "const", "val": value} for name, value in hparams.items()},
        "searcher": {"name": "single", "metric": master.searcher_metric, "smaller_is_better": True},
        "checkpoint_storage": {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1} | storage,
        "checkpoint_policy": "best",
        "reproducibility": {"experiment_seed": 1234},
        "resources": {"slots_per_trial": sum(slots for _, slots in master.containers)},
        "environment": {"environment_variables": {"cpu": [], "cuda": [], "rocm": []}},
        "profiling": {"enabled": False},
        "debug": False,
        "max_restarts": 5,
    }


def task_environment(
    master: StubMaster, workdir: Path, entrypoint: str, hparams: Json, options: Options
) -> dict[str, str]:
    """The environment that the master and the agent give to the processes of a trial, on container 0."""
    storage = options.get("storage") or {
        "type": "directory",
        "container_path": str(workdir.resolve().parent / "storage"),
    }
    if storage["type"] == "directory":
        Path(storage["container_path"]).mkdir(parents=True, exist_ok=True)
    latest_checkpoint = options.get("latest_checkpoint") or master.latest_checkpoint()
    steps = [c["metadata"]["steps_completed"] for c in master.checkpoints if c["uuid"] == latest_checkpoint]
    foreign = ("DET_", "TORCHELASTIC_", "PET_", "MASTER_", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    port = free_port()
    return {
        **inherited,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "TMPDIR": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "*",
        "no_proxy": "*",
        "DET_MASTER": f"http://127.0.0.1:{master.port}",
        "DET_CLUSTER_ID": "stub-cluster",
        "DET_AGENT_ID": "agent-0",
        "DET_CONTAINER_ID": "container-0",
        "DET_RESOURCES_ID": "res-0",
        "DET_RESOURCES_TYPE": "docker-container",
        "DET_SLOT_IDS": json.dumps(list(range(master.containers[0][1]))),
        "DET_TASK_ID": master.task_id,
        "DET_ALLOCATION_ID": master.allocation_id,
        "DET_SESSION_TOKEN": master.session_token,
        "DET_USER_TOKEN": master.session_token,
        "DET_USER": "determined",
        "DET_TASK_TYPE": "TRIAL",
        "DET_EXPERIMENT_ID": "3",
        "DET_TRIAL_ID": str(master.trial_id),
        "DET_TRIAL_RUN_ID": str(master.run_id),
        "DET_TRIAL_SEED": "1234",
        "DET_EXPERIMENT_CONFIG": json.dumps(experiment_config(master, entrypoint, hparams, storage)),
        "DET_HPARAMS": json.dumps(hparams),
        "DET_STEPS_COMPLETED": str(max(steps, default=0)),
        **({"DET_LATEST_CHECKPOINT": latest_checkpoint} if latest_checkpoint else {}),
        "DET_WORKDIR": "/run/determined/workdir",
        "DET_RUN_DIR": "/run/determined",
        "INTER_TRAIN_PROCESS_COMM_PORT_1": str(port),
        "INTER_TRAIN_PROCESS_COMM_PORT_2": str(port + 1),
        "C10D_PORT": str(port + 2),
        **options.get("env", {}),
    }


def run_all(
    master: StubMaster,
    commands: list[tuple[list[str], dict[str, str]]],
    workdir: Path,
    during: Callable[[], None] | None,
    timeout: float = 120,
) -> list[Outcome]:
    """Run the processes of an allocation, one command a container, and leave none behind. A timeout fails.

    When one fails, the others get 10 seconds to follow, as the master would kill them.
    """
    running: list[subprocess.Popen[bytes]] = []
    deadline, failed = time.monotonic() + timeout, False
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(index)) for index in range(len(commands))]
        try:
            for (command, env), path in zip(commands, outputs, strict=True):
                with path.open("wb") as output:
                    running.append(subprocess.Popen(command, env=env, cwd=workdir, stdout=output, stderr=output))
                resource.prlimit(running[-1].pid, resource.RLIMIT_CORE, (0, 0))
            while None in (codes := [process.poll() for process in running]) and time.monotonic() < deadline:
                time.sleep(0.05)
                if during is not None:
                    during()
                if any(codes) and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + 10)
        finally:
            if None in [process.poll() for process in running]:
                signal_all(master.allocation_id, signal.SIGABRT, pause=0.2)  # faulthandler says where every thread is
            while signal_all(master.allocation_id, signal.SIGKILL):
                time.sleep(0.02)
            ends = [process.wait() for process in running]
            shutil.rmtree(f"/tmp/tensorboard-{master.allocation_id}-0", ignore_errors=True)
        texts = [path.read_text(errors="replace") for path in outputs]
    assert failed or None not in codes, f"still running after {timeout} s:\n" + "\n".join(texts)
    return [Outcome(code, text) for code, text in zip(ends, texts, strict=True)]


def signal_all(allocation_id: str, number: signal.Signals, pause: float = 0) -> bool:
    """Send a signal to every process of an allocation, one after the other; False if there is none."""
    found = processes(allocation_id)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        time.sleep(pause)
    return bool(found)


def worker(argv: list[str]) -> None:
    """Run a script as `python3 script` would, with the ClusterInfo that a container's info files give."""
    from determined import _info

    info = _info.ClusterInfo._from_env()
    info._trial_info = _info.TrialInfo._from_env()
    info._rendezvous_info = _info.RendezvousInfo(["127.0.0.1"], 0, [len(info.slot_ids)])
    info._resources_info = _info.ResourcesInfo([])
    _info._info = info
    os.environ |= {"DET_CHIEF_IP": "127.0.0.1", "USE_TORCH_DISTRIBUTED": "True"}
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).parent)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    worker(sys.argv[1:])
