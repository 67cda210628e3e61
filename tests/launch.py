"""Run the script, or a function of a test module, on several ranks, and see that nothing is left running."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import MARK, kill_all, new_mark

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "fsdp_train.py"
MARKS: dict[int, dict[str, str]] = {}  # by pid, of what `start` started: torchrun gives each rank a session of its own


@dataclass
class Outcome:
    code: int
    text: str  # stdout and stderr


def torchrun(ranks: int) -> list[str]:
    """The command that starts what follows it on `ranks` ranks, on a port of its own."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def start(command: list[str], cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `command` in a session of its own, one thread per process, stdout and stderr together."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **new_mark(), **(env or {})}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    MARKS[process.pid] = {MARK: environment[MARK]}
    return process


def finish(process: subprocess.Popen[str], timeout: float = 120) -> Outcome:
    """Wait for a started command; a timeout kills all its processes and fails."""
    try:
        text, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_all(MARKS[process.pid])
        text, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{text}") from None
    return Outcome(process.returncode, text)


def run(*arguments: str, ranks: int = 2, cwd: Path, env: dict[str, str] | None = None, timeout: float = 120) -> Outcome:
    """Run the script with `arguments`: under torchrun, or plainly if `ranks` is 0."""
    launcher = torchrun(ranks) if ranks else [sys.executable]
    return finish(start([*launcher, str(SCRIPT), *arguments], cwd, env), timeout)


def on_ranks(
    function: Callable[..., Any], ranks: int, folder: Path, *arguments: Any, timeout: float = 240
) -> list[Any]:
    """Call `function(core_context, *arguments)` on `ranks` ranks; returns what each returned.

    The function must be at the top of a test module; checkpoints go to `folder`/checkpoints.
    """
    torch.save(arguments, folder / "arguments.pt")
    command = [*torchrun(ranks), __file__, function.__module__, function.__name__, str(folder)]
    outcome = finish(start(command, folder, {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}), timeout)
    assert outcome.code == 0, outcome.text
    return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(ranks)]


def worker() -> None:
    """One rank of `on_ranks`."""
    import torch.distributed as dist
    from determined import core

    import fsdp_train

    module, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    function = getattr(importlib.import_module(module), name)
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    storage = str(folder / "checkpoints")
    with core.init(distributed=fsdp_train.connect(False), checkpoint_storage=storage) as core_context:
        result = function(core_context, *arguments)
    torch.save(result, folder / f"result{dist.get_rank()}.pt")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    worker()
