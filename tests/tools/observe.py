"""Watch `fsdp_train.train` from inside a rank: what it reports, saves and polls, and the numbers that it leaves."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from determined import core
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import fsdp_train

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


def held(state: fsdp_train.TrainState) -> dict[str, Tensor]:
    """Copies of what this rank holds: its part of every weight, and the optimizer's state for it."""
    copies = {}
    for name, p in state.model.named_parameters():
        copies[name] = p.detach().clone()
        copies |= {f"{name}: {key}": value.clone() for key, value in state.optimizer.state[p].items() if p.numel()}
    return copies


def whole(state: fsdp_train.TrainState) -> dict[str, Tensor]:
    """Weights and Adam's moments in their true shapes, gathered by FSDP itself. COLLECTIVE."""
    gathered = {}
    weights = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    for moment in ("", "exp_avg", "exp_avg_sq"):
        with torch.no_grad():
            for p in state.model.parameters():
                if moment and p.numel():
                    p.copy_(state.optimizer.state[p][moment])
        with FSDP.summon_full_params(state.model, writeback=False):
            for name, p in state.model.named_parameters():
                gathered[f"{name} {moment}"] = p.detach().clone()
    with torch.no_grad():
        for name, p in state.model.named_parameters():
            p.copy_(weights[name])
    # Only those who hold some of a parameter count its steps.
    counts = {n: state.optimizer.state[p]["step"].item() for n, p in state.model.named_parameters() if p.numel()}
    for each in fsdp_train.everywhere(lambda: counts):
        gathered |= {f"{name} step": torch.tensor(count) for name, count in each.items()}
        assert all(counts.get(name, count) == count for name, count in each.items()), (counts, each)
    return gathered


@contextlib.contextmanager
def captured_log(messages: list[str]) -> Iterator[None]:
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level = fsdp_train.log.level
    fsdp_train.log.addHandler(handler)
    fsdp_train.log.setLevel(logging.INFO)
    yield
    fsdp_train.log.setLevel(level)
    fsdp_train.log.removeHandler(handler)


def observe(
    core_context: core.Context,
    run: fsdp_train.Run,
    storage: Path,
    *,
    stop: int | None = None,
    checkpoint: str = "",
    trial_id: int | None = None,
    gather: bool = False,
) -> Observed:
    """Train, be preempted after step `stop` or, if later, the first poll, and note everything. COLLECTIVE.

    A loss scaler starts at FIRST_SCALE and grows after 3 steps without overflow.
    """
    seen = Observed()
    states: list[fsdp_train.TrainState] = []
    original = {name: getattr(fsdp_train, name) for name in ("build_state", "train_step", "save", "load")}
    place = checkpoint if trial_id or not checkpoint else str(storage / checkpoint)
    run = dataclasses.replace(run, checkpoint=place, trial_id=trial_id)

    def build_state(*args: Any) -> fsdp_train.TrainState:
        state = original["build_state"](*args)
        if state.scaler.is_enabled():
            state.scaler.load_state_dict(
                {**state.scaler.state_dict(), "scale": FIRST_SCALE, "growth_factor": 16.0, "growth_interval": 3}
            )
        states.append(state)
        return state

    def train_step(state: fsdp_train.TrainState, tokens: Tensor, *args: Any) -> Any:
        step = state.step + 1
        seen.batches[step] = tokens.clone()
        seen.seeds.append(torch.initial_seed())
        seen.rates.append((step, [group["lr"] for group in state.optimizer.param_groups]))
        return original["train_step"](state, tokens, *args)

    def save(*args: Any) -> str:
        if gather:
            seen.saved_whole = whole(states[0])
        uuid = original["save"](*args)
        seen.saved.append((states[0].step, uuid))
        return uuid

    def load(*args: Any) -> None:
        original["load"](*args)
        state = states[0]
        seen.loaded = {"step": state.step, "skipped_steps": state.skipped_steps, "position": state.data.position}
        seen.loaded |= {"scaler": state.scaler.state_dict(), "held": held(state)}
        if gather:
            seen.loaded_whole = whole(state)

    def should_preempt() -> bool:
        seen.polled.append(states[0].step)
        return stop is not None and states[0].step >= stop

    def report(kind: str) -> Any:
        return lambda step, metrics: seen.reports.append(
            (kind, step, {name: value for name, value in metrics.items() if name not in VOLATILE})
        )

    with contextlib.ExitStack() as stack:
        for replacement in (build_state, train_step, save, load):
            stack.enter_context(mock.patch.object(fsdp_train, replacement.__name__, replacement))
        stack.enter_context(mock.patch.object(core_context.preempt, "should_preempt", should_preempt))
        stack.enter_context(mock.patch.object(fsdp_train.faulthandler, "dump_traceback_later"))
        patch_report = mock.patch.multiple(
            core_context.train,
            report_training_metrics=report("training"),
            report_validation_metrics=report("validation"),
            report_progress=seen.progress.append,
        )
        stack.enter_context(patch_report)
        stack.enter_context(captured_log(seen.messages))
        fsdp_train.train(core_context, run)
    seen.held = held(states[0])
    seen.scaler = states[0].scaler.state_dict()
    return seen


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names whose tensors are not bit for bit those of the other dict, or that only one has."""
    both = a.keys() & b.keys()
    wrong = {name for name in both if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])}
    return sorted(wrong | (a.keys() ^ b.keys()))
