"""Train a transformer with PyTorch FSDP under Determined's Core API: one script, three launches.

    det experiment create config.yaml .                                     # GPU cluster
    torchrun --standalone --nproc-per-node 2 fsdp_train.py [key=value ...]  # local, GPU or CPU
    python fsdp_train.py [key=value ...]                                    # one process

A stopped run resumes on any number of ranks: on as many CPUs bit for bit, else to rounding.

Map: hyperparameters, precision, sharding and optimizer, step and metrics, the loop. Whoever stops
there has read it all; appendices: metrics, checkpoints, configuration, start and end.

Change first: 1. model.py: your model, its units and learning rate. 2. data.py: your tokens. 3. the
values in config.yaml. 4. `Config`, for hyperparameters of your own.

A step is an optimizer step over `global_batch_size` sequences, a loss is in nats per token.
COLLECTIVE marks what all ranks must reach, in the same order.
"""

import argparse
import contextlib
import faulthandler
import functools
import json
import logging
import math
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

# Determined reads its ports when imported. With those of its default a second job on the host would
# join the first; no two share MASTER_PORT, and up to 30000 no outgoing connection is in the way.
port = f"{10_000 + zlib.crc32(os.environ.get('MASTER_PORT', '').encode()) % 20_000}"
os.environ.setdefault("INTER_TRAIN_PROCESS_COMM_PORT_1", port)

import determined as det
import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from determined import core
from determined.common.api.errors import BadRequestException
from determined.common.util import yaml_safe_load
from determined.errors import CheckpointNotFound
from determined.experimental import client
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from data import SyntheticTokens, build_data
from model import (
    BLOCK,
    SHAPE,
    UNITS,
    build_model,
    count_parameters,
    decay_groups,
    learning_rate,
    materialise,
    peak_flops,
)

log = logging.getLogger("fsdp_train")
Json = dict[str, Any]
AmpDtype = torch.dtype | None  # None: float32 throughout

# How long a collective waits for a rank: longer than any rank works alone, reading a checkpoint.
TIMEOUT = timedelta(minutes=10)
# Seconds that a trial may take for its start, or for a step with its validation and checkpoint:
# longer than the Core API tries again, so that a master which never answers ends it.
PATIENCE = 3600


# ---- Hyperparameters ----

# Type, least and greatest value.
Size = Annotated[int, 1, 1_000_000]
Steps = Annotated[int, 1, 1_000_000_000]


@dataclass(frozen=True)
class Config:
    """A field for each hyperparameter. Their values are in the YAML files only."""

    global_batch_size: Size  # sequences per step, over all ranks
    micro_batch_size: Annotated[int | None, 1, 1_000_000]  # per rank and forward; null: all at once
    max_seq_len: Size  # tokens
    vocab_size: Size  # tokens
    d_model: Size  # width
    n_heads: Size  # per block
    n_layers: Size  # blocks
    dropout: Annotated[float, 0, 0.99]  # probability
    simulated_size_in_batches: Steps  # global batches until data repeat
    branching: Annotated[int | None, 1, 1_000_000]  # possible next tokens; null: uniform noise
    lr: Annotated[float, 1e-30, 1e30]  # AdamW's peak rate
    warmup_steps: Annotated[int, 0, 1_000_000_000]  # steps of linear warm-up, then cosine decay
    min_lr_ratio: Annotated[float, 0, 1]  # last rate over lr
    weight_decay: Annotated[float, 0, 1e6]  # on matrices only
    max_grad_norm: Annotated[float, 1e-30, 1e30]  # L2 norm over all parameters
    max_steps: Steps  # steps, as are the periods
    reporting_period: Steps
    validation_period: Steps
    validation_batches: Size  # global batches in a validation
    checkpoint_period: Steps
    amp_dtype: Literal["auto", "bfloat16", "float16", None]  # null: float32 throughout
    reduce_dtype: Literal["float32", None]  # of the gradient reduction; null: the amp dtype
    sharding: Literal["full", "hybrid"]  # hybrid: shard in a node, replicate across nodes
    activation_checkpointing: bool  # recompute each block in backward
    compile: bool  # each block
    core_api_profiler: bool  # system metrics in the web UI
    torch_profiler: bool  # trace of a few steps
    seed: Annotated[int, 0, 4_294_967_295]  # of a trial, or the YAML file's experiment_seed
    slots_per_trial: Size  # of the YAML file: the ranks of a dry run


@dataclass(frozen=True)
class Run:
    """What is known of a run before it starts."""

    config: Config
    device: torch.device
    local_rank: int
    local_ranks: int  # on each node
    amp_dtype: AmpDtype = None
    peak_rate: float = 0.0  # tokens/s of all ranks at their peak FLOP/s; 0: not known
    trial_id: int | None = None  # None: not a trial of a cluster
    checkpoint: str = ""  # to go on from: of the cluster's storage, or a folder
    stopped: threading.Event = field(default_factory=threading.Event)  # by a search, on rank 0


class Refusal(Exception):
    """What ends the run on all ranks: a message for a person, in place of a traceback."""


# ---- Precision ----


