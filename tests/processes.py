"""Find the processes of a job, whatever session they are in, and read what it left."""

import contextlib
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

MARK = "TEST_JOB"  # environment variable that all processes of a job inherit


def new_mark() -> dict[str, str]:
    """Environment that tells the processes of one job from all others."""
    return {MARK: uuid.uuid4().hex}


def processes(mark: dict[str, str]) -> dict[int, int | None]:
    """The living processes of a job by pid, with the rank of those that have one."""
    wanted = f"{MARK}={mark[MARK]}".encode()
    found: dict[int, int | None] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")  # empty of a zombie
        except OSError:
            continue
        if wanted in variables:
            ranks = [int(variable[5:]) for variable in variables if variable.startswith(b"RANK=")]
            found[int(folder.name)] = ranks[0] if ranks else None
    return found


def leftovers(mark: dict[str, str], patience: float = 3) -> dict[int, int | None]:
    """The processes of an ended job that still live after `patience` seconds."""
    end = time.monotonic() + patience
    while (living := processes(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    return living


def kill_all(mark: dict[str, str]) -> None:
    for pid in processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


def read_tensors(checkpoint: Path, scratch: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, read by torch's own tool."""
    file = scratch / f"{checkpoint.name}.pt"
    dcp_to_torch_save(checkpoint, file)
    tree = torch.load(file, weights_only=True)
    file.unlink()
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
    """train_state.json of the finished checkpoint with the most steps, less what names its files and torch."""
    checkpoints = whole_checkpoints(directory)
    state = json.loads((checkpoints[max(checkpoints)] / "train_state.json").read_text())["train_state"]
    return {key: value for key, value in state.items() if key not in ("files", "torch")}
