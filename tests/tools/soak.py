"""Kill ranks at random moments until the kills are used up, then compare with a run that nothing disturbed.

    python tests/tools/soak.py --kills 12

Each attempt resumes from the latest whole checkpoint and is met with SIGKILL once: while it starts, while it trains,
or, at least every second time, just after a save has begun. Every stretch of steps holds one kill.
"""

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch import ROOT, Job, start
from observe import differences
from processes import last_state, read_tensors, unfinished_checkpoints, whole_checkpoints
from tiny import overrides

RANKS = 2
STRETCH = 20  # steps per kill
JOB = {"amp_dtype": "bfloat16", "dropout": 0.1, "micro_batch_size": 3, "validation_batches": 1}
JOB |= {"reporting_period": 1, "validation_period": 5, "checkpoint_period": 5}
PATIENCE = 120  # seconds for an attempt to get anywhere


def attempt(folder: Path, steps: int, *arguments: str) -> Job:
    hparams = overrides(**JOB, max_steps=steps)
    return start("--config", str(ROOT / "config.yaml"), *hparams, *arguments, ranks=RANKS, cwd=folder)


def last_step(job: Job) -> int:
    return max(map(int, re.findall(r"step (\d+)/\d+  loss", job.texts()[0])), default=0)


def kill_one(job: Job, moment: str, step: int, checkpoints: Path, dice: random.Random) -> bool:
    """SIGKILL a random rank at a random moment of the given kind. False if the job was over before."""
    delay = dice.random()

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while None in job.poll() and not condition() and time.monotonic() < deadline:
            time.sleep(0.0005)

    if moment == "starting":
        time.sleep(0.5 * delay)
    else:
        wait_until(lambda: last_step(job) >= step)
    if moment == "saving":
        known = set(os.listdir(checkpoints))
        wait_until(lambda: set(os.listdir(checkpoints)) != known)
        time.sleep(0.01 * delay)
    running = None in job.poll()
    job.signal(signal.SIGKILL, dice.randrange(RANKS))
    return running


def soak(kills: int, folder: Path, dice: random.Random) -> list[str]:
    """What is wrong in the end."""
    steps = STRETCH * (kills + 1)
    calm, wild = folder / "calm", folder / "wild"
    checkpoints = wild / "checkpoints"
    for path in (calm, checkpoints):
        path.mkdir(parents=True)
    undisturbed = attempt(calm, steps).finish()
    if undisturbed.code:
        return [undisturbed.text]
    problems = []
    moments = ["training", *["saving"] * (kills // 2), *dice.choices(["starting", "training"], k=kills)][:kills]
    for number, moment in enumerate(moments):
        resume = ["--resume", "latest"] if whole_checkpoints(checkpoints) else []
        unfinished = unfinished_checkpoints(checkpoints)
        job = attempt(wild, steps, *resume)
        if not kill_one(job, moment, STRETCH * number + dice.randint(6, STRETCH - 6), checkpoints, dice):
            problems.append(f"attempt {number + 1} ended before it was killed")
        began, step = time.monotonic(), last_step(job)
        outcome = job.finish(grace=30)
        seconds = time.monotonic() - began
        if outcome.code == 0:
            problems.append(f"exit code 0 of a killed attempt: {outcome.text}")
        if moment != "starting" and (silent := [name for name in unfinished if name not in outcome.text]):
            problems.append(f"attempt {number + 1} does not say that it skips {silent}")
        inside = bool(unfinished_checkpoints(checkpoints) - unfinished)
        print(f"kill {number + 1}: {moment}, after step {step}{', in a save' * inside}; ended in {seconds:.1f} s")
    end = attempt(wild, steps, "--resume", "latest").finish()
    if end.code:
        return [*problems, end.text]
    tensors = [read_tensors(whole_checkpoints(cwd / "checkpoints")[steps], folder) for cwd in (calm, wild)]
    problems += differences(*tensors)
    if last_state(calm / "checkpoints") != last_state(checkpoints):
        problems.append("the rest of the final state differs")
    print(f"{kills} kills, {len(unfinished_checkpoints(checkpoints))} unfinished checkpoints, all skipped")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        problems = soak(args.kills, Path(folder), random.Random(args.seed))
    print("\n".join([*problems, "FAIL" if problems else "PASS: weights, Adam and the rest are bit for bit the same"]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
