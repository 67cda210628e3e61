"""Find the processes of a job, whatever they became, and read the checkpoints that it left."""

import json
import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any


def processes(leaders: Collection[int], **variables: str) -> list[int]:
    """The living processes that started with `variables` in their environment, and `leaders` with their sessions.

    A forked process shows the environment of the one it was forked from, so that only its session tells whose it is.
    """
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            led = int(folder.name) in leaders or int(session) in leaders
            if state != "Z" and (led or wanted <= set((folder / "environ").read_bytes().split(b"\0"))):
                found.append(int(folder.name))
    return sorted(found)


def send(signum: int, pids: Collection[int]) -> None:
    """Send a signal to those that still live."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def kill_all(leaders: Collection[int], **variables: str) -> None:
    """Kill until none is left: one may be starting another just now."""
    while living := processes(leaders, **variables):
        send(9, living)
        time.sleep(0.01)


def read_tensors(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, read by torch's own tool."""
    import torch  # here, for the sake of those who only look for processes
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

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
