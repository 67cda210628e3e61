"""Find the processes of a job, whatever they became, and read the checkpoints that it left."""

import json
import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def processes(leaders: Collection[int], job: str) -> list[int]:
    """The living processes in the sessions of `leaders`, or that started with TEST_JOB=`job`.

    A forked process shows the environment of the one it was forked from, so that only its session tells whose it is.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            ours = {process.pid, os.getsid(process.pid)} & set(leaders) or process.environ().get("TEST_JOB") == job
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def send(signum: int, pids: Collection[int]) -> None:
    """Send a signal to those that still live."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def kill_all(leaders: Collection[int], job: str) -> None:
    """Kill until none is left: one may be starting another just now."""
    while living := processes(leaders, job):
        send(9, living)
        time.sleep(0.01)


def read_tensors(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, read by torch's own tool."""
    import torch  # here, for the sake of those who only look for processes
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file = scratch / f"{checkpoint.name}.pt"
    dcp_to_torch_save(checkpoint, file)
    tree = torch.load(file, weights_only=True)
    adam = {f"{name}: {key}": value for name, state in tree["optimizer"].items() for key, value in state.items()}
    return tree["model"] | adam


def whole_checkpoints(directory: Path) -> dict[int, Path]:
    """The finished checkpoints in `directory`, by step."""
    found: dict[int, Path] = {}
    for file in directory.glob("*/train_state.json"):
        step = json.loads(file.read_text())["train_state"]["steps_completed"]
        assert step not in found, f"two checkpoints of step {step}"
        found[step] = file.parent
    return found


def unfinished_checkpoints(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not (path / "train_state.json").exists()}


def last_state(directory: Path) -> dict[str, Any]:
    """train_state.json of the finished checkpoint with the most steps, less its files' names and checksums."""
    _, path = max(whole_checkpoints(directory).items())
    state = json.loads((path / "train_state.json").read_text())["train_state"]
    return {key: value for key, value in state.items() if key != "files"}
