"""Measure the script on CPU cores: a table of ratios, each beside its bar, and of seconds.

    python tests/tools/benchmark.py [--only NAME ...] [--rounds X]

The two sides of a ratio are timed in turn in the same processes, so that whatever else the machine does weighs on both;
a figure is the median over the rounds, with the quartiles behind it. All cores are used, each rank has its share.
"""

import argparse
import dataclasses
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from determined import core
from determined.common.util import yaml_safe_load
from torch import nn

import fsdp_train
from launch import ROOT, on_ranks
from model import SHAPE, build_model, count_parameters, materialise
from tiny import tiny_run

CORES = len(os.sched_getaffinity(0))
WARMUP = 2  # rounds before those that count
Actions = dict[str, Callable[[], Any]]
Seconds = dict[str, list[float]]  # of each action, in each round

# No report, validation or checkpoint falls due.
ENDLESS = dict.fromkeys(("max_steps", "reporting_period", "validation_period", "checkpoint_period"), 10**6)
# The sizes of config.yaml, and some whose steps take ten times as long.
SMALL = yaml_safe_load((ROOT / "config.yaml").read_text())["hyperparameters"]
SMALL = {name: SMALL[name] for name in ("global_batch_size", *SHAPE)}
MEDIUM = {"global_batch_size": 8, "vocab_size": 2048, "max_seq_len": 256, "d_model": 512, "n_heads": 8, "n_layers": 4}