def choose_amp_dtype(
    setting: str | None, device_type: str, capability: tuple[int, int], name: str
) -> tuple[AmpDtype, str]:
    """The dtype of gathered weights, activations and autocast (None: float32), and the reason."""
    # Raises det.InvalidHP if bfloat16 is asked for by name where a GPU could only emulate it.
    # The capability is that of the weakest of all ranks: one old GPU must not split the dtype.
    modern, gpu = capability >= (8, 0), device_type == "cuda"
    if setting == "auto":
        return torch.bfloat16 if modern else torch.float16 if gpu else None, f"auto: {name}"
    if setting == "bfloat16" and gpu and not modern:
        raise det.InvalidHP(
            f"amp_dtype = bfloat16 needs compute capability 8.0, not {name}: use auto or float16"
        )
    return getattr(torch, setting or "", None), "as configured"


def mixed_precision(config: Config, amp_dtype: AmpDtype) -> MixedPrecision | None:
    """Dtypes in which FSDP gathers weights and reduces gradients; AdamW's shards stay float32."""
    # Without it, autocast would gather float32 and cast in each forward.
    reduce_dtype = torch.float32 if config.reduce_dtype else amp_dtype
    return MixedPrecision(param_dtype=amp_dtype, reduce_dtype=reduce_dtype) if amp_dtype else None


def autocast(device: torch.device, amp_dtype: AmpDtype) -> torch.autocast:
    """The dtype of each operation: matrix products in `amp_dtype`, on GPUs norms in float32."""
    # Without it, MixedPrecision would run every operation in low precision. Without dtype= it would
    # mean float16, on every GPU.
    return torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None)


def loss_scaler(device: torch.device, amp_dtype: AmpDtype) -> ShardedGradScaler:
    """Keeps float16 gradients in range, and skips a step on all ranks if one overflows."""
    enabled = amp_dtype == torch.float16  # else it passes everything through
    # On CPU it must be told so, or is never enabled; torch 2.2 cannot be told.
    if device.type == "cpu" and torch.__version__ >= "2.3":
        return ShardedGradScaler(device="cpu", enabled=enabled)
    return ShardedGradScaler(enabled=enabled)


# ---- Sharding and optimizer ----


def shard(model: nn.Module, run: Run) -> FSDP:
    """`model` under FSDP: weights, gradients and Adam's state split over the ranks. COLLECTIVE."""
    # FSDP would untie a weight that two modules share, and leave a meta buffer as memory was.
    names = {*model.state_dict(), *dict(model.named_buffers())}
    if lost := names - dict(model.named_parameters()).keys():
        raise Refusal(f"{', '.join(sorted(lost))}: tied weights or buffers; see the README")
    if run.config.compile:
        if torch.__version__ < "2.4":  # compiles each block apart, and by itself only 8 of them
            torch._dynamo.config.cache_size_limit = 10_000
        for module in model.modules():
            if isinstance(module, BLOCK):
                module.compile(dynamic=False)
    ranks = dist.get_world_size()
    hybrid = run.config.sharding == "hybrid" and 1 < run.local_ranks < ranks
    # Neighbouring ranks are on the same node: a hybrid mesh is (nodes, ranks of a node).
    mesh = (ranks // run.local_ranks, run.local_ranks) if hybrid else (ranks,)
    fsdp_model = FSDP(
        model,
        device_mesh=init_device_mesh(run.device.type, mesh),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
        mixed_precision=mixed_precision(run.config, run.amp_dtype),
        auto_wrap_policy=ModuleWrapPolicy(set(UNITS)),
        param_init_fn=lambda module: materialise(module, run.device),
        # One seed draws other weights on another model of GPU: all take those of rank 0.
        sync_module_states=run.device.type == "cuda",
        device_id=run.device,
        use_orig_params=True,
    )
    # A class that matches nothing would leave one big unit, gathered whole, and no error.
    if missing := set(UNITS) - {type(unit.module) for unit in FSDP.fsdp_modules(fsdp_model)}:
        raise Refusal(f"UNITS: the model has no {missing}")
    return fsdp_model


def build_optimizer(fsdp_model: FSDP, config: Config, fused: bool) -> torch.optim.AdamW:
    """AdamW over the shards, with weight decay on matrices."""
    # A shard is flat: the model itself knows which is a matrix.
    groups = decay_groups(list(fsdp_model.parameters()), config)
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused or None)
    # A step with a rate and gradients of zero makes the state exist from the start: a run that does
    # not fit in memory fails at once, and a checkpoint of a run that skipped all steps is whole.
    for p in fsdp_model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


@dataclass
class TrainState:
    """Everything that survives a restart."""

    model: FSDP
    optimizer: torch.optim.Optimizer
    scaler: ShardedGradScaler
    data: SyntheticTokens
    step: int = 0  # optimizer steps completed, skipped ones included
    skipped_steps: int = 0  # those whose float16 gradients overflowed


def build_state(run: Run) -> TrainState:
    """The state before the first step; the same weights on any number of ranks. COLLECTIVE."""
    # The same on every rank: each draws all of a unit's initial values and keeps its shard.
    torch.manual_seed(run.config.seed)
    fsdp_model = shard(build_model(run.config), run)
    scaler = loss_scaler(run.device, run.amp_dtype)
    # Fused AdamW is one kernel, but does not take the scaler's flag.
    fused = run.device.type == "cuda" and not scaler.is_enabled()
    optimizer = build_optimizer(fsdp_model, run.config, fused)
    data = build_data(run.config, "training", dist.get_rank(), dist.get_world_size())
    return TrainState(fsdp_model, optimizer, scaler, data)


