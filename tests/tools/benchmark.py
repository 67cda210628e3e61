"""Measure the script on CPU cores: a table of ratios, each beside its bar, and of seconds.

    python tests/tools/benchmark.py [--only NAME ...] [--rounds X]

The two sides of a ratio are timed in turn in the same processes, so that whatever else the machine does weighs on both;
a figure is the median over the rounds, with the quartiles behind it. All cores are used, each rank has its share.
"""

import argparse
import gc
import importlib
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from determined import core
from determined.common.util import yaml_safe_load
from torch import Tensor, nn

import fsdp_train
from launch import ROOT, SCRIPT, launch, on_ranks
from model import PEAK_FLOPS, SHAPE, build_model, count_parameters, materialise
from tiny import tiny_run

CORES = len(os.sched_getaffinity(0))
Seconds = dict[str, list[float]]  # of each thing, in each round
Shape = dict[str, Any]
DTYPES = {"float32": None, "bfloat16": "bfloat16"}

# No report, validation or checkpoint falls due.
ENDLESS = dict.fromkeys(("max_steps", "reporting_period", "validation_period", "checkpoint_period"), 10**6)
SIZES = ("global_batch_size", *SHAPE)
# A step of the first takes some hundredths of a second, one of the second some tenths.
SHIPPED: Shape = yaml_safe_load((ROOT / "config.yaml").read_text())["hyperparameters"]
SHIPPED = {name: SHIPPED[name] for name in SIZES}
MEDIUM = dict(zip(SIZES, (8, 2048, 256, 512, 8, 4), strict=True))
# 26 million parameters: a checkpoint of 315 MB.
LARGE = dict(zip(SIZES, (2, 4096, 64, 512, 8, 7), strict=True))


@dataclass
class Row:
    what: str
    values: list[float]  # one for each round
    bar: float | None = None  # it must not exceed
    note: str = ""

    def cells(self) -> list[str]:
        """What, measured, bar, verdict, note."""
        first, median, third = statistics.quantiles(self.values * 2, n=4, method="inclusive")
        measured = f"{median:.3g}" + f" ({first:.3g} to {third:.3g})" * (len(self.values) > 1)
        if self.bar is None:
            return [self.what, measured, "", "", self.note]
        return [self.what, measured, f"<= {self.bar}", "pass" if median <= self.bar else "MISS", self.note]


# ---- Tools ----


