"""Kill ranks at random moments until the kills are used up, then compare with a run that nothing disturbed.

    python tests/tools/soak.py --kills 12

Each attempt resumes from the latest whole checkpoint and is met with SIGKILL once: while it starts, while it trains,
or, at least every second time, just after a save has begun.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch import ROOT, Job, start, wait_until
from observe import differences
from processes import last_state, read_tensors, unfinished_checkpoints, whole_checkpoints
from tiny import overrides

STRETCH = 20  # steps per kill
JOB = {"amp_dtype": "bfloat16", "dropout": 0.1, "micro_batch_size": 3, "validation_batches": 1}
JOB |= {"reporting_period": 1, "validation_period": 5, "checkpoint_period": 5}


def attempt(folder: Path, steps: int, *arguments: str) -> Job:
    hparams = overrides(**JOB, max_steps=steps)
    return start("--config", str(ROOT / "config.yaml"), *hparams, *arguments, ranks=2, cwd=folder)


def kill_one(job: Job, moment: str, checkpoints: Path, dice: random.Random) -> None:
    """SIGKILL a random rank: while it starts, after some steps, or in the first save after these."""
    steps = dice.randint(6, STRETCH - 6)
    if moment != "starting":
        wait_until(lambda: job.texts()[0].count("  loss ") >= steps or None not in job.poll(), 120)
    if moment == "saving":
        known = os.listdir(checkpoints)
        wait_until(lambda: os.listdir(checkpoints) != known or None not in job.poll(), 120, 0.0005)
    time.sleep(dice.random() * (0.5 if moment == "starting" else 0.01))
    job.signal(signal.SIGKILL, dice.randrange(2))


def soak(kills: int, folder: Path, dice: random.Random) -> None:
    steps = STRETCH * (kills + 1)
    calm, wild = folder / "calm", folder / "wild"
    checkpoints = wild / "checkpoints"
    calm.mkdir()
    checkpoints.mkdir(parents=True)
    undisturbed = attempt(calm, steps).finish()
    assert undisturbed.code == 0, undisturbed.text
    moments = ["training", *["saving"] * (kills // 2), *dice.choices(["starting", "training"], k=kills)][:kills]
    for number, moment in enumerate(moments, 1):
        resume = ["--resume", "latest"] if whole_checkpoints(checkpoints) else []
        unfinished = unfinished_checkpoints(checkpoints)
        job = attempt(wild, steps, *resume)
        kill_one(job, moment, checkpoints, dice)
        outcome = job.finish(grace=30)
        assert outcome.code != 0, f"exit code 0 of a killed attempt: {outcome.text}"
        told = all(name in outcome.text for name in unfinished)
        assert told or moment == "starting", f"does not say that it skips all of {unfinished}: {outcome.text}"
        inside = bool(unfinished_checkpoints(checkpoints) - unfinished)
        print(f"kill {number}: {moment}{', in a save' * inside}", flush=True)
    end = attempt(wild, steps, "--resume", "latest").finish()
    assert end.code == 0, end.text
    tensors = [read_tensors(whole_checkpoints(cwd / "checkpoints")[steps], folder) for cwd in (calm, wild)]
    assert not differences(*tensors), differences(*tensors)
    assert last_state(calm / "checkpoints") == last_state(checkpoints), "the rest of the final state differs"
    print("PASS: weights, Adam and the rest are bit for bit the same")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        soak(args.kills, Path(directory), random.Random(args.seed))