# ---- Step and metrics ----


def next_token_loss(model: nn.Module, tokens: Tensor, amp_dtype: AmpDtype) -> Tensor:
    """Mean cross-entropy, float32, of tokens (B, T + 1), each but the first given those before."""
    with autocast(tokens.device, amp_dtype):
        logits = model(tokens[:, :-1])  # (B, T, V)
        # CPU's autocast would leave this in low precision. The cast inside keeps no float32 copy.
        log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        return nn.functional.nll_loss(log_probs.flatten(0, 1), tokens[:, 1:].flatten())


def micro_batch_losses(model: nn.Module, tokens: Tensor, run: Run) -> Iterator[Tensor]:
    """The shares of the micro-batches, the last of which may be smaller, in `tokens`' loss."""
    for micro_batch in tokens.split(run.config.micro_batch_size or len(tokens)):
        loss = next_token_loss(model, micro_batch, run.amp_dtype)
        yield loss * (len(micro_batch) / len(tokens))


def clip_grad_norm(fsdp_model: FSDP, max_norm: float) -> Tensor:
    """Scale the gradients to an L2 norm of at most `max_norm`; returns what it was. COLLECTIVE."""
    # torch.nn.utils' would see this rank's shards only. That of FSDP in torch 2.3 adds up in the
    # order of a set, another in each process: a resumed run would differ in the last bit.
    grads = [p.grad for p in fsdp_model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(grad) for grad in grads]
    total = torch.stack([torch.zeros((), device=fsdp_model.compute_device), *norms]).square().sum()
    # Over all ranks, not one shard group: groups that add up in other orders would drift apart.
    dist.all_reduce(total)  # COLLECTIVE
    replicas = dist.get_world_size() // dist.get_world_size(fsdp_model.process_group)
    norm = (total / replicas).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for grad in grads:
        grad.mul_(factor)
    return norm


def train_step(state: TrainState, tokens: Tensor, run: Run) -> tuple[Tensor, Tensor]:
    """One optimizer step. Returns the loss of this rank, the gradient norm of all. COLLECTIVE."""
    # Every micro-batch reduces its gradients: FSDP's no_sync() would save that traffic, but keep a
    # whole float32 gradient on every rank. Nothing waits for the device, but for float16's scaler.
    loss_sum = torch.zeros((), device=tokens.device)
    for loss in micro_batch_losses(state.model, tokens, run):
        state.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    # The order matters: the norm is of unscaled gradients, and the scaler looks before clipping.
    state.scaler.unscale_(state.optimizer)
    grad_norm = clip_grad_norm(state.model, run.config.max_grad_norm)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()
    return loss_sum, grad_norm


@torch.no_grad()  # torch.inference_mode() would break FSDP's next training forward
def validate(model: FSDP, data: SyntheticTokens, run: Run) -> float:
    """Mean loss over the first batches of the validation data, the same each time. COLLECTIVE."""
    model.eval()
    data.load_state_dict({"position": 0})
    loss = torch.zeros((), device=run.device)
    for _ in range(run.config.validation_batches):
        tokens = next(data).to(run.device, non_blocking=True)
        loss += sum(micro_batch_losses(model, tokens, run))
    model.train()
    dist.all_reduce(loss)  # COLLECTIVE; SUM and divide, for gloo has no AVG
    return loss.item() / run.config.validation_batches / dist.get_world_size()