def prepare(**hparams: Any) -> tuple[fsdp_train.Run, fsdp_train.TrainState]:
    """An endless run, with this rank's share of the cores. COLLECTIVE."""
    ranks = dist.get_world_size()
    torch.set_num_threads(max(1, CORES // ranks))
    run = tiny_run(ranks, **ENDLESS | hparams)
    return run, fsdp_train.build_state(run)


def time_round(actions: Actions, seconds: Seconds) -> None:
    """Time each action once; all ranks start each together. COLLECTIVE."""
    order = list(actions)
    if len(seconds[order[0]]) % 2:  # there and back: each finds the caches as warm
        order.reverse()
    for name in order:
        dist.barrier()
        start = time.perf_counter()
        actions[name]()
        seconds[name].append(time.perf_counter() - start)


def row(what: str, above: list[float], below: list[float] | None = None, bar: float | None = None) -> str:
    """Of the table: the figures of all rounds, or the ratios of two actions' seconds, and what they must not exceed."""
    values, note = above[WARMUP:], ""
    if below:
        note = " / ".join(f"{1000 * statistics.median(seconds[WARMUP:]):.4g} ms" for seconds in (above, below))
        values = [a / b for a, b in zip(values, below[WARMUP:], strict=True)]
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    verdict = "" if bar is None else f"<= {bar}: {'pass' if median <= bar else 'MISS'}"
    return f"| {what:70} | {median:5.3g} ({first:.3g} to {third:.3g}) | {verdict:12} | {note} |"


# ---- What is measured, by functions that all ranks call ----


def steps(core_context: core.Context, rounds: int, size: dict[str, int], amp: str | None) -> list[str]:
    """The body of train()'s loop, and in turn with it a bare loop, with and without FSDP, and other settings."""
    run, state = prepare(**size, amp_dtype=amp)
    tokens = next(state.data)
    plain = build_model(run.config)
    for module in plain.modules():
        materialise(module, run.device)
    plain_optimizer = fsdp_train.build_optimizer(plain, run.config, fused=False)  # type: ignore[arg-type]

    def bare_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        fsdp_train.next_token_loss(model, tokens, run.amp_dtype).backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.config.max_grad_norm)  # what FSDP's own is on one rank
        optimizer.step()
        optimizer.zero_grad()

    def step_with(**hparams: Any) -> Callable[[], Any]:
        run, state = prepare(**size, amp_dtype=amp, **hparams)
        return lambda: fsdp_train.train_step(state, next(state.data), run)

    others = {
        "bare": lambda: bare_step(state.model, state.optimizer),
        "plain": lambda: bare_step(plain, plain_optimizer),
        "data": lambda: next(state.data),
        "compiled": step_with(compile=True),
        "recomputed": step_with(activation_checkpointing=True),
    }
    seconds: Seconds = defaultdict(list)
    start = 0.0  # so that the first time, in the warm-up, is wrong

    def step_ended() -> None:
        """In place of the profiler's step(): time train()'s step, and the others after it."""
        nonlocal start
        seconds["step"].append(time.perf_counter() - start)
        time_round(others, seconds)
        if len(seconds["step"]) == rounds:
            raise StopIteration
        start = time.perf_counter()

    trace = nullcontext(mock.Mock(step=step_ended))
    patches: dict[str, Any] = {"build_state": lambda _: state, "trace_steps": lambda *_: trace}
    with mock.patch.multiple(fsdp_train, **patches), suppress(StopIteration):
        fsdp_train.train(core_context, run)
    label = f"(d_model {run.config.d_model}, {amp or 'float32'})"
    return [
        row(f"train()'s step / bare loop, same FSDP model {label}", seconds["step"], seconds["bare"], bar=1.02),
        row(f"train()'s step / model without FSDP {label}", seconds["step"], seconds["plain"], bar=1.05),
        row(f"drawing data / train()'s step {label}", seconds["data"], seconds["step"], bar=0.01),
        row(f"step / with compile {label}", seconds["step"], seconds["compiled"]),
        row(f"step with activation checkpointing / without {label}", seconds["recomputed"], seconds["step"]),
    ]


def checkpoint(core_context: core.Context, rounds: int) -> list[str]:
    """Saving, with its fsync, and loading from the page cache; beside it writing as many bytes."""
    run, state = prepare(**MEDIUM)
    saved = dataclasses.replace(run, checkpoint=f"checkpoints/{fsdp_train.save(core_context, state, run)}")
    size = 12 * count_parameters(run.config)
    content = os.urandom(size // dist.get_world_size())

    def write() -> None:
        with tempfile.TemporaryFile(dir=".", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
        dist.barrier()

    actions: Actions = {
        "save": lambda: fsdp_train.save(core_context, state, run),
        "write": write,
        "load": lambda: fsdp_train.load(core_context, state, saved),
    }
    seconds: Seconds = defaultdict(list)
    for _ in range(rounds):
        time_round(actions, seconds)
    label = f"{dist.get_world_size()} ranks, {size / 1e6:.0f} MB"
    return [
        row(f"seconds to save ({label})", seconds["save"]),
        row(f"saving / write and fsync of as many bytes ({label})", seconds["save"], seconds["write"]),
        row(f"seconds to load ({label})", seconds["load"]),
    ]


# With the number of ranks, of rounds, and further arguments.
MEASUREMENTS: list[tuple[Callable[..., list[str]], int, int, tuple[Any, ...]]] = [
    (steps, 1, 20, (MEDIUM, None)),
    (steps, 1, 20, (MEDIUM, "bfloat16")),
    (steps, 1, 120, (SMALL, None)),
    (steps, 1, 120, (SMALL, "bfloat16")),
    (checkpoint, 2, 9, ()),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({function.__name__ for function, *_ in MEASUREMENTS})
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=float, default=1, metavar="X", help="that many times as many rounds")
    args = parser.parse_args()
    print(f"{CORES} cores at a load of {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    print("| what | measured (quartiles) | bar | of |\n|---|---|---|---|")
    for function, ranks, rounds, arguments in MEASUREMENTS:
        if function.__name__ in args.only:
            rounds = WARMUP + max(2, round(rounds * args.rounds))
            with tempfile.TemporaryDirectory() as folder:
                rows = on_ranks(function, ranks, Path(folder), rounds, *arguments, timeout=1800)[0]
            print(*rows, sep="\n", flush=True)


if __name__ == "__main__":
    # By its module's name, under which the ranks find its functions.
    importlib.import_module("benchmark").main()
