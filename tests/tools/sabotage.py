"""Faults to plant in a rank: `run(..., before=sabotage("killed_in_write", rank=1, call=2))`."""

import itertools
import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter

# Each strikes just before a call of one function.
FAULTS: dict[str, tuple[Any, str]] = {
    "killed_in_backward": (torch.Tensor, "backward"),
    "killed_in_write": (os, "fsync"),
    "killed_after_metadata": (Path, "write_text"),  # of train_state.json
    "file_too_large": (FileSystemWriter, "write_data"),
}


def sabotage(fault: str, rank: int, call: int) -> str:
    """Source that lets `fault` strike that rank at the `call`-th chance."""
    return f"import os, sabotage\nif os.environ['RANK'] == '{rank}': sabotage.plant({fault!r}, {call})"


def plant(fault: str, call: int) -> None:
    owner, name = FAULTS[fault]
    original, calls = getattr(owner, name), itertools.count(1)

    def sabotaged(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            strike(fault, args[0])
        return original(*args, **kwargs)

    setattr(owner, name, sabotaged)


def strike(fault: str, target: Any) -> None:
    if fault == "file_too_large":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return
    if fault == "killed_in_write":
        os.ftruncate(target, os.fstat(target).st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)