def training_metrics(
    state: TrainState, sums: Tensor, reported_step: int, clock: tuple[int, float], run: Run
) -> dict[str, float]:
    """Means over all ranks and the steps since `reported_step`. COLLECTIVE."""
    # `sums` are of loss, gradient norm and 1, over steps that were not skipped; `clock` is the
    # step and time from which throughput counts. Raises Refusal if anything is not finite.
    config = run.config
    dist.all_reduce(sums)  # COLLECTIVE
    loss, grad_norm, applied = (sums / dist.get_world_size()).tolist()  # waits for the device
    metrics = {"loss": loss / applied, "grad_norm": grad_norm / applied} if applied else {}
    metrics["lr"] = learning_rate(state.step, config)
    if steps := state.step - clock[0]:
        rate = steps / (time.perf_counter() - clock[1])
        metrics["tokens_per_second"] = rate * config.global_batch_size * config.max_seq_len
        if run.peak_rate:
            metrics["mfu"] = metrics["tokens_per_second"] / run.peak_rate
    if state.scaler.is_enabled():
        state.skipped_steps += state.step - reported_step - round(applied)
        metrics["loss_scale"] = state.scaler.get_scale()
        metrics["skipped_steps"] = state.skipped_steps
    if run.device.type == "cuda":
        metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        metrics["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    else:
        metrics["peak_memory_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    # All ranks hold the same numbers. At a scale below 1, float16 overflows for good.
    for name, value in metrics.items():
        if not math.isfinite(value) or (name == "loss_scale" and value < 1):
            raise Refusal(
                f"training is not finite in steps {reported_step + 1}..{state.step}: {name} = "
                f"{value:g}. Nothing was saved from them: lower lr, warm up longer or use float32"
            )
    return metrics


# ---- The loop ----


def train(core_context: core.Context, run: Run) -> None:
    """Train to max_steps, a preemption or the stop of a search. COLLECTIVE."""
    config, rank = run.config, dist.get_rank()
    step_tokens = config.global_batch_size * config.max_seq_len
    state = build_state(run)
    validation_data = build_data(config, "validation", rank, dist.get_world_size())
    if run.checkpoint:
        load(core_context, state, run)
    if state.step >= config.max_steps:
        log.info(f"nothing left to do at step {state.step}; to go on, raise max_steps")
        return
    if config.core_api_profiler:
        core_context.profiler.on()
    sums = torch.zeros(3, device=run.device)  # since the last report: see training_metrics
    first_step = reported_step = state.step
    clock = (first_step, time.perf_counter())
    with trace_steps(core_context, config) as trace:
        for step in range(first_step + 1, config.max_steps + 1):
            if run.trial_id:
                faulthandler.dump_traceback_later(PATIENCE, exit=True)
            is_last = step == config.max_steps
            # Each implies the next: what is saved was just found finite, no mean is half summed up.
            checkpoint_due = is_last or step % config.checkpoint_period == 0
            validation_due = checkpoint_due or step % config.validation_period == 0
            report_due = validation_due or step % config.reporting_period == 0

            # Dropout follows from seed, step and rank: there is no generator to save.
            torch.manual_seed(zlib.crc32(f"{config.seed}, {step}, {rank}".encode()))
            for group in state.optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            tokens = next(state.data).to(run.device, non_blocking=True)
            loss, grad_norm = train_step(state, tokens, run)
            state.step = step
            # The scaler skips exactly the steps whose norm is not finite; otherwise it must show.
            skipped = ~grad_norm.isfinite() & state.scaler.is_enabled()
            sums += torch.stack((loss, grad_norm, torch.ones_like(loss))).masked_fill(skipped, 0)
            if trace:
                trace.step()
            if step == first_step + 1:  # its time is that of starting and compiling
                loss.item()  # waits for the device
                clock = (step, time.perf_counter())
                log.info(f"first step after {time.time() - psutil.Process().create_time():.1f} s")
            if not report_due:
                continue

            metrics = training_metrics(state, sums, reported_step, clock, run)
            rate = metrics.get("tokens_per_second", math.inf)
            left = timedelta(seconds=round((config.max_steps - step) * step_tokens / rate))
            log.info(
                f"step {step}/{config.max_steps}  loss {metrics.get('loss', math.nan):.4f}  "
                f"norm {metrics.get('grad_norm', math.nan):.3g}  lr {metrics['lr']:.3g}  "
                f"{rate:.0f} tok/s  ETA {left}"
            )
            if validation_due:
                validation_loss = validate(state.model, validation_data, run)
                if not math.isfinite(validation_loss):
                    raise Refusal(f"validation_loss is not finite at step {step}")
                log.info(f"step {step}/{config.max_steps}  validation_loss {validation_loss:.4f}")
            # While rank 0 waits for the master, the others wait in the Core API, without TIMEOUT.
            if rank == 0:
                core_context.train.report_training_metrics(step, metrics)
                core_context.train.report_progress(step / config.max_steps)
                if validation_due:  # `batches` is what a search can measure time in
                    core_context.train.report_validation_metrics(
                        step, {"validation_loss": validation_loss, "batches": step}
                    )
            # Not on the last step, which is an end of its own: a yes is acknowledged at once.
            leave = not is_last and (
                core_context.distributed.broadcast(run.stopped.is_set() and "stopped by the search")
                or (core_context.preempt.should_preempt() and "preempted")
            )  # COLLECTIVE
            if checkpoint_due or leave:
                checkpoint = save(core_context, state, run)
                log.info(f"step {step}/{config.max_steps}  checkpoint {checkpoint}")
            if leave:
                log.info(f"{leave} at step {step}")
                return
            sums.zero_()
            reported_step, clock = step, (step, time.perf_counter())
    log.info(
        f"done: validation_loss {validation_loss:.4f}, floor {validation_data.entropy:.4f}\n"
        "to go on: --resume latest, or det experiment continue, with a higher max_steps"
    )


# ==== Appendix: metrics, profiler, search ====


def trace_steps(core_context: core.Context, config: Config) -> Any:
    """torch's profiler over steps 3 to 5 of this run, or nothing; wants step() after each step."""
    if not config.torch_profiler:
        return contextlib.nullcontext()
    folder = core_context.train.get_tensorboard_path() or "traces"  # off-cluster it is None
    everywhere(lambda: os.makedirs(folder, exist_ok=True))
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder)),
    )


def watch_search(run: Run) -> None:
    """Set `run.stopped` once a search has stopped the trial; Determined 0.38.1 sends no signal."""
    # For a thread of its own: a master that does not answer delays nothing.
    searcher = json.loads(os.environ["DET_EXPERIMENT_CONFIG"])["searcher"]
    warn_once = functools.lru_cache(log.warning)  # of the same words
    while searcher["name"] != "single" and not run.stopped.wait(2):
        try:
            if "STOPPING_COMPLETED" in str(client.get_trial(run.trial_id or 0).state):
                run.stopped.set()
        except Exception:
            warn_once("does the search go on? The master does not say")


