"""Watch `fsdp_train.train` from inside a rank: what it reports, saves and polls, and the numbers that it leaves."""

import dataclasses
import functools
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from determined import core
from torch import Tensor

import fsdp_train
from fsdp_train import Run, TrainState

FIRST_SCALE = 2.0**20  # of the loss: one float16 step overflows, and more once the scale has grown
VOLATILE = ("tokens_per_second", "peak_memory_gib")  # these depend on the machine


@dataclass
class Observed:
    """What one rank saw of a call of `train`."""

    reports: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)  # on rank 0 only
    progress: list[float] = field(default_factory=list)  # on rank 0 only
    saved: list[tuple[int, str]] = field(default_factory=list)  # step and UUID
    polled: list[int] = field(default_factory=list)  # steps after which preemption was asked for
    rates: list[tuple[int, list[float]]] = field(default_factory=list)  # by step, of each parameter group
    seeds: list[int] = field(default_factory=list)  # by which each step draws its dropout
    batches: dict[int, Tensor] = field(default_factory=dict)  # this rank's tokens, by step
    messages: list[str] = field(default_factory=list)  # of the log
    held: dict[str, Tensor] = field(default_factory=dict)  # this rank's weights and Adam states at the end
    scaler: dict[str, Any] = field(default_factory=dict)  # at the end
    loaded: dict[str, Any] = field(default_factory=dict)  # the state right after loading
    loaded_whole: dict[str, Tensor] = field(default_factory=dict)  # gathered then
    saved_whole: dict[str, Tensor] = field(default_factory=dict)  # gathered at the last save

    def numbers(self, kind: str) -> dict[int, dict[str, Any]]:
        return {step: metrics for what, step, metrics in self.reports if what == kind}


def held(state: TrainState) -> dict[str, Tensor]:
    """Copies of what this rank holds: its part of every weight, and the optimizer's state for it."""
    copies = {}
    for name, p in state.model.named_parameters():
        copies[name] = p.detach().clone()
        copies |= {f"{name}: {key}": value.clone() for key, value in state.optimizer.state[p].items() if p.numel()}
    return copies


def whole(state: TrainState) -> dict[str, Tensor]:
    """Weights and Adam states, flat: the parts of all ranks of a replica in a row. COLLECTIVE."""
    ranks = dist.get_world_size(state.model.process_group)
    first = dist.get_rank() // ranks * ranks
    parts = fsdp_train.everywhere(lambda: held(state))[first : first + ranks]
    gathered = {}
    for name in {name for part in parts for name in part}:
        tensors = [part[name].flatten() for part in parts if name in part]
        # Each rank that holds some of a weight counts its steps; they must be alike.
        gathered[name] = torch.cat(tensors).unique() if name.endswith(": step") else torch.cat(tensors)
    return gathered


def observe(
    core_context: core.Context,
    run: Run,
    storage: Path,
    stop: int | None = None,
    checkpoint: str = "",
    trial_id: int | None = None,
    gather: bool = False,
) -> Observed:
    """Train, be preempted after step `stop` or, if later, the first poll, and note everything. COLLECTIVE."""
    seen = Observed()
    states: list[TrainState] = []
    real = SimpleNamespace(**vars(fsdp_train))
    place = str(storage / checkpoint) if checkpoint and not trial_id else checkpoint
    run = dataclasses.replace(run, checkpoint=place, trial_id=trial_id)

    def build_state(run: Run) -> TrainState:
        state = real.build_state(run)
        if state.scaler.is_enabled():
            scaling = {"scale": FIRST_SCALE, "growth_factor": 16.0, "growth_interval": 3}
            state.scaler.load_state_dict(state.scaler.state_dict() | scaling)
        states.append(state)
        return state

    def train_step(state: TrainState, tokens: Tensor, run: Run) -> Any:
        seen.batches[state.step + 1] = tokens.clone()
        seen.seeds.append(torch.initial_seed())
        seen.rates.append((state.step + 1, [group["lr"] for group in state.optimizer.param_groups]))
        return real.train_step(state, tokens, run)

    def save(core_context: core.Context, state: TrainState, run: Run) -> str:
        if gather:
            seen.saved_whole = whole(state)
        uuid = real.save(core_context, state, run)
        seen.saved.append((state.step, uuid))
        return uuid

    def load(core_context: core.Context, state: TrainState, run: Run) -> None:
        real.load(core_context, state, run)
        seen.loaded = {"step": state.step, "skipped_steps": state.skipped_steps, "position": state.data.position}
        seen.loaded |= {"scaler": state.scaler.state_dict(), "held": held(state)}
        if gather:
            seen.loaded_whole = whole(state)

    def should_preempt() -> bool:
        seen.polled.append(states[0].step)
        return stop is not None and states[0].step >= stop

    def report(kind: str, step: int, metrics: dict[str, Any]) -> None:
        seen.reports.append((kind, step, {name: value for name, value in metrics.items() if name not in VOLATILE}))

    log = SimpleNamespace(info=seen.messages.append, warning=seen.messages.append)
    with (
        mock.patch.multiple(fsdp_train, build_state=build_state, train_step=train_step, save=save, load=load, log=log),
        mock.patch.object(core_context.preempt, "should_preempt", should_preempt),
        mock.patch.multiple(
            core_context.train,
            report_training_metrics=functools.partial(report, "training"),
            report_validation_metrics=functools.partial(report, "validation"),
            report_progress=seen.progress.append,
        ),
    ):
        fsdp_train.train(core_context, run)
    seen.held = held(states[0])
    seen.scaler = states[0].scaler.state_dict()
    return seen


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names whose tensors are not bit for bit those of the other dict, or that only one has."""
    both = a.keys() & b.keys()
    wrong = {name for name in both if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])}
    return sorted(wrong | (a.keys() ^ b.keys()))