def prepare(ranks: int, shape: Shape, **hparams: Any) -> fsdp_train.Run:
    """An endless run, with this rank's share of the cores."""
    torch.set_num_threads(max(1, CORES // ranks))
    return tiny_run(ranks, **ENDLESS | shape | hparams)


def in_turn(actions: dict[str, Callable[[], Any]], rounds: int, warmup: int) -> Seconds:
    """Seconds of each action in each round; all ranks start each together. COLLECTIVE."""
    seconds: Seconds = {name: [] for name in actions}
    for number in range(-warmup, rounds):
        for name in list(actions)[:: -1 if number % 2 else 1]:  # there and back: each finds the caches as warm
            dist.barrier()
            start = time.perf_counter()
            actions[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def over(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def milliseconds(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.4g} ms"


# ---- What is measured ----


def overhead(core_context: core.Context, shape: Shape, amp: str | None, rounds: int) -> list[Row]:
    """The body of train()'s loop against bare steps with and without FSDP, one process."""
    run = prepare(1, shape, amp_dtype=amp)
    stream = fsdp_train.build_data(run.config, "training", 0, 1)
    tokens = next(stream)
    seconds: Seconds = defaultdict(list)
    actions: dict[str, Callable[[], Any]] = {"data": lambda: next(stream)}
    original = fsdp_train.build_state

    def bare(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], Tensor]) -> None:
        fsdp_train.next_token_loss(model, tokens, run.amp_dtype).backward()
        clip(run.config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    def build_state(run: fsdp_train.Run) -> fsdp_train.TrainState:
        state = original(run)
        actions["bare"] = partial(bare, state.model, state.optimizer, state.model.clip_grad_norm_)
        plain = build_model(run.config)
        for module in plain.modules():
            materialise(module, run.device)
        optimizer = fsdp_train.build_optimizer(plain, run.config, fused=False)  # type: ignore[arg-type]
        actions["plain"] = partial(bare, plain, optimizer, partial(nn.utils.clip_grad_norm_, plain.parameters()))
        return state

    class Turns:
        """In place of the profiler, which train() tells of the end of each step: time it, and the others after it."""

        start = 0.0

        def step(self) -> None:
            seconds["script"].append(time.perf_counter() - self.start)
            for name in list(actions)[:: -1 if len(seconds["script"]) % 2 else 1]:
                start = time.perf_counter()
                actions[name]()
                seconds[name].append(time.perf_counter() - start)
            if len(seconds["script"]) == rounds + 3:
                raise StopIteration
            self.start = time.perf_counter()

    with (
        mock.patch.object(fsdp_train, "build_state", build_state),
        mock.patch.object(fsdp_train, "trace_steps", lambda *_: nullcontext(Turns())),
        suppress(StopIteration),
    ):
        fsdp_train.train(core_context, run)
    warm = {name: values[3:] for name, values in seconds.items()}
    label = f"d_model {run.config.d_model}, {amp or 'float32'}"
    data, note = over(warm["data"], warm["script"]), f"{milliseconds(warm['data'])} of {milliseconds(warm['script'])}"
    return [
        Row(f"train()'s step / bare loop, same FSDP model ({label})", over(warm["script"], warm["bare"]), bar=1.02),
        Row(f"train()'s step / model without FSDP ({label})", over(warm["script"], warm["plain"]), bar=1.05),
        Row(f"drawing data / train()'s step ({label})", data, note=note),
    ]


def large_data(_: core.Context, rounds: int) -> list[Row]:
    """What drawing a batch of distributed.yaml on the CPU costs one rank of 16, which draws on one core."""
    large = yaml_safe_load((ROOT / "distributed.yaml").read_text())["hyperparameters"]
    run = prepare(CORES, large, amp_dtype="bfloat16")
    stream = fsdp_train.build_data(run.config, "training", 0, 16)
    seconds = in_turn({"draw": lambda: next(stream)}, rounds, warmup=2)["draw"]
    flops = build_model(run.config).flops_per_token() * run.config.global_batch_size * run.config.max_seq_len
    step = flops / (0.4 * 16 * PEAK_FLOPS["A100"][0])
    note = f"{milliseconds(seconds)} of {step:.2f} s: 16 A100 at 40 % of their peak, computed"
    return [Row("drawing data / step of distributed.yaml", [s / step for s in seconds], bar=0.01, note=note)]


def speed(_: core.Context, shape: Shape, rounds: int) -> list[Row]:
    """Steps in each precision, eager, compiled and recomputed, one process."""
    actions: dict[str, Callable[[], Any]] = {}

    def add(key: str, amp: str | None, **hparams: Any) -> None:
        run = prepare(1, shape, amp_dtype=amp, **hparams)
        state = fsdp_train.build_state(run)
        actions[key] = lambda: fsdp_train.train_step(state, next(state.data), run)

    for name, amp in DTYPES.items():
        add(name, amp)
        add(f"{name} compiled", amp, compile=True)
        add(f"{name} recomputed", amp, activation_checkpointing=True)
    seconds = in_turn(actions, rounds, warmup=3)

    def row(what: str, above: str, below: str) -> Row:
        note = f"{milliseconds(seconds[above])}, {milliseconds(seconds[below])}"
        return Row(f"{what} (d_model {shape['d_model']})", over(seconds[above], seconds[below]), note=note)

    rows = [row("step in float32 / bfloat16", "float32", "bfloat16")]
    for name in DTYPES:
        rows.append(row(f"step / with compile, {name}", name, f"{name} compiled"))
        rows.append(row(f"step with activation checkpointing / without, {name}", f"{name} recomputed", name))
    return rows


def memory(_: core.Context) -> list[Row]:
    """What a rank holds when all gradients are there and no activation, by its live tensors."""
    ranks, held = dist.get_world_size(), list[int]()
    run = prepare(ranks, MEDIUM, amp_dtype="bfloat16")
    state = fsdp_train.build_state(run)
    original = fsdp_train.clip_grad_norm

    def clip(*arguments: Any) -> Tensor:
        gc.collect()
        time.sleep(0.1)  # gloo's threads let go of their tensors a little later
        storages = {}
        for thing in gc.get_objects():
            with suppress(RuntimeError):  # what torch 2.3 has left of a tensor that such a thread freed
                if issubclass(type(thing), Tensor) and thing.device.type == "cpu":
                    storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        held.append(sum(storages.values()))
        return original(*arguments)

    with mock.patch.object(fsdp_train, "clip_grad_norm", clip):
        fsdp_train.train_step(state, next(state.data), run)
    share = 16 * count_parameters(run.config) / ranks
    return [Row(f"weights, gradients, Adam / 16 P per shard ({ranks} ranks)", [held[0] / share], bar=1.02)]


def checkpoint(core_context: core.Context, rounds: int) -> list[Row]:
    """Saving against writing as many bytes, and loading, by two ranks."""
    run = prepare(2, LARGE)
    state = fsdp_train.build_state(run)
    folder, rank = Path("checkpoints").resolve(), dist.get_rank()
    first = folder / fsdp_train.save(core_context, state, run)
    saved: list[str] = []
    (own,) = first.glob(f"__{rank}_*")
    noise = torch.randint(256, (own.stat().st_size,), dtype=torch.uint8).numpy().tobytes()

    def write() -> None:
        with (folder / f"noise{rank}").open("wb") as file:
            file.write(noise)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()

    def tidy() -> None:
        """Leave neither side the other's dirty pages."""
        if rank == 0:
            for uuid in saved:
                shutil.rmtree(folder / uuid)
        saved.clear()
        (folder / f"noise{rank}").unlink(missing_ok=True)
        os.sync()

    def save() -> None:
        saved.append(fsdp_train.save(core_context, state, run))

    seconds = in_turn({"save": save, "tidy": tidy, "write": write, "tidy again": tidy}, rounds, warmup=1)
    object.__setattr__(run, "checkpoint", str(first))
    seconds |= in_turn({"load": lambda: fsdp_train.load(core_context, state, run)}, rounds, warmup=1)
    size = f"{sum(file.stat().st_size for file in first.iterdir()) / 1e6:.0f} MB"
    ratio = over(seconds["save"], seconds["write"])
    return [
        Row("seconds to save (2 ranks)", seconds["save"], note=size),
        Row("saving / write and fsync of as many bytes", ratio, note=f"of {milliseconds(seconds['write'])}"),
        Row("seconds to load (2 ranks)", seconds["load"], note=f"{size}, from the page cache"),
    ]


def startup(folder: Path, rounds: int) -> list[Row]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        job = launch([[*command, "--config", str(ROOT / "config.yaml"), "max_steps=1", "amp_dtype=null"]], folder)
        job.wait_for("first step ")
        seconds.append(time.perf_counter() - start)
        job.finish()
    return [Row("seconds from torchrun to the end of the first step (2 ranks)", seconds, note="config.yaml, float32")]


# ---- The table ----


def rows_of(name: str, folder: Path, share: float) -> list[Row]:
    """Launch what measures the rows of one name, with a `share` of the rounds."""

    def measure(function: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
        return on_ranks(function, ranks, folder, *arguments, timeout=1800)[0]

    def rounds(full: int) -> int:
        return max(2, round(full * share))

    if name == "overhead":
        cases = [(shape, amp, n) for amp in DTYPES.values() for shape, n in ((MEDIUM, 20), (SHIPPED, 120))]
        rows = [row for shape, amp, n in cases for row in measure(overhead, 1, shape, amp, rounds(n))]
        return [*rows, *measure(large_data, 1, rounds(20))]
    if name == "speed":
        return [*measure(speed, 1, MEDIUM, rounds(12)), *measure(speed, 1, SHIPPED, rounds(30))]
    if name == "memory":
        return [row for ranks in (1, 2, 4) for row in measure(memory, ranks)]
    if name == "checkpoint":
        return [*measure(checkpoint, 2, rounds(9))]
    return startup(folder, rounds(5))


NAMES = ("overhead", "speed", "memory", "checkpoint", "startup")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=float, default=1, metavar="X", help="that many times as many rounds")
    args = parser.parse_args()
    rows: list[Row] = []
    start = time.time()
    for name in args.only:
        print(
            f"{time.time() - start:.0f} s: {name}, at a load of {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True
        )
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(name, Path(folder), args.rounds)
    head = ["what", "measured (quartiles)", "bar", "", "note"]
    table = [head, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    table.insert(1, ["-" * width for width in widths])
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    print(f"{cpu[1] if cpu else 'CPU'}, {CORES} cores, torch {torch.__version__}; took {time.time() - start:.0f} s\n")
    for line in table:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


if __name__ == "__main__":
    # By its module's name, under which the ranks find its functions.
    importlib.import_module("benchmark").main()