# ==== Appendix: checkpoints ====
#
# A folder with a file of each rank's part of weights and Adam state, which torch.distributed's
# checkpoint reads on any number of ranks, and train_state.json, written last: the rest of
# TrainState, and the crc32 of each file, since torch loads a flipped byte without a word.
# Determined's own metadata.json cannot say that all is there: a sharded save does not upload it to
# cloud storage.

CHECKPOINT_FORMAT = 2


def sharded_tensors(state: TrainState) -> tuple[Json, Any]:
    """This rank's parts of what is saved, by the model's own names; Adam's state. COLLECTIVE."""
    if torch.__version__ < "2.4" and not torch.cuda.is_available():
        # FSDP asks CUDA for these on CPU too.
        torch.cuda.synchronize = torch.cuda.memory_summary = lambda *_: ""  # type: ignore
    model, optimizer = dcp_state.get_state_dict(state.model, state.optimizer)
    return {"model": model, "optimizer": optimizer["state"]}, optimizer


def checksum(path: Path) -> int:
    """crc32 of a file, without a copy of it in memory."""
    return zlib.crc32(np.memmap(path, mode="r").data) if path.stat().st_size else 0


def save(core_context: core.Context, state: TrainState, run: Run) -> str:
    """Write a checkpoint, each rank its own file, and return its UUID. COLLECTIVE."""
    # Raises Refusal on all ranks, and leaves nothing behind, if one cannot write.
    train_state: Json = {
        "format": CHECKPOINT_FORMAT,
        "trial_id": run.trial_id,
        "steps_completed": state.step,
        "skipped_steps": state.skipped_steps,
        "data": state.data.state_dict(),
        "scaler": state.scaler.state_dict(),
        "hyperparameters": asdict(run.config),
    }
    tensors, _ = sharded_tensors(state)
    metadata = {"steps_completed": state.step}
    with core_context.checkpoint.store_path(metadata, shard=True) as (path, uuid):  # COLLECTIVE
        # Copying ahead would pin a rank's whole shard in host memory.
        writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)
        try:
            everywhere(lambda: dcp.save(tensors, storage_writer=writer))
            # Locally all nodes must share the folder, and so find what rank 0 wrote.
            common = path.glob(".metadata") if run.trial_id else [path / ".metadata"]
            own = [*path.glob(f"__{dist.get_rank()}_*"), *common]
            train_state["files"] = everywhere(lambda: {file.name: checksum(file) for file in own})
            crc = zlib.crc32(json.dumps(train_state).encode())
            text = json.dumps({"crc32": crc, "train_state": train_state})
            everywhere(lambda: dist.get_rank() or (path / "train_state.json").write_text(text))
        except Refusal as problem:
            text = (
                f"step {state.step} cannot be saved to {path}: {problem}; "
                f"{shutil.disk_usage(path.parent).free:,} bytes are free, "
                f"a checkpoint has {12 * count_parameters(run.config):,}"
            )
            shutil.rmtree(path, ignore_errors=True)
            raise Refusal(text)
    return uuid


def read_train_state(path: Path, run: Run | None = None) -> Json:
    """The content of train_state.json. Raises Refusal if it is not what this script writes."""
    # For a `run`, also if of another model or changed; each rank reads some of its node's files.
    try:
        document = json.loads((path / "train_state.json").read_text())
        saved = document["train_state"]
        if zlib.crc32(json.dumps(saved).encode()) != document["crc32"]:
            raise ValueError("changed after it was written")
    except Exception as problem:
        raise Refusal(f"train_state.json is not whole: {problem!r}")
    if saved["format"] != CHECKPOINT_FORMAT:
        raise Refusal(f"its format, {saved['format']}, is older than this script's")
    if run:
        then, now = saved["hyperparameters"], asdict(run.config)
        if other := [f"{k} = {then.get(k)}, here {now[k]}" for k in SHAPE if then.get(k) != now[k]]:
            raise Refusal(f"is of another model: {'; '.join(other)}")
        for files in saved["files"][run.local_rank :: run.local_ranks]:
            for name, crc in files.items():
                if checksum(path / name) != crc:
                    raise Refusal(f"{name} was changed after it was written")
    return saved


def load(core_context: core.Context, state: TrainState, run: Run) -> None:
    """Bring `state` to where `run.checkpoint` was saved, by any number of ranks. COLLECTIVE."""
    # If another trial saved it (a fork, a warm start), only the weights are loaded. Raises Refusal
    # on all ranks if the checkpoint is not whole, was changed, or is of another model.
    folder: Any = contextlib.nullcontext(Path(run.checkpoint))
    if run.trial_id:
        folder = core_context.checkpoint.restore_path(run.checkpoint)  # COLLECTIVE
    tensors, optimizer = sharded_tensors(state)
    with folder as path:
        try:
            saved = everywhere(lambda: read_train_state(path, run))[0]
            # On a cluster a fork comes in the same way as a pause; locally the user said --resume.
            if fork := run.trial_id not in (None, saved["trial_id"]):
                del tensors["optimizer"]
            else:
                everywhere(lambda: state.data.load_state_dict(saved["data"]))
            everywhere(lambda: dcp.load(tensors, storage_reader=dcp.FileSystemReader(path)))
        except Refusal as problem:
            raise Refusal(f"checkpoint {run.checkpoint}: {problem}")
    dcp_state.set_model_state_dict(state.model, tensors["model"])
    if fork:
        log.info(f"weights of trial {saved['trial_id']}, from step 0: {run.checkpoint}")
        return
    dcp_state.set_optimizer_state_dict(state.model, state.optimizer, optim_state_dict=optimizer)
    state.step, state.skipped_steps = saved["steps_completed"], saved["skipped_steps"]
    if saved["scaler"]:
        state.scaler.load_state_dict(saved["scaler"])
    log.info(f"at step {state.step} of checkpoint {run.checkpoint}")
    log.info(f"changed: {dict(asdict(run.config).items() - saved['hyperparameters'].items())}")


