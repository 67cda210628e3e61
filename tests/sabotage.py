"""Run fsdp_train.py and let one rank fail: sabotage.py FAULT RANK CALL [argument ...], at the CALL-th chance."""

import errno
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from launch import SCRIPT
from torch.distributed.checkpoint import FileSystemWriter


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_written(descriptor: int) -> None:
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
    die()


def fail_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def limit_size(*_: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


# What happens, where, and whether before the call or after it.
FAULTS: dict[str, tuple[Callable[..., None], Any, str, bool]] = {
    "killed_in_backward": (die, torch.Tensor, "backward", True),
    "killed_in_write": (die_half_written, os, "fsync", True),
    "killed_after_write": (die, FileSystemWriter, "write_data", False),
    "killed_after_metadata": (die, FileSystemWriter, "finish", False),
    "disk_full": (fail_full, FileSystemWriter, "write_data", True),
    "file_too_large": (limit_size, FileSystemWriter, "write_data", True),
}


def plant(fault: str, call: int) -> None:
    effect, owner, name, before = FAULTS[fault]
    original = getattr(owner, name)
    left = call

    def sabotaged(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and before:
            effect(*args)
        result = original(*args, **kwargs)
        if left == 0 and not before:
            effect(*args)
        return result

    setattr(owner, name, sabotaged)


if __name__ == "__main__":
    fault, rank, call, *arguments = sys.argv[1:]
    if os.environ["RANK"] == rank:
        plant(fault, int(call))
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")
