"""Killed, signalled, out of space: a job ends at once and says why, and the next one goes on as if nothing had been."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import ROOT, SCRIPT, Job, Outcome, launch, run, start, torchrun
from observe import differences
from processes import last_state, read_tensors, unfinished_checkpoints, whole_checkpoints
from sabotage import sabotage
from tiny import overrides

CONFIG = ("--config", str(ROOT / "config.yaml"))
# bfloat16 with dropout and accumulation, 4 checkpoints.
JOB: dict[str, Any] = {"amp_dtype": "bfloat16", "dropout": 0.1, "micro_batch_size": 3, "max_steps": 12}
JOB |= {"reporting_period": 1, "validation_period": 3, "checkpoint_period": 3}
FILES = {".metadata", "__0_0.distcp", "__1_0.distcp", "train_state.json", "metadata.json"}


def train(cwd: Path, *arguments: str, before: str = "", **hparams: Any) -> Outcome:
    cwd.mkdir(exist_ok=True)
    return run(*CONFIG, *overrides(**JOB | hparams), *arguments, ranks=2, cwd=cwd, before=before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run."""
    cwd = tmp_path_factory.mktemp("finished")
    outcome = train(cwd)
    assert outcome.codes == [0, 0], outcome.text
    assert "done: " in outcome.text
    return cwd


def assert_ends_as(finished: Path, cwd: Path) -> None:
    """What an interrupted run left is, bit for bit, what the undisturbed one did."""
    tensors = [read_tensors(whole_checkpoints(folder / "checkpoints")[12], cwd) for folder in (finished, cwd)]
    assert differences(*tensors) == []
    assert last_state(finished / "checkpoints") == last_state(cwd / "checkpoints")


def test_only_checkpoints_are_left_behind(finished: Path) -> None:
    assert [path.name for path in finished.iterdir()] == ["checkpoints"]
    assert sorted(whole_checkpoints(finished / "checkpoints")) == [3, 6, 9, 12]
    for path in (finished / "checkpoints").iterdir():
        assert {file.name for file in path.iterdir()} == FILES


def test_a_finished_run_is_not_run_again(finished: Path) -> None:
    before = sorted((finished / "checkpoints").iterdir())
    outcome = train(finished, "--resume", "latest")
    assert outcome.code == 0 and "nothing left to do at step 12" in outcome.text, outcome.text
    assert "  loss" not in outcome.text.replace("  loss        starts", "")
    assert sorted((finished / "checkpoints").iterdir()) == before


def test_killed_ranks(finished: Path, tmp_path: Path) -> None:
    """Rank 0 while it trains, the other half-way through its file, rank 0 just before the save is complete."""
    kills = [("killed_in_backward", 0, 9), ("killed_in_write", 1, 1), ("killed_after_metadata", 0, 2)]
    for resume, kill in zip([(), *[("--resume", "latest")] * 2], kills, strict=True):
        outcome = train(tmp_path, *resume, before=sabotage(*kill))
        assert outcome.code == -signal.SIGKILL, outcome.text
    # The first ended in step 5, the second in the save of step 6, the third in that of step 9.
    assert sorted(whole_checkpoints(tmp_path / "checkpoints")) == [3, 6]
    unfinished = unfinished_checkpoints(tmp_path / "checkpoints")
    assert len(unfinished) == 2
    outcome = train(tmp_path, "--resume", "latest")
    assert outcome.code == 0, outcome.text
    for name in unfinished:
        assert outcome.text.count(f"{name}: train_state.json is not whole") == 1, outcome.text
    assert f"at step 6 of checkpoint {whole_checkpoints(tmp_path / 'checkpoints')[6]}" in outcome.text
    assert_ends_as(finished, tmp_path)


def test_a_killed_rank_ends_a_job_of_torchrun(tmp_path: Path) -> None:
    driver = tmp_path / "driver.py"
    plant = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'tools')!r})\n{sabotage('killed_in_backward', 1, 3)}\n"
    )
    driver.write_text(f"{plant}sys.path.insert(0, {str(ROOT)!r})\nimport fsdp_train\nfsdp_train.main()\n")
    outcome = torchrun(*CONFIG, *overrides(), ranks=2, cwd=tmp_path, script=driver)
    assert outcome.code == 1 and "exitcode: -9" in outcome.text.replace("exitcode  ", "exitcode"), outcome.text


@pytest.mark.parametrize("fault", ["disk_full", "file_too_large"])
def test_one_rank_cannot_save(finished: Path, tmp_path: Path, fault: str) -> None:
    outcome = train(tmp_path, before=sabotage(fault, 1, 2))
    assert outcome.codes == [1, 1] or outcome.code == 1, outcome.text
    says = [line for line in outcome.text.splitlines() if line.startswith("fsdp_train.py: ")]
    assert len(says) == 1, outcome.text
    for word in (
        "step 6 cannot be saved to",
        str(tmp_path / "checkpoints"),
        "bytes are free",
        "a checkpoint has 90,048",
    ):
        assert word in says[0], says[0]
    if fault == "disk_full":
        assert "No space left on device" in says[0]
    assert "Traceback" not in outcome.text, outcome.text
    assert sorted(whole_checkpoints(tmp_path / "checkpoints")) == [3]
    assert unfinished_checkpoints(tmp_path / "checkpoints") == set(), "no half checkpoint is left"
    outcome = train(tmp_path, "--resume", "latest")
    assert outcome.code == 0, outcome.text
    assert_ends_as(finished, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB: enough for two checkpoints and a half of the run below."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    place = ("--checkpoint-dir", str(small_disk / "checkpoints"))
    sizes: dict[str, Any] = {"d_model": 24, "amp_dtype": None}
    outcome = train(tmp_path / "a", *place, **sizes)
    assert outcome.code == 1, outcome.text
    assert outcome.text.count("fsdp_train.py: ") == 1 and "Traceback" not in outcome.text, outcome.text
    assert "cannot be saved to" in outcome.text and "bytes are free" in outcome.text
    saved = whole_checkpoints(small_disk / "checkpoints")
    assert saved and unfinished_checkpoints(small_disk / "checkpoints") == set()
    # Before the first step where there is no room for even one.
    outcome = train(tmp_path / "a", *place, **sizes | {"d_model": 64})
    assert outcome.code == 1 and "first step" not in outcome.text
    assert f"--checkpoint-dir {small_disk / 'checkpoints'}" in outcome.text and "not free" in outcome.text, outcome.text


# ---- Signals ----

HANG = """
import os, torch
if os.environ["RANK"] == "1":
    torch.Tensor.backward = lambda *a, **k: __import__("time").sleep(3600)
"""


def finish(job: Job) -> Outcome:
    """Gone within the hang limit of a few seconds, which is what is tested."""
    return job.finish(timeout=30, grace=3)


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
        outcome = finish(job)
        assert outcome.codes[0] == -signum, (before, ranks, outcome.codes, outcome.text)
        assert "Traceback" not in outcome.text, outcome.text


def test_an_interrupted_torchrun_leaves_nothing_running(tmp_path: Path) -> None:
    """Its ranks, in sessions of their own, are gone too: `finish` looks for them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    job = launch([[*command, *CONFIG, *overrides(max_steps=10**5)]], tmp_path)
    job.wait_for("  loss")
    job.signal(signal.SIGTERM, 0)
    assert finish(job).code != 0
