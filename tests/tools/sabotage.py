"""Faults to plant in a rank: `run(..., before=sabotage("killed_in_write", rank=1, call=2))`."""

import errno
import itertools
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter as Writer


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_written(descriptor: int) -> None:
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
    die()


def fail_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# What happens, where, and whether before the call or after it.
FAULTS: dict[str, tuple[Callable[..., None], Any, str, bool]] = {
    "killed_in_backward": (die, torch.Tensor, "backward", True),
    "killed_in_write": (die_half_written, os, "fsync", True),
    "killed_after_write": (die, Writer, "write_data", False),
    "killed_after_metadata": (die, Writer, "finish", False),
    "disk_full": (fail_full, Writer, "write_data", True),
    "file_too_large": (lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)), Writer, "write_data", True),
}


def sabotage(fault: str, rank: int, call: int) -> str:
    """Source that lets `fault` strike that rank at the `call`-th chance."""
    return f"import os, sabotage\nif os.environ['RANK'] == '{rank}': sabotage.plant({fault!r}, {call})"


def plant(fault: str, call: int) -> None:
    effect, owner, name, before = FAULTS[fault]
    original, calls = getattr(owner, name), itertools.count(1)

    def sabotaged(*args: Any, **kwargs: Any) -> Any:
        due = next(calls) == call
        if due and before:
            effect(*args)
        result = original(*args, **kwargs)
        if due and not before:
            effect(*args)
        return result

    setattr(owner, name, sabotaged)
