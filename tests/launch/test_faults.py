"""Killed, signalled, out of space: a job ends at once and says why, and the next one goes on as if nothing had been."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster import can_unshare
from launch import ROOT, SCRIPT, Outcome, launch, run, start
from observe import differences
from processes import last_state, read_tensors, unfinished_checkpoints, whole_checkpoints
from tiny import overrides

CONFIG = ("--config", str(ROOT / "config.yaml"))
# bfloat16 with dropout and accumulation, 4 checkpoints.
JOB: dict[str, Any] = {"amp_dtype": "bfloat16", "dropout": 0.1, "micro_batch_size": 3, "max_steps": 12}
JOB |= {"reporting_period": 1, "validation_period": 3, "checkpoint_period": 3}
FILES = {".metadata", "__0_0.distcp", "__1_0.distcp", "train_state.json", "metadata.json"}
RESUME = ("--resume", "latest")


def train(cwd: Path, *arguments: str, before: str = "") -> Outcome:
    return run(*CONFIG, *overrides(**JOB), *arguments, ranks=2, cwd=cwd, before=before)


# Strikes one rank just before a call of one function.
FAULT = """
import itertools, os, pathlib, resource, signal, torch
from torch.distributed.checkpoint import FileSystemWriter
original, calls = {function}, itertools.count(1)
def sabotaged(target, *args, **kwargs):
    if next(calls) == {call}:
        {action}
    return original(target, *args, **kwargs)
if os.environ["RANK"] == "{rank}":
    {function} = sabotaged
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def fault(function: str, rank: int, call: int, action: str = KILL) -> str:
    return FAULT.format(function=function, rank=rank, call=call, action=action)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    cwd = tmp_path_factory.mktemp("finished")
    outcome = train(cwd)
    assert outcome.codes == [0, 0] and "done: " in outcome.text, outcome.text
    return cwd


def resume_to_the_end(cwd: Path, finished: Path) -> str:
    """The output; what is left then is, bit for bit, what the undisturbed run left."""
    outcome = train(cwd, *RESUME)
    assert outcome.code == 0, outcome.text
    tensors = [read_tensors(whole_checkpoints(folder / "checkpoints")[12], cwd) for folder in (finished, cwd)]
    assert differences(*tensors) == []
    assert last_state(finished / "checkpoints") == last_state(cwd / "checkpoints")
    return outcome.text


def test_a_finished_run_leaves_only_checkpoints_and_is_not_run_again(finished: Path) -> None:
    outcome = train(finished, *RESUME)
    assert outcome.code == 0 and "nothing left to do at step 12" in outcome.text, outcome.text
    assert "first step" not in outcome.text
    assert [path.name for path in finished.iterdir()] == ["checkpoints"]
    assert sorted(whole_checkpoints(finished / "checkpoints")) == [3, 6, 9, 12]
    for path in (finished / "checkpoints").iterdir():
        assert {file.name for file in path.iterdir()} == FILES


def test_killed_ranks(finished: Path, tmp_path: Path) -> None:
    """Rank 0 while it trains, the other half-way through its file, rank 0 just before the save is complete."""
    half = f"os.ftruncate(target, os.fstat(target).st_size // 2); {KILL}"
    kills = [
        fault("torch.Tensor.backward", 0, 9),
        fault("os.fsync", 1, 1, half),
        fault("pathlib.Path.write_text", 0, 2),
    ]
    for resume, kill in zip([(), RESUME, RESUME], kills, strict=True):
        outcome = train(tmp_path, *resume, before=kill)
        assert outcome.code == -signal.SIGKILL, outcome.text
    # The first ended in step 5, the second in the save of step 6, the third in that of step 9.
    whole = whole_checkpoints(tmp_path / "checkpoints")
    unfinished = unfinished_checkpoints(tmp_path / "checkpoints")
    assert sorted(whole) == [3, 6] and len(unfinished) == 2
    text = resume_to_the_end(tmp_path, finished)
    for name in unfinished:
        assert text.count(f"{name}: train_state.json is not whole") == 1, text
    assert f"at step 6 of checkpoint {whole[6]}" in text


# ---- No room ----


def assert_step_6_is_not_saved(outcome: Outcome, checkpoints: Path) -> None:
    assert outcome.code == 1 and "Traceback" not in outcome.text, outcome.text
    (says,) = [line for line in outcome.text.splitlines() if line.startswith("fsdp_train.py: ")]
    assert f"step 6 cannot be saved to {checkpoints}/" in says
    assert "bytes are free, a checkpoint has 90,048" in says
    assert list(whole_checkpoints(checkpoints)) == [3]
    assert unfinished_checkpoints(checkpoints) == set(), "no half checkpoint is left"


def test_one_rank_cannot_save(finished: Path, tmp_path: Path) -> None:
    small = fault("FileSystemWriter.write_data", 1, 2, "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))")
    assert_step_6_is_not_saved(train(tmp_path, before=small), tmp_path / "checkpoints")
    resume_to_the_end(tmp_path, finished)


@pytest.mark.skipif(not can_unshare(), reason="mounts a small file system, which takes root")
def test_a_full_disk(finished: Path, tmp_path: Path) -> None:
    """There is room for one checkpoint and a half, and later for all."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=430k", "tmpfs", checkpoints], check=True)
    try:
        assert_step_6_is_not_saved(train(tmp_path), checkpoints)
        subprocess.run(["mount", "-o", "remount,size=2m", checkpoints], check=True)
        resume_to_the_end(tmp_path, finished)
    finally:
        subprocess.run(["umount", "-l", checkpoints], check=True)


# ---- Signals: within seconds all processes are gone, which `finish` sees ----

HANG = """
import os, torch
if os.environ["RANK"] == "1":
    torch.Tensor.backward = lambda *a, **k: __import__("time").sleep(3600)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_job(tmp_path: Path, signum: signal.Signals) -> None:
    """All ranks of a running job, rank 0 alone, and a rank that waits inside C++ for one that hangs."""
    arguments = (*CONFIG, *overrides(max_steps=10**5, amp_dtype=None, reporting_period=1))
    for before, ranks, rank in (("", 2, None), ("", 0, None), (HANG, 2, 0)):
        job = start(*arguments, ranks=ranks, cwd=tmp_path, before=before)
        job.wait_for("schedule" if before else "  loss")
        if before:
            time.sleep(2)  # the ranks need a moment to get there
        job.signal(signum, rank)
        outcome = job.finish(timeout=30, grace=3)
        assert outcome.codes[0] == -signum, (before, ranks, outcome.codes, outcome.text)
        assert "Traceback" not in outcome.text, outcome.text


@pytest.mark.parametrize("victim", ["torchrun", "a rank"])
def test_torchrun_and_its_ranks_end_together(tmp_path: Path, victim: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    job = launch([[*command, *CONFIG, *overrides(max_steps=10**5)]], tmp_path)
    job.wait_for("  loss  ")
    torchrun = psutil.Process(job.pids[0])
    if victim == "torchrun":
        torchrun.terminate()
    else:
        torchrun.children()[1].kill()
    outcome = job.finish(grace=3)
    assert outcome.code and (victim == "torchrun" or "exitcode  : -9" in outcome.text), outcome.text