def find_checkpoint(resume: str, directory: Path) -> Path:
    """The folder that --resume means; for `latest` that of the whole checkpoint with most steps."""
    for path in (directory / resume, Path(resume)):
        if path.is_dir():
            return path
    found = []
    for path in directory.iterdir() if resume == "latest" else ():
        try:
            found.append((read_train_state(path)["steps_completed"], path))
        except Refusal as problem:
            log.warning(f"skipping checkpoint {path}: {problem}")
    if not found:
        raise Refusal(f"--resume {resume}: no whole checkpoint in {directory}, nor such a folder")
    return max(found)[1]


# ==== Appendix: configuration ====


def parse_value(value: Any, hint: Any) -> Any:
    """`value` as the type `hint` of a Config field. Raises ValueError saying what that takes."""
    if get_origin(hint) is not Annotated:
        choices = get_args(hint) or (True, False)
        if value in choices and type(value) in map(type, choices):
            return value
        raise ValueError(f"must be one of {json.dumps(choices)}")
    kind, low, high = get_args(hint)
    if value is None and kind == int | None:
        return None
    # The master sends 1.0 and 1e4 as int, and some YAML readers 1e-4 as str: the field decides.
    with contextlib.suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    if type(value) in (int, float) and low <= value <= high and (kind is float or value % 1 == 0):
        return float(value) if kind is float else int(value)
    raise ValueError(f"must be {getattr(kind, '__name__', 'null or int')} from {low} to {high}")


def parse_config(hparams: Json, ranks: int) -> Config:
    """The Config that `hparams` spell. All problems are reported together."""
    # Raises Refusal if a key is unknown or missing or a value is none that the field takes;
    # det.InvalidHP if each value is fine but they do not fit together, as a search may draw them.
    hints = get_type_hints(Config, include_extras=True)
    values: Json = dict.fromkeys(hints)
    wrong = [f"{key}: no such hyperparameter" for key in hparams.keys() - hints.keys()]
    unfit = []
    for name, hint in hints.items():
        try:
            values[name] = parse_value(hparams.get(name, "missing"), hint)
        except ValueError as problem:
            wrong.append(f"{name} = {hparams.get(name, 'missing')}: {problem}; use {name}=VALUE")
    config = Config(**values)
    for build in (build_model, lambda c: build_data(c, "training", 0, ranks or c.slots_per_trial)):
        try:
            build(config)
        except ValueError as problem:
            unfit.append(f"{problem}")
        except TypeError:
            pass  # of a value that is wrong, so None
    if wrong or unfit:
        text = "\n  ".join(["hyperparameters:", *wrong, *unfit])
        raise Refusal(text) if wrong else det.InvalidHP(text)
    return config


