"""Kill ranks at random moments until the kills are used up, then compare with a run that nothing disturbed.

    python tests/soak.py --kills 50

Each attempt resumes from the latest whole checkpoint and is met with SIGKILL once: while it starts, while it trains, or
just after a save has begun. Every stretch of steps holds one kill, so the kills are used up just before the run ends.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from launch import ROOT, SCRIPT, start, torchrun
from observe import differences
from processes import (
    kill_all,
    last_state,
    leftovers,
    new_mark,
    processes,
    read_tensors,
    unfinished_checkpoints,
    whole_checkpoints,
)
from tiny import overrides

RANKS = 2
STRETCH = 20  # steps per kill
JOB = {
    "dropout": 0.1,
    "micro_batch_size": 3,
    "reporting_period": 1,
    "validation_period": 5,
    "checkpoint_period": 5,
    "validation_batches": 1,
}
PATIENCE = 120  # seconds for an attempt to get anywhere


@dataclass
class Attempt:
    """The script on all ranks, with its output read as it comes."""

    process: subprocess.Popen[str]
    mark: dict[str, str]
    lines: list[str] = field(default_factory=list)
    step: int = 0  # last one reported

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    @classmethod
    def start(cls, cwd: Path, hparams: dict[str, object], *arguments: str) -> "Attempt":
        mark = new_mark()
        command = [*torchrun(RANKS), str(SCRIPT), "--config", str(ROOT / "config.yaml"), *overrides(**hparams)]
        return cls(start([*command, *arguments], cwd, mark), mark)

    def read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"step (\d+)/\d+ \| loss", line):
                self.step = int(found[1])

    def text(self) -> str:
        return "".join(self.lines)

    def end(self) -> tuple[int, float, int]:
        """Exit code, seconds until the end, and processes left behind (none after this)."""
        began = time.monotonic()
        try:
            code = self.process.wait(PATIENCE)
            seconds = time.monotonic() - began
            left = len(leftovers(self.mark))
        finally:
            kill_all(self.mark)
            self.reader.join()
        return code, seconds, left


def kill_one(attempt: Attempt, moment: str, step: int, checkpoints: Path, dice: random.Random) -> bool:
    """SIGKILL a random rank at a random moment of the given kind. False if the job was over before."""
    rank, delay = dice.randrange(RANKS), dice.random()
    running = True

    def wait_until(condition: Callable[[], Any], pause: float) -> None:
        nonlocal running
        end = time.monotonic() + PATIENCE
        while running and not condition():
            time.sleep(pause)
            running = attempt.process.poll() is None and time.monotonic() < end

    def find() -> list[int]:
        return [pid for pid, at in processes(attempt.mark).items() if at == rank]

    wait_until(find, 0.05)
    pids = find()
    if moment == "starting":
        time.sleep(5 * delay)
    else:
        wait_until(lambda: attempt.step >= step, 0.001)
        if moment == "saving":
            known = set(os.listdir(checkpoints))
            wait_until(lambda: set(os.listdir(checkpoints)) != known, 0.0002)
        time.sleep(0.05 * delay)
    if not running:
        return False
    try:
        os.kill(pids[0], signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--amp-dtype", default="bfloat16", choices=["bfloat16", "float16", "null"])
    parser.add_argument("--folder", type=Path, help="kept; by default a temporary one")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    hparams = {**JOB, "amp_dtype": args.amp_dtype, "max_steps": STRETCH * (args.kills + 1)}
    dice = random.Random(args.seed)
    began = time.monotonic()

    calm, wild = folder / "calm", folder / "wild"
    calm.mkdir(parents=True)
    wild.mkdir()
    attempt = Attempt.start(calm, hparams)
    while attempt.process.poll() is None:
        time.sleep(0.1)
    code, _, left = attempt.end()
    if code or left:
        print(f"FAIL: the undisturbed run: exit code {code}, {left} processes left\n{attempt.text()}")
        return 1
    print(f"undisturbed run: {hparams['max_steps']} steps in {time.monotonic() - began:.0f} s", flush=True)

    checkpoints = wild / "checkpoints"
    problems: list[str] = []
    kills = resumes = in_saves = lingering = 0
    worst = 0.0
    moments = {"starting": 0, "training": 0, "saving": 0}
    while True:
        resume = ["--resume", "latest"] if whole_checkpoints(checkpoints) else []
        resumes += bool(resume)
        unfinished = unfinished_checkpoints(checkpoints) if checkpoints.is_dir() else set()
        attempt = Attempt.start(wild, hparams, *resume)
        killed = False
        if kills < args.kills:
            # The first must get as far as a checkpoint, so that there is something to resume from.
            moment = dice.choices(list(moments), [1, 4, 5])[0] if kills else "training"
            killed = kill_one(attempt, moment, STRETCH * kills + dice.randint(6, STRETCH - 6), checkpoints, dice)
        code, seconds, left = attempt.end()
        lingering += left
        for name in unfinished:
            if "going on from" in attempt.text() and f"skipping checkpoint checkpoints/{name}:" not in attempt.text():
                problems.append(f"{name} is incomplete, and attempt {kills + 1} does not say that it skips it")
        if not killed:
            if code:
                problems.append(f"exit code {code} of an attempt that nothing disturbed:\n{attempt.text()}")
            break
        kills += 1
        moments[moment] += 1
        worst = max(worst, seconds)
        more = unfinished_checkpoints(checkpoints) - unfinished
        in_saves += bool(more)
        if code == 0:
            problems.append(f"exit code 0 of an attempt that was killed:\n{attempt.text()}")
        print(
            f"kill {kills}: {moment} at step {attempt.step}{', in a save' * bool(more)}; ended in {seconds:.1f} s",
            flush=True,
        )

    if kills != args.kills:
        problems.append("the run was over before the kills were used up")
    if lingering:
        problems.append(f"{lingering} processes were left behind")
    if not problems:
        last = max(whole_checkpoints(calm / "checkpoints"))
        states = [read_tensors(whole_checkpoints(cwd / "checkpoints")[last], folder) for cwd in (calm, wild)]
        if wrong := differences(*states):
            problems.append(f"{len(wrong)} of {len(states[0])} tensors differ: {wrong}")
        if last_state(calm / "checkpoints") != last_state(checkpoints):
            problems.append("the rest of the final state differs")
    skipped = len(unfinished_checkpoints(checkpoints))
    kinds = ", ".join(f"{count} {moment}" for moment, count in moments.items())
    print(f"{kills} kills ({kinds}), {in_saves} fell into a save; {resumes} resumes")
    print(f"{skipped} incomplete checkpoints skipped; {lingering} leftover processes")
    print(f"worst time from kill to end of job {worst:.1f} s; {time.monotonic() - began:.0f} s in all")
    print("\n".join([*problems, "FAIL" if problems else "PASS: weights, Adam and the rest are bit for bit the same"]))
    if not args.folder and not problems:
        shutil.rmtree(folder)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
