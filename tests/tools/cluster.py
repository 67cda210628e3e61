"""Run a script as a trial of a Determined cluster, or as another task of it, against a `StubMaster`.

`run_trial` needs no privileges: each forked rank puts the ClusterInfo in place before it runs the script. `launch_line`
does what task containers do, with nothing replaced: `prep_container`, rendezvous and `exec.launch` with the
experiment's own entrypoint. It needs root, for a private /run and /tmp per container (`can_unshare`).
"""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict, Unpack

from launch import Job, Outcome, free_port, launch, start
from stub_master import StubMaster

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
    """How to run a trial."""

    nodes: int  # default 1
    slots: int  # on each node, default 2
    latest_checkpoint: str  # a uuid, default the one that the master would give
    searcher: str  # the name of the experiment's, default "single"
    during: Callable[[Job], object]  # called all the time while the trial runs
    env: dict[str, str]  # added to the environment
    grace: float  # of `run_trial` only, as of `Job.finish`
    task_type: str  # of `run_trial` only, default "TRIAL"
    before: str  # of `run_trial` only: see `launch.start`


def run_trial(
    master: StubMaster, script: Path, workdir: Path, hparams: Json, *arguments: str, **options: Unpack[Options]
) -> Outcome:
    """Run `script` in `workdir` as the trial's current run, or as a task of another type; all nodes are this machine.

    A task that is no trial can have 0 slots: one process that knows of no ranks.
    """
    nodes, slots = options.get("nodes", 1), options.get("slots", 2)
    master.containers = [("127.0.0.1", slots)] * nodes
    before = f"import cluster; cluster.enter_task()\n{options.get('before', '')}"
    # Not under pytest's tmp_path: the sockets that determined creates there need a short path.
    with tempfile.TemporaryDirectory(prefix="trial-", dir="/tmp") as tmp:
        env = task_environment(master, workdir, f"python3 {script}", hparams, options) | {"TMPDIR": tmp}
        job = start(*arguments, ranks=slots * nodes, nodes=nodes, cwd=workdir, env=env, script=script, before=before)
        outcome = job.finish(during=options.get("during", lambda _: None), grace=options.get("grace", 10))
    shutil.rmtree(f"/tmp/tensorboard-{master.allocation_id}-0", ignore_errors=True)
    return outcome


def enter_task() -> None:
    """Give this rank what the info files and the launcher of its container would."""
    from determined import _info

    node, nodes = int(os.environ.get("GROUP_RANK", 0)), int(os.environ.get("GROUP_WORLD_SIZE", 1))
    os.environ |= ids_of(node) | {"TMPDIR": f"{os.environ['TMPDIR']}/{node}"}
    Path(os.environ["TMPDIR"]).mkdir(exist_ok=True)
    info: Any = _info.ClusterInfo._from_env()
    _info._info = info
    info._resources_info = _info.ResourcesInfo([])
    if info.task_type == "TRIAL":
        info._trial_info = _info.TrialInfo._from_env()
        info._rendezvous_info = _info.RendezvousInfo(["127.0.0.1"] * nodes, node, [len(info.slot_ids)] * nodes)
        os.environ |= {"DET_CHIEF_IP": "127.0.0.1", "USE_TORCH_DISTRIBUTED": "True"}


def launch_line(master: StubMaster, line: str, workdir: Path, hparams: Json, **options: Unpack[Options]) -> Outcome:
    """Run an entrypoint in containers, with addresses of their own and the files of `workdir` as their context."""
    nodes = options.get("nodes", 1)
    master.containers = [(f"127.0.0.{1 + node}", options.get("slots", 2)) for node in range(nodes)]
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w:gz") as archive:
        archive.add(workdir, ".")
    master.context = context.getvalue()
    env = task_environment(master, workdir, line, hparams, options)
    needed = (master.storage.get("container_path", "/"), sys.prefix, sys.base_prefix)
    visible = [str(Path(path).resolve()) for path in needed]
    command = ["unshare", "-m", "sh", "-c", CONTAINER, "container", *(p for p in visible if p.startswith("/tmp/"))]
    envs = [env | ids_of(node) for node in range(nodes)]
    return launch([command] * nodes, workdir, envs).finish(during=options.get("during", lambda _: None))