def read_settings(info: det.ClusterInfo | None) -> tuple[Json, str, Any]:
    """Hyperparameters, with the seed; of a local run also slots, checkpoint folder and --resume."""
    if info:
        if sys.argv[1:]:
            raise Refusal(f"arguments {sys.argv[1:]}: in a trial, write them as hyperparameters")
        hparams = info.trial.hparams | {"seed": info.trial.trial_seed}
        return hparams, "", info.latest_checkpoint or ""
    parser = argparse.ArgumentParser(usage=__doc__, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--config", default="config.yaml")
    parser.add_argument("--resume")
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    parser.add_argument("--dry-run", action="store_true")
    args, unknown = parser.parse_known_intermixed_args()
    try:
        experiment = yaml_safe_load(Path(args.config).read_text())
        hparams = {
            **experiment["hyperparameters"],
            "seed": experiment["reproducibility"]["experiment_seed"],
            "slots_per_trial": experiment["resources"]["slots_per_trial"],
        }
    except Exception as problem:
        raise Refusal(
            f"--config {args.config}: must be an experiment config with `hyperparameters`, "
            f"`reproducibility.experiment_seed` and `resources.slots_per_trial`: {problem!r}"
        )
    for word in unknown + args.overrides:
        try:
            key, text = word.split("=", 1)
            hparams[key] = yaml_safe_load(text)
        except Exception:
            raise Refusal(f"argument {word!r}: must be key=value, such as lr=1e-3")
    if "://" in (args.checkpoint_dir or "://"):
        raise Refusal(f"--checkpoint-dir {args.checkpoint_dir}: no folder; see checkpoint_storage")
    return hparams, os.path.abspath(args.checkpoint_dir), args.resume


def describe(config: Config, ranks: int, local_ranks: int, dtype: AmpDtype, why: str) -> str:
    """The banner: what `ranks` ranks, `local_ranks` of them on each node, will do and need."""
    n = count_parameters(config)
    shards = local_ranks if config.sharding == "hybrid" and local_ranks > 1 else ranks
    rows = config.global_batch_size // ranks
    tokens = config.global_batch_size * config.max_seq_len
    late = "; warning: not less than max_steps, so the rate never reaches lr"
    return f"""this run:
  model       {n:,} parameters, {config.n_layers} blocks of width {config.d_model}
  ranks       {ranks // local_ranks} node(s) x {local_ranks}
  sharding    {ranks // shards} replica(s) x {shards} shard(s)
  precision   {dtype or "torch.float32"} ({why})
  reduction   {dtype if config.reduce_dtype is None and dtype else "torch.float32"}
  scaler      {"on" if dtype == torch.float16 else "off"}; weights and Adam float32
  step        {tokens:,} tokens, {tokens * build_model(config).flops_per_token():.3g} FLOPs
  each rank   {rows} sequences a step, {min(config.micro_batch_size or rows, rows)} at a time
  run         {config.max_steps:,} steps, {config.max_steps * tokens:,} tokens
  memory      {16e-6 * n / shards:,.1f} MB a rank, and gathered units and activations on top
  checkpoint  {12e-6 * n:,.1f} MB
  loss        starts near {math.log(config.vocab_size):.3f}
  floor       {build_data(config, "validation", 0, ranks).entropy:.3f}, of the validation loss
  schedule    warmup_steps {config.warmup_steps}{late * (config.warmup_steps >= config.max_steps)}\
""".replace("torch.", "")


# ==== Appendix: start and end ====

# The Core API tries broken connections again, but takes 500 for an answer, which a master without
# its database gives. Each call is tried for up to 25 minutes.
RETRY = (
    '{"total":20,"backoff_factor":0.5,"allowed_methods":false,"status_forcelist":[500,502,503,504]}'
)
ENTRYPOINT = "entrypoint: python3 -m determined.launch.torch_distributed python3 fsdp_train.py"
LAUNCH = "torchrun --nnodes N --nproc-per-node GPUS --rdzv-backend c10d --rdzv-endpoint HOST:29500"


def everywhere(action: Callable[[], Any]) -> list[Any]:
    """What `action` returns on each rank; if it fails on one, all raise its error. COLLECTIVE."""
    # So none goes on alone, or waits for one that is gone.
    outcomes: Any = [None] * dist.get_world_size()
    try:
        outcome: Any = action(), None
    except det.InvalidHP as error:
        outcome = None, error
    except (Refusal, argparse.ArgumentError) as error:
        outcome = None, f"{error}"
    except (OSError, ValueError, RuntimeError, dcp.CheckpointException) as error:
        outcome = None, str(error).strip().split("\n")[-1]
    dist.all_gather_object(outcomes, outcome)  # COLLECTIVE
    for rank, (_, problem) in enumerate(outcomes):
        if problem is not None:
            raise problem if type(problem) is det.InvalidHP else Refusal(f"{problem} (rank {rank})")
    return [result for result, _ in outcomes]


def read_place() -> list[int]:
    """Rank and number of ranks, of all and on this node, from a launcher; or a world of one."""
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_PORT"
    given = {name: os.environ.get(name, "") for name in names.split()}
    if not any(given.values()):
        counts = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        if (tasks := max(map(os.environ.get, counts, "111"))) > "1":
            raise Refusal(f"{tasks} tasks, but no RANK, so each would train alone: use {LAUNCH}")
        given = dict(zip(given, "0101010"))
        os.environ |= given | {"MASTER_ADDR": "127.0.0.1"}
    place = [int(text) for text in given.values() if text.isdecimal()]
    wrong = len(place) < 7 or place[1] != place[3] * place[5]  # nodes have as many ranks
    if wrong or any(place[i] >= place[i + 1] for i in (0, 2, 4)):
        raise Refusal(f"{given}: must be numbers, and a rank below its size: start with {LAUNCH}")
    return place[:4]


def choose_device(local_rank: int, local_ranks: int, in_trial: object) -> torch.device:
    """This rank's GPU, or the CPU where there are none, or locally too few. Raises Refusal."""
    gpus = torch.cuda.device_count()
    if gpus >= local_ranks:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    few = f"{local_ranks} ranks on this node, {gpus} GPU(s): off-cluster all train on the CPU"
    if gpus and in_trial:
        raise Refusal(few)
    if gpus:
        log.warning(few)
    return torch.device("cpu")


def bfloat16_capability(device: torch.device) -> tuple[tuple[int, int], str]:
    """Compute capability and name. A CPU counts as 8.0 if it is known to multiply bfloat16."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        return capability, f"{name}, compute capability {capability[0]}.{capability[1]}"
    # Old torch does not say. Without such instructions bfloat16 is 50 times slower than float32.
    known: Json = getattr(torch.cpu, "get_capabilities", dict)()
    if known.get("avx512_bf16") or known.get("amx_bf16"):
        return (8, 0), "CPU that multiplies bfloat16"
    return (0, 0), "CPU not known to; amp_dtype=bfloat16 runs a new GPU's path, slowly"


def connect(device: torch.device) -> core.DistributedContext:
    """Join the process group, and the Core API's own channel. Raises Refusal. COLLECTIVE."""
    address = os.environ.get("MASTER_ADDR", "nothing")

    def join() -> Any:
        chief = socket.gethostbyname(address)  # IPv4, for the Core API knows no other
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        return core.DistributedContext.from_torch_distributed(chief)

    try:
        # In a thread, for a wait for a closed port has no limit, and others go on beyond theirs.
        with ThreadPool(1) as pool:
            return pool.apply_async(join).get(3 * TIMEOUT.seconds)
    except Exception as problem:
        place = f"MASTER_ADDR = {address}, port {os.environ['MASTER_PORT']}"
        raise Refusal(f"{place}: no process group: {problem!r}")


@functools.cache
def settle(info: det.ClusterInfo | None, ranks: int) -> tuple[Config, Json]:
    """What this rank has read, and all must agree on. Raises Refusal, det.InvalidHP or OSError."""
    hparams, folder, checkpoint = read_settings(info)
    hparams.setdefault("slots_per_trial", ranks)
    config = parse_config(hparams, ranks)
    if folder and ranks:
        try:
            os.makedirs(folder, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            if shutil.disk_usage(folder).free < 12 * count_parameters(config):
                raise OSError(f"{12 * count_parameters(config):,} bytes for a checkpoint not free")
        except OSError as problem:
            raise Refusal(f"--checkpoint-dir {folder}: cannot be used: {problem}")
        checkpoint = "" if checkpoint is None else str(find_checkpoint(checkpoint, Path(folder)))
    # Without hidden ones, such as an editor's lock.
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("[!.]*.py")))
    scripts = f"{zlib.crc32(code)} on torch {torch.__version__}"
    return config, {"folder": folder, "from": checkpoint, "scripts": scripts}


