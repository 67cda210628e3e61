"""Run the script as a trial of a Determined cluster, or as another task of it, against a `StubMaster`.

`run_trial` needs no privileges: each forked rank puts the ClusterInfo in place before it runs the script. `launch_line`
does what task containers do, with nothing replaced: `prep_container`, rendezvous and `exec.launch` with the
experiment's own entrypoint. It needs root, for a private /run and /tmp per container (`can_unshare`).
"""

from __future__ import annotations

import base64
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

from launch import SCRIPT, Job, Outcome, free_port, launch, start
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


def run_trial(
    master: StubMaster,
    workdir: Path,
    hparams: Json,
    *arguments: str,
    slots: int = 2,
    task_type: str = "TRIAL",
    env: dict[str, str] | None = None,
    before: str = "",
    during: Callable[[Job], object] = lambda _: None,
) -> Outcome:
    """Run the script in `workdir` as the trial's current run, or as a task of another type.

    A task that is no trial can have 0 slots: one process that knows of no ranks. For the rest of the options see
    `launch.start` and `Job.finish`.
    """
    master.containers = [("127.0.0.1", slots)]
    variables = task_environment(master, workdir, f"python3 {SCRIPT}", hparams, task_type) | (env or {})
    before = f"import cluster; cluster.enter_task()\n{before}"
    # Not under pytest's tmp_path: the sockets that determined creates there need a short path.
    with tempfile.TemporaryDirectory(prefix="trial-", dir="/tmp") as tmp:
        job = start(*arguments, ranks=slots, cwd=workdir, env=variables | {"TMPDIR": tmp}, before=before)
        outcome = job.finish(during=during, grace=3)
    shutil.rmtree(f"/tmp/tensorboard-{master.allocation_id}-0", ignore_errors=True)
    return outcome


def enter_task() -> None:
    """Give this rank what the info files and the launcher of its container would."""
    from determined import _info

    info: Any = _info.ClusterInfo._from_env()
    _info._info = info
    info._resources_info = _info.ResourcesInfo([])
    if info.task_type == "TRIAL":
        info._trial_info = _info.TrialInfo._from_env()
        info._rendezvous_info = _info.RendezvousInfo(["127.0.0.1"], 0, [len(info.slot_ids)])
        os.environ |= {"DET_CHIEF_IP": "127.0.0.1", "USE_TORCH_DISTRIBUTED": "True"}


def launch_line(master: StubMaster, entrypoint: str, workdir: Path, hparams: Json, env: dict[str, str]) -> Outcome:
    """Run an entrypoint in two containers, with addresses of their own and the files of `workdir` as their context.

    They share no folder: checkpoints must go to the cloud.
    """
    master.containers = [("127.0.0.1", 2), ("127.0.0.2", 2)]
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w:gz") as archive:
        archive.add(workdir, ".")
    master.context = base64.b64encode(context.getvalue()).decode()
    variables = task_environment(master, workdir, entrypoint, hparams, "TRIAL") | env
    visible = {str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix)}
    command = ["unshare", "-m", "sh", "-c", CONTAINER, "container", *(p for p in visible if p.startswith("/tmp/"))]
    return launch([command] * 2, workdir, [variables | ids_of(node) for node in (0, 1)]).finish()


def ids_of(node: int) -> dict[str, str]:
    return {"DET_AGENT_ID": f"agent-{node}", "DET_CONTAINER_ID": f"container-{node}", "DET_RESOURCES_ID": f"res-{node}"}


@functools.cache
def can_unshare() -> bool:
    """Whether `launch_line` works here."""
    trial = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/run"]
    return shutil.which("unshare") is not None and subprocess.run(trial, capture_output=True).returncode == 0


def task_environment(
    master: StubMaster, workdir: Path, entrypoint: str, hparams: Json, task_type: str
) -> dict[str, str]:
    """What the master and the agent add to the environment of the processes of a task, on container 0."""
    directory = workdir.resolve().with_name(f"{workdir.name}-storage")
    master.storage = master.storage or {"type": "directory", "container_path": str(directory)}
    if master.storage["type"] == "directory":
        Path(master.storage["container_path"]).mkdir(exist_ok=True)
    # As far as a Core API script and its launcher read it.
    config = {
        "entrypoint": entrypoint,
        "searcher": {"name": master.searcher, "metric": master.searcher_metric},
        "checkpoint_storage": master.storage,
        "environment": {"environment_variables": {}},
        "resources": {"slots_per_trial": sum(slots for _, slots in master.containers)},
        "debug": False,
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    env = {"PATH": path, "TMPDIR": "/tmp", "NO_PROXY": "*", "no_proxy": "*"}
    env |= {"XDG_CONFIG_HOME": "/tmp"}  # with no login of this machine's user
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}  # by the image
    env |= {"DET_MASTER": f"http://127.0.0.1:{master.port}", "DET_CLUSTER_ID": "stub-cluster"}
    env |= ids_of(0) | {"DET_RESOURCES_TYPE": "docker-container", "DET_TASK_TYPE": task_type}
    env |= {"DET_SLOT_IDS": json.dumps(list(range(master.containers[0][1])))}
    env |= {"DET_TASK_ID": master.task_id, "DET_ALLOCATION_ID": master.allocation_id}
    env |= {"DET_SESSION_TOKEN": master.session_token, "DET_USER_TOKEN": master.user_token, "DET_USER": "determined"}
    env |= {"DET_WORKDIR": "/run/determined/workdir", "DET_RUN_DIR": "/run/determined"}
    ports = ("INTER_TRAIN_PROCESS_COMM_PORT_1", "INTER_TRAIN_PROCESS_COMM_PORT_2", "C10D_PORT")
    env |= {name: str(free_port()) for name in ports}
    if task_type != "TRIAL":
        return env
    env |= {"DET_EXPERIMENT_ID": "3", "DET_TRIAL_ID": str(master.trial_id), "DET_TRIAL_RUN_ID": str(master.run_id)}
    env |= {"DET_EXPERIMENT_CONFIG": json.dumps(config), "DET_HPARAMS": json.dumps(hparams)}
    env |= {"DET_TRIAL_SEED": "1234", "DET_STEPS_COMPLETED": "0"}
    latest_checkpoint = master.latest_checkpoint()
    return env | ({"DET_LATEST_CHECKPOINT": latest_checkpoint} if latest_checkpoint else {})