def ids_of(node: int) -> dict[str, str]:
    return {"DET_AGENT_ID": f"agent-{node}", "DET_CONTAINER_ID": f"container-{node}", "DET_RESOURCES_ID": f"res-{node}"}


@functools.cache
def can_unshare() -> bool:
    """Whether `launch_line` works here."""
    trial = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/run"]
    return shutil.which("unshare") is not None and subprocess.run(trial, capture_output=True).returncode == 0


def experiment_config(master: StubMaster, entrypoint: str, hparams: Json, searcher: str) -> Json:
    """The experiment config as the master hands it to a trial, as far as a Core API script and its launcher read it."""
    search: Json = {"name": searcher, "metric": master.searcher_metric, "smaller_is_better": True}
    config: Json = {"name": "stub", "entrypoint": entrypoint, "max_restarts": 5, "debug": False}
    config |= {"hyperparameters": {name: {"type": "const", "val": value} for name, value in hparams.items()}}
    config |= {"searcher": search | ({"time_metric": master.time_metric} if master.time_metric else {})}
    keep = {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 1}
    config |= {
        "checkpoint_storage": keep | master.storage,
        "checkpoint_policy": "best",
        "profiling": {"enabled": False},
    }
    config |= {"reproducibility": {"experiment_seed": 1234}}
    config |= {"resources": {"slots_per_trial": sum(slots for _, slots in master.containers)}}
    return config | {"environment": {"environment_variables": {"cpu": [], "cuda": [], "rocm": []}}}


def task_environment(master: StubMaster, workdir: Path, entrypoint: str, hparams: Json, options: Options) -> Json:
    """What the master and the agent add to the environment of the processes of a task, on container 0."""
    directory = workdir.resolve().with_name(f"{workdir.name}-storage")
    master.storage = master.storage or {"type": "directory", "container_path": str(directory)}
    if master.storage["type"] == "directory":
        Path(master.storage["container_path"]).mkdir(exist_ok=True)
    latest_checkpoint = options.get("latest_checkpoint") or master.latest_checkpoint()
    steps = [c["metadata"]["steps_completed"] for c in master.checkpoints if c["uuid"] == latest_checkpoint]
    config = experiment_config(master, entrypoint, hparams, options.get("searcher", "single"))
    master.hparams = hparams
    task_type, slots = options.get("task_type", "TRIAL"), list(range(master.containers[0][1]))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    env = {"PATH": path, "TMPDIR": "/tmp", "NO_PROXY": "*", "no_proxy": "*"}
    env |= {"XDG_CONFIG_HOME": "/tmp"}  # with no login of this machine's user
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}  # by the image
    env |= {"DET_MASTER": f"http://127.0.0.1:{master.port}", "DET_CLUSTER_ID": "stub-cluster"}
    env |= ids_of(0) | {"DET_RESOURCES_TYPE": "docker-container"}
    env |= {"DET_SLOT_IDS": json.dumps(slots), "DET_TASK_ID": master.task_id, "DET_ALLOCATION_ID": master.allocation_id}
    env |= {"DET_SESSION_TOKEN": master.session_token, "DET_USER_TOKEN": master.user_token, "DET_USER": "determined"}
    env |= {"DET_TASK_TYPE": task_type, "DET_WORKDIR": "/run/determined/workdir", "DET_RUN_DIR": "/run/determined"}
    ports = ("INTER_TRAIN_PROCESS_COMM_PORT_1", "INTER_TRAIN_PROCESS_COMM_PORT_2", "C10D_PORT")
    env |= {name: str(free_port()) for name in ports}
    if task_type == "TRIAL":
        env |= {"DET_EXPERIMENT_ID": "3", "DET_TRIAL_ID": str(master.trial_id), "DET_TRIAL_RUN_ID": str(master.run_id)}
        env |= {"DET_TRIAL_SEED": "1234", "DET_STEPS_COMPLETED": str(max(steps, default=0))}
        env |= {"DET_EXPERIMENT_CONFIG": json.dumps(config), "DET_HPARAMS": json.dumps(hparams)}
        env |= {"DET_LATEST_CHECKPOINT": latest_checkpoint} if latest_checkpoint else {}
    return env | options.get("env", {})