def start() -> None:
    """Agree with the other ranks on what to do, and train."""
    rank, ranks, local_rank, local_ranks = read_place()
    logging.basicConfig(level="ERROR", format="%(levelname)s: %(message)s")
    log.setLevel("ERROR" if rank else "INFO")
    # In a world of one, and inside torch 2.3's checkpoints.
    warnings.filterwarnings("ignore", "FSDP is switching|When using ``NO_SHARD`|TypedStorage is")
    torch.set_float32_matmul_precision("highest")  # no TF32, as NVIDIA's images
    info = det.get_cluster_info()
    if info and info.task_type != "TRIAL":  # a shell or a notebook is as good as a laptop
        info = None
    if info:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        os.environ.setdefault("DET_RETRY_CONFIG", RETRY)
        if ranks < (slots := sum(info.container_slot_counts)):
            raise Refusal(f"{slots} slots, but {ranks} rank(s): {ENTRYPOINT}")
    elif "--dry-run" in sys.argv:
        dry_run()
        return
    device = choose_device(local_rank, local_ranks, info)
    channel = connect(device)
    try:
        views = everywhere(lambda: str(settle(info, ranks)))
        for other, view in enumerate(views):
            for here, there in zip(views[0].split(", "), view.split(", ")):
                if here != there:
                    raise Refusal(f"rank 0 has {here}, but rank {other} has {there}")
        config, where = settle(info, ranks)
        capability, name = min(everywhere(lambda: bfloat16_capability(device)))
        amp_dtype, why = choose_amp_dtype(config.amp_dtype, device.type, capability, name)
    except det.InvalidHP as problem:
        if info:
            log.warning(problem)
            with core.init(distributed=channel):
                raise  # the master wants to hear of it from every rank
        raise
    log.info(describe(config, ranks, local_ranks, amp_dtype, why))
    peak = ranks * peak_flops(name, amp_dtype) / build_model(config).flops_per_token()
    trial_id = info.trial.trial_id if info else None
    run = Run(config, device, local_rank, local_ranks, amp_dtype, peak, trial_id, where["from"])
    if info and rank == 0:
        threading.Thread(target=watch_search, args=[run], daemon=True).start()
    # In a trial the storage is the experiment's.
    storage = None if info else {"type": "directory", "container_path": where["folder"]}
    with core.init(distributed=channel, checkpoint_storage=storage) as core_context:
        train(core_context, run)
    dist.destroy_process_group()  # only after success: it would hide an error, or wait for a rank


def dry_run() -> None:
    """Print the banner of the file's slots, on nodes of up to 8 GPUs."""
    config, _ = settle(None, 0)
    ranks = config.slots_per_trial
    choice = choose_amp_dtype(config.amp_dtype, "cuda", (8, 0), "GPUs assumed")
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{describe(config, ranks, math.gcd(ranks, 8), *choice)}\n".encode())


def main() -> None:
    """`start`; what a person can mend is one message a node, and exit code 1."""
    # A closed stream's number would go to the next file, and messages of C++ into it.
    while os.open(os.devnull, os.O_RDWR) < 2:
        pass
    # Python's own handler does not run while the main thread waits inside C++.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        start()
    except (
        Refusal,
        argparse.ArgumentError,
        det.InvalidHP,
        BadRequestException,
        CheckpointNotFound,
        ModuleNotFoundError,
        OSError,
    ) as problem:
        if not dist.is_initialized() or os.environ["LOCAL_RANK"] == "0":
            print(f"\nfsdp_train.py: {problem}", file=sys.stderr)
        else:
            time.sleep(5)  # a launcher kills all ranks once one is gone: let the other speak
        sys.exit(1)


if __name__ == "__main__":
    main()
