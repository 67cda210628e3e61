"""Train a small transformer with PyTorch FSDP under Determined's Core API: one script, three ways to launch it.

    det experiment create config.yaml .                                      # GPU cluster
    torchrun --standalone --nproc-per-node 2 fsdp_train.py [key=value ...]   # several local processes, GPU or CPU
    python fsdp_train.py [key=value ...]                                     # one local process

On a cluster the hyperparameters are the experiment's; locally they are those of --config (default config.yaml) with the
key=value overrides. --dry-run says what a run would do and cost, and stops.

To train something else, change `build_model`, `BLOCK` and `UNITS` (your model, and its modules that FSDP gathers one at
a time), `build_data` (your tokens), and the fields of `Config` with their values in config.yaml.

Units: a step is an optimizer step over `global_batch_size` sequences, a loss is in nats per token, a size in bytes.
COLLECTIVE marks what all ranks must reach, in the same order.
"""

import argparse
import difflib
import functools
import io
import json
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
import traceback
import typing
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import determined as det
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from determined import core
from determined.common.util import yaml_safe_load
from ruamel.yaml.error import YAMLError
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint as recompute_in_backward
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data import SyntheticTokens
from model import Block, Embedding, Head, Transformer

log = logging.getLogger("fsdp_train")

# The module that the model repeats, which is compiled and recomputed.
BLOCK = Block
# FSDP gathers a module of these classes whole just before it runs, and frees it just after.
UNITS = (Embedding, BLOCK, Head)
# The hyperparameters that fix the shapes of the weights.
SHAPE = ("vocab_size", "max_seq_len", "d_model", "n_heads", "n_layers")
# How long a collective waits for a rank that does not come: longer than any rank works alone, reading a checkpoint.
TIMEOUT = timedelta(minutes=10)
# How long the start of a run may take, its end, and the validation, reports and checkpoint of a step together: longer
# than the Core API's own retries. Without it, a master that takes a request and never answers is waited for for ever.
PATIENCE = timedelta(hours=1)
CHECKPOINT_FORMAT = 1


# ---- Configuration ----


@dataclass(frozen=True)
class Config:
    """The hyperparameters: a field for each key of the YAML files, which hold the only values."""

    global_batch_size: int  # sequences per optimizer step, over all ranks
    micro_batch_size: int | None  # sequences per rank and forward; null: all of the rank's, no gradient accumulation
    max_seq_len: int  # tokens
    vocab_size: int  # tokens
    d_model: int  # width
    n_heads: int  # per block
    n_layers: int  # blocks
    dropout: float  # probability
    simulated_size_in_batches: int  # global batches in the training set
    branching: int | None  # possible next tokens; null: uniform noise
    lr: float  # AdamW's peak rate
    warmup_steps: int  # steps of linear warm-up, then cosine decay
    min_lr_ratio: float  # last rate over lr
    weight_decay: float  # on matrices only
    max_grad_norm: float  # L2 norm over all parameters
    max_steps: int  # optimizer steps, as are the periods
    reporting_period: int
    validation_period: int
    validation_batches: int  # global batches in a validation
    checkpoint_period: int
    amp_dtype: Literal["auto", "bfloat16", "float16", None]  # null: float32 throughout
    reduce_dtype: Literal["float32", None]  # of the gradient reduction; null: the amp dtype
    sharding: Literal["full", "hybrid"]  # hybrid: shard inside a node, replicate across nodes
    activation_checkpointing: bool  # recompute each block in backward
    compile: bool  # each block
    core_api_profiler: bool  # system metrics in the web UI
    torch_profiler: bool  # trace of a few steps


# Where a number may lie, if not in [1, inf) for an int or (0, inf) for a float. AdamW divides lr by 0.1, in float32.
RANGES = {
    "lr": (1e-30, 1e30),
    "warmup_steps": (0, math.inf),
    "weight_decay": (0, math.inf),
    "min_lr_ratio": (0, 1),
    "dropout": (0, 0.99),
}


class ConfigError(Exception):
    """What the user wrote cannot be understood; the message says where, and what to write instead."""


def parse_value(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint` of the Config field `name`. Raises ValueError saying what the field takes.

    The master sends 1.0 and 1e4 as int, and some YAML readers 1e-4 as str, so numbers go by the field's type.
    """
    choices = (True, False) if hint is bool else typing.get_args(hint)
    if hint is bool or typing.get_origin(hint) is Literal:
        if any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
            return value
        raise ValueError(f"must be one of {', '.join(map(json.dumps, choices))}")
    if value is None and choices:
        return None
    kind = choices[0] if choices else hint
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    low, high = RANGES.get(name, (1 if kind is int else sys.float_info.min, math.inf))
    if low <= number <= high and math.isfinite(number) and (kind is float or number.is_integer()):
        return kind(number)
    span = f"from {low} to {high}" if high < math.inf else f">= {low}" if kind is int or low == 0 else "> 0"
    raise ValueError(f"must be a {'whole ' * (kind is int)}number {span}{' or null' * bool(choices)}")


def around(number: int, allowed: Iterable[int]) -> str:
    """The nearest of `allowed` below and above `number`, as words."""
    below, above = [n for n in allowed if 0 < n < number], [n for n in allowed if n > number]
    return " or ".join(str(n) for n in ([max(below)] if below else []) + ([min(above)] if above else []))


def parse_config(hparams: dict[str, Any], ranks: int, local_ranks: int) -> Config:
    """The Config that `hparams` spell, for `ranks` ranks, `local_ranks` of them on each node.

    All problems are reported together. Raises ConfigError if a key is unknown or missing or a value is none that the
    field takes; det.InvalidHP if each value is fine but they do not fit together, as a hyperparameter search may draw.
    """
    hints = typing.get_type_hints(Config)
    values: dict[str, Any] = dict.fromkeys(hints)
    wrong, unfit = [], []
    for key in hparams.keys() - hints.keys():
        near = difflib.get_close_matches(str(key), hints, n=1)
        wrong.append(f"{key}: no such hyperparameter{f'; did you mean {near[0]}?' if near else ''}")
    for name, hint in hints.items():
        value = hparams.get(name)
        if isinstance(value, dict) and value.get("type") == "const":
            value = value.get("val")
        if name not in hparams:
            wrong.append(f"{name}: missing")
        elif isinstance(value, dict):
            wrong.append(f"{name} = {value}: a search range, but a local run needs one value: add {name}=VALUE")
        else:
            try:
                values[name] = parse_value(name, value, hint)
            except ValueError as problem:
                wrong.append(f"{name} = {value!r}: {problem}")

    c = Config(**values)  # with None for what is wrong
    rows, rest = divmod(c.global_batch_size or 0, ranks)
    if rest:
        fit = around(c.global_batch_size, (rows * ranks, (rows + 1) * ranks))
        unfit.append(f"global_batch_size = {c.global_batch_size} does not divide by the {ranks} ranks: use {fit}")
    elif rows and c.micro_batch_size and rows % c.micro_batch_size:
        fit = around(c.micro_batch_size, [n for n in range(1, rows + 1) if rows % n == 0])
        each = f"{rows} sequences of each rank (global_batch_size {c.global_batch_size} / {ranks} ranks)"
        unfit.append(f"micro_batch_size = {c.micro_batch_size} does not divide the {each}: use {fit}")
    if c.d_model and c.n_heads and c.d_model % c.n_heads:
        fit = around(c.n_heads, [n for n in range(1, c.d_model + 1) if c.d_model % n == 0])
        unfit.append(f"n_heads = {c.n_heads} does not divide d_model = {c.d_model}: use {fit}")
    if c.branching and c.vocab_size and c.branching > c.vocab_size:
        unfit.append(f"branching = {c.branching} is more than vocab_size = {c.vocab_size}: use at most that")
    if c.sharding == "hybrid" and local_ranks == 1 < ranks:
        unfit.append("sharding = hybrid shards inside a node, but each node has one rank: use full")
    if wrong:
        raise ConfigError("\n  ".join(["hyperparameters:", *wrong, *unfit]))
    if unfit:
        raise det.InvalidHP("\n  ".join(["hyperparameters that do not fit together:", *unfit]))
    return c


def parse_arguments() -> argparse.Namespace:
    """The command line of a local run. Raises ConfigError for a wrong one."""

    def error(message: str) -> NoReturn:
        raise ConfigError(f"{message}; hyperparameters are written key=value, such as max_steps=100")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = error  # type: ignore[method-assign]  # its own would print the usage on every rank
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="hyperparameter that replaces the file's")
    default = Path("config.yaml")
    parser.add_argument("--config", type=Path, default=default, metavar="FILE", help="experiment config (%(default)s)")
    parser.add_argument("--resume", metavar="latest|UUID", help="checkpoint in --checkpoint-dir to go on from")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="say what slots_per_trial ranks would do, and stop")
    return parser.parse_intermixed_args()


def read_experiment(args: argparse.Namespace) -> tuple[dict[str, Any], int, int]:
    """Hyperparameters with the overrides, seed, and slots of a local run. Raises ConfigError if the file has none."""
    try:
        experiment = yaml_safe_load(args.config.read_text())
    except (OSError, ValueError, YAMLError) as problem:
        raise ConfigError(f"--config {args.config}: cannot be read: {problem}") from None
    if not isinstance(experiment, dict) or not isinstance(experiment.get("hyperparameters"), dict):
        raise ConfigError(f"--config {args.config}: no `hyperparameters:` section; it must be an experiment config")
    hparams = dict(experiment["hyperparameters"])

    def get(section: str, key: str) -> Any:
        return experiment[section].get(key) if isinstance(experiment.get(section), dict) else None

    seed = get("reproducibility", "experiment_seed")
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise ConfigError(f"{args.config}: reproducibility.experiment_seed = {seed}: must be from 0 to 2^32 - 1")
    for word in args.overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"argument {word!r}: must be key=value, such as max_steps=100")
        try:
            hparams[key] = yaml_safe_load(text)
        except (ValueError, YAMLError):
            raise ConfigError(f"argument {word!r}: the value is not YAML") from None
    slots = get("resources", "slots_per_trial")
    if args.dry_run:
        slots = hparams.pop("slots_per_trial", slots)
    try:
        return hparams, seed, parse_value("slots_per_trial", slots, int | None) or 1
    except ValueError as problem:
        raise ConfigError(f"slots_per_trial = {slots}: {problem}") from None


# ---- Precision ----


def choose_amp_dtype(
    setting: str | None, device_type: str, capability: tuple[int, int], device_name: str = "GPU"
) -> tuple[torch.dtype | None, str]:
    """The low-precision dtype of parameters, activations and autocast (None: float32 throughout), and the reason.

    `capability` is the least compute capability of all ranks' GPUs, `device_name` that GPU; a CPU's is not looked at.
    Raises det.InvalidHP if bfloat16 is asked for by name where some GPU could only emulate it.
    """
    gpu = f"{device_name}, compute capability {capability[0]}.{capability[1]}"
    old_gpu = device_type != "cpu" and capability < (8, 0)
    if setting == "bfloat16" and old_gpu:
        raise det.InvalidHP(f"amp_dtype = bfloat16 needs compute capability 8.0, not {gpu}: use auto or float16")
    if setting != "auto":
        return getattr(torch, setting) if setting else None, "as configured"
    if old_gpu:
        return torch.float16, f"auto: {gpu}, less than 8.0"
    return torch.bfloat16, "auto: CPU, in place of a GPU of capability 8.0" if device_type == "cpu" else f"auto: {gpu}"


def agree_on_amp_dtype(config: Config, device: torch.device) -> tuple[torch.dtype | None, str]:
    """`choose_amp_dtype` for the weakest GPU of all ranks: one old GPU must not split the dtype. COLLECTIVE."""
    here = ((0, 0), "CPU")
    if device.type == "cuda":
        here = (torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    everywhere = [here] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)  # COLLECTIVE
    return choose_amp_dtype(config.amp_dtype, device.type, *min(everywhere))


def reduction_dtype(config: Config, amp_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients travel."""
    return torch.float32 if amp_dtype is None or config.reduce_dtype == "float32" else amp_dtype


# ---- Model, sharding, data, optimizer ----


def build_model(config: Config) -> nn.Module:
    """The model, (B, T) tokens -> (B, T, vocab_size) logits, on the meta device: shapes without memory."""
    with torch.device("meta"):
        return Transformer(dropout=config.dropout, **{name: getattr(config, name) for name in SHAPE})


def build_data(
    config: Config, seed: int, rank: int, ranks: int, device: torch.device
) -> tuple[SyntheticTokens, SyntheticTokens]:
    """Training and validation data: endless iterators over this rank's (B, T + 1) tokens of each global batch."""
    train_seed, validation_seed = (int(s) >> 1 for s in np.random.SeedSequence(seed).generate_state(2, np.uint64))
    stream = functools.partial(
        SyntheticTokens,
        vocab_size=config.vocab_size,
        branching=config.branching,
        seq_len=config.max_seq_len,
        global_batch_size=config.global_batch_size,
        rank=rank,
        world_size=ranks,
        device=device,
    )
    return (
        stream(seed=train_seed, size_in_batches=config.simulated_size_in_batches),
        stream(seed=validation_seed, size_in_batches=config.validation_batches),
    )


def count_shards(config: Config, ranks: int, local_ranks: int) -> int:
    """The number of ranks over which each parameter is split."""
    return local_ranks if config.sharding == "hybrid" else ranks


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give the parameters that `module` itself owns memory on `device`, and their initial values."""
    if list(module.parameters(recurse=False)):
        module.to_empty(device=device, recurse=False)
        module.reset_parameters()  # type: ignore[operator]  # what a module that owns parameters must have


def shard(model: nn.Module, config: Config, device: torch.device, amp_dtype: torch.dtype | None) -> FSDP:
    """`model` under FSDP: weights, gradients and optimizer state split over the ranks, one unit gathered at a time."""
    # No module is wrapped, so parameters keep their names. Inside FSDP's units, recomputing needs no gather of its own.
    blocks = [module for module in model.modules() if isinstance(module, BLOCK)]
    if config.compile:
        # torch 2.3 compiles each block apart, and leaves uncompiled those beyond these limits. Its first compilation
        # must not be under bfloat16 autocast: this is it.
        torch._dynamo.config.cache_size_limit = torch._dynamo.config.accumulated_cache_size_limit = 8 + 4 * len(blocks)
        torch.compile(torch.neg)(torch.zeros((), device=device))
    for block in blocks:
        if config.activation_checkpointing:
            block.forward = functools.partial(  # type: ignore[method-assign]
                recompute_in_backward, block.forward, use_reentrant=False, preserve_rng_state=config.dropout > 0
            )
        if config.compile:  # around the recomputation: within it, torch 2.3 fails
            # With torch's own random numbers, so that dropout is the same as without compile.
            block.forward = torch.compile(block.forward, dynamic=False, options={"fallback_random": True})  # type: ignore[method-assign]

    # FSDP would untie a weight that two modules share, and leave a meta buffer as memory was; neither would be saved.
    lost = model.state_dict().keys() - dict(model.named_parameters()).keys()
    lost |= {name for name, buffer in model.named_buffers() if buffer.is_meta}
    if lost:
        raise RuntimeError(f"{', '.join(sorted(lost))}: tied weights or buffers; see Make it yours in the README")
    ranks = dist.get_world_size()
    shards = count_shards(config, ranks, int(os.environ["LOCAL_WORLD_SIZE"]))
    hybrid = shards < ranks
    # Without MixedPrecision, autocast would gather float32 and cast in each forward. Without autocast, MixedPrecision
    # would run every operation in low precision, the loss included. The shards that AdamW updates stay float32.
    precision = MixedPrecision(param_dtype=amp_dtype, reduce_dtype=reduction_dtype(config, amp_dtype))
    fsdp_model = FSDP(
        model,
        # Neighbouring ranks are on the same node: a hybrid mesh is (nodes, ranks of a node).
        device_mesh=init_device_mesh(device.type, (ranks // shards, shards) if hybrid else (ranks,)),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
        mixed_precision=precision if amp_dtype else None,
        auto_wrap_policy=ModuleWrapPolicy(set(UNITS)),
        param_init_fn=functools.partial(materialise, device=device),
        device_id=device,
        use_orig_params=True,
        forward_prefetch=True,
    )
    # A class that matches nothing would leave one big unit, gathered whole, and no error.
    found = [unit for unit in UNITS if any(isinstance(module, unit) for module in fsdp_model.modules())]
    if len(found) < len(UNITS):
        raise RuntimeError(f"UNITS = {UNITS}, but the model has only modules of {found}")
    return fsdp_model


def named_parameters(fsdp_model: FSDP) -> list[tuple[str, nn.Parameter]]:
    """This rank's stretch of each parameter, flat when sharded, under its name in the model."""
    return [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in fsdp_model.named_parameters()]


Layout = dict[str, tuple[int, torch.Size]]  # by parameter: where this rank's stretch of it starts, and its whole shape


def find_layout(fsdp_model: FSDP, config: Config) -> Layout:
    """Which stretch of each parameter this rank holds: those of a shard group's ranks follow each other. COLLECTIVE."""
    counts = {name: p.numel() for name, p in named_parameters(fsdp_model)}
    everywhere = [counts] * dist.get_world_size()
    dist.all_gather_object(everywhere, counts)  # COLLECTIVE
    rank, shards = dist.get_rank(), count_shards(config, dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
    layout = {}
    for name, p in build_model(config).named_parameters():
        held = [each[name] for each in everywhere[rank // shards * shards :][:shards]]
        if sum(held) != p.numel():
            raise RuntimeError(f"{name}: the ranks hold {sum(held)} of its {p.numel()} elements")
        layout[name] = (sum(held[: rank % shards]), p.shape)
    return layout


def build_optimizer(fsdp_model: FSDP, config: Config, fused: bool) -> torch.optim.Optimizer:
    """AdamW over the shards, with weight decay on matrices."""
    # From the whole model: a shard is flat.
    matrices = {name for name, p in build_model(config).named_parameters() if p.ndim >= 2}
    decayed = [p for name, p in named_parameters(fsdp_model) if name in matrices]
    others = [p for name, p in named_parameters(fsdp_model) if name not in matrices]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused or None)
    # A step with a rate and gradients of zero makes AdamW's state exist from the start: a run that does not fit in
    # memory fails at once, and a checkpoint has its full shape even if float16 has skipped every step so far.
    for p in decayed + others:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


def learning_rate(step: int, config: Config) -> float:
    """Rate of the optimizer step number `step` = 1..max_steps: linear warm-up to lr, then cosine to lr * min_lr_ratio.

    A pure function of the step, so that a resumed run has nothing to restore (Loshchilov & Hutter 2017, equation 5).
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass
class TrainState:
    """Everything that survives a restart."""

    model: FSDP
    optimizer: torch.optim.Optimizer
    scaler: ShardedGradScaler
    data: SyntheticTokens
    layout: Layout
    step: int = 0  # optimizer steps completed, skipped ones included
    skipped_steps: int = 0  # those whose float16 gradients overflowed


def build_state(config: Config, seed: int, device: torch.device, amp_dtype: torch.dtype | None) -> TrainState:
    """The state before the first step; the same weights on any number of ranks. COLLECTIVE."""
    torch.manual_seed(seed)  # the same on every rank: each draws all of a unit's initial values and keeps its shard
    fsdp_model = shard(build_model(config), config, device, amp_dtype)
    # Not enabled, it passes everything through, as it would always on CPU without device=.
    scaler = ShardedGradScaler(device=device.type, enabled=amp_dtype == torch.float16)
    # Fused AdamW is one kernel, on CPU from torch 2.4 on, but does not take ShardedGradScaler's overflow flag. Without,
    # torch chooses: on GPUs a few kernels for all parameters, which fused=False would prevent.
    fused = (device.type == "cuda" or torch.__version__ >= "2.4") and not scaler.is_enabled()
    data, _ = build_data(config, seed, dist.get_rank(), dist.get_world_size(), device)
    optimizer = build_optimizer(fsdp_model, config, fused)
    return TrainState(fsdp_model, optimizer, scaler, data, find_layout(fsdp_model, config))


# ---- Step, validation, report ----


def next_token_loss(model: nn.Module, tokens: Tensor, amp_dtype: torch.dtype | None) -> Tensor:
    """Mean cross-entropy of tokens (B, T + 1), each but the first given those before it; a float32 scalar."""
    # Without dtype= autocast would mean float16, on every GPU.
    with torch.autocast(tokens.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
        logits = model(tokens[:, :-1])  # (B, T, V)
        # CPU's autocast would leave this in low precision. The cast inside keeps no float32 copy of the logits.
        log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
        return F.nll_loss(log_probs.flatten(0, 1), tokens[:, 1:].flatten())


def clip_grad_norm(fsdp_model: FSDP, max_norm: float) -> Tensor:
    """Scale the gradients to an L2 norm over all shards of at most `max_norm`; returns what it was. COLLECTIVE.

    torch.nn.utils' would see this rank's shards only. That of FSDP in torch 2.3 adds up in the order of a set, which is
    another in each process: a resumed run would differ in the last bit.
    """
    grads = [p.grad for p in fsdp_model.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    total = torch.stack([torch.zeros((), device=fsdp_model.compute_device), *norms]).square().sum()
    # Over all ranks, not one shard group: groups that add up in different orders would let their replicas drift apart.
    dist.all_reduce(total)  # COLLECTIVE
    replicas = dist.get_world_size() // dist.get_world_size(fsdp_model.process_group)
    norm = (total / replicas).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for grad in grads:
        grad.mul_(factor)
    return norm


def train_step(
    state: TrainState, tokens: Tensor, config: Config, amp_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """One optimizer step on this rank's tokens. Returns its loss, of this rank, and gradient norm, of all. COLLECTIVE.

    Every micro-batch reduces its gradients: FSDP's no_sync() would save that traffic, but keep a whole float32 gradient
    on every rank. Nothing here waits for the device, but for the scaler's decision under float16.
    """
    micro_batches = tokens.split(config.micro_batch_size or len(tokens))
    loss_sum = torch.zeros((), device=tokens.device)
    for micro_batch in micro_batches:
        loss = next_token_loss(state.model, micro_batch, amp_dtype) / len(micro_batches)
        state.scaler.scale(loss).backward()
        loss_sum += loss.detach()
    # The order matters: the norm is that of unscaled gradients, and the scaler looks at them before they are clipped.
    state.scaler.unscale_(state.optimizer)
    grad_norm = clip_grad_norm(state.model, config.max_grad_norm)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()
    return loss_sum, grad_norm


@torch.no_grad()  # torch.inference_mode() would break FSDP's next training forward
def validate(model: FSDP, data: SyntheticTokens, config: Config, amp_dtype: torch.dtype | None) -> float:
    """Mean loss over the first batches of the validation data, the same ones every time. COLLECTIVE."""
    model.eval()
    data.load_state_dict({"position": 0})
    losses = []
    for _ in range(config.validation_batches):
        tokens = next(data)
        for micro_batch in tokens.split(config.micro_batch_size or len(tokens)):
            losses.append(next_token_loss(model, micro_batch, amp_dtype))
    model.train()
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss)  # COLLECTIVE; SUM and divide, for gloo has no AVG
    return loss.item() / dist.get_world_size()


def training_metrics(state: TrainState, sums: Tensor, steps: int, since: float, config: Config) -> dict[str, float]:
    """Means over all ranks and the last `steps` steps, the first of which began at `since`. COLLECTIVE.

    `sums` holds this rank's sums of loss, gradient norm and 1 over those of the steps that were not skipped.
    """
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if sums.is_cuda:
        memory = torch.cuda.max_memory_allocated()
    peak = torch.tensor(memory / 2**30, device=sums.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)  # COLLECTIVE
    dist.all_reduce(sums)  # COLLECTIVE
    loss, grad_norm, applied = (sums / dist.get_world_size()).tolist()  # waits for the device: time after it
    seconds = time.perf_counter() - since
    metrics = {"loss": loss / applied, "grad_norm": grad_norm / applied} if applied else {}
    metrics["lr"] = learning_rate(state.step, config)
    if state.scaler.is_enabled():
        state.skipped_steps += steps - round(applied)
        metrics |= {"loss_scale": state.scaler.get_scale(), "skipped_steps": state.skipped_steps}
    metrics["tokens_per_second"] = steps * config.global_batch_size * config.max_seq_len / seconds
    metrics["peak_memory_gib"] = peak.item()
    return metrics


# ---- Checkpoints ----
#
# FSDP flattens the parameters of a unit and gives each rank one stretch of them. torch's own state dicts gather every
# tensor, to cut it anew along its first dimension. Here each rank writes the stretch that it holds, as boxes of the
# tensors' true shapes: nothing moves between ranks, and torch.distributed.checkpoint reads it on any number of ranks.


def cut(flat: Tensor, start: int, shape: torch.Size) -> Iterator[tuple[list[int], Tensor]]:
    """Elements `start`, `start` + 1, ... of a row-major tensor of `shape`, as boxes of it. Yields offsets and view."""
    if len(shape) == 0:
        yield [], flat[0]
        return
    row = math.prod(shape[1:])
    while len(flat):
        if start % row == 0 and len(flat) >= row:
            taken = len(flat) // row * row
            yield [start // row] + [0] * (len(shape) - 1), flat[:taken].view(-1, *shape[1:])
        else:
            taken = min(row - start % row, len(flat))
            for offsets, box in cut(flat[:taken], start % row, shape[1:]):
                yield [start // row, *offsets], box[None]
        flat, start = flat[taken:], start + taken


Boxes = dict[MetadataIndex, tuple[ChunkStorageMetadata, Tensor, torch.Size]]  # place, view, shape of the whole tensor


def find_boxes(tensors: dict[str, Tensor], names: dict[str, Any], layout: Layout) -> Boxes:
    """The boxes of this rank's stretches, whose paths in the state dict are `names`; scalars are alike on all ranks."""
    boxes = {}
    for key, tensor in tensors.items():
        start, shape = layout[names[key][1]] if tensor.ndim else (0, tensor.shape)
        for offsets, box in cut(tensor.detach().view(-1), start, shape):
            place = ChunkStorageMetadata(torch.Size(offsets), box.shape)
            boxes[MetadataIndex(key, place.offsets)] = place, box, shape
    return boxes


class SummedFile(io.FileIO):
    """A file that knows the size and crc32 of what was written to it."""

    size = crc = 0

    def write(self, data: Any) -> int:
        written = super().write(data)
        if hasattr(os, "posix_fadvise"):  # Linux: let the disk begin, while the next part is summed and written
            os.posix_fadvise(self.fileno(), self.size, written, os.POSIX_FADV_DONTNEED)
        self.size += written
        self.crc = zlib.crc32(memoryview(data)[:written], self.crc)
        return written


class SummingFileSystem(FileSystem):
    """Where FileSystemWriter writes; `files` holds all of its files."""

    def __init__(self) -> None:
        self.files: dict[str, SummedFile] = {}

    def create_stream(self, path: Any, mode: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        file = self.files[Path(path).name.removesuffix(".tmp")] = SummedFile(path, mode)
        return io.BufferedWriter(file)


class SavePlanner(dcp.DefaultSavePlanner):
    """Writes each rank's boxes, of replicas one."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    def create_local_plan(self) -> dcp.SavePlan:
        self.boxes = find_boxes(self.state_dict, self.mappings, self.layout)
        items = []
        for index, (place, box, shape) in self.boxes.items():
            data = TensorWriteData(place, TensorProperties.create_from_tensor(box), shape)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = dcp.SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        # The same memory, as a tensor that looks whole: DCP would copy what is part of a larger storage.
        return torch.from_dlpack(self.boxes[index][1])


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Fills each rank's boxes, from whatever boxes were written. Raises ValueError for a tensor that does not fit."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    def create_local_plan(self) -> dcp.LoadPlan:
        self.boxes = find_boxes(self.state_dict, self.mappings, self.layout)
        written: dict[str, Any] = self.metadata.state_dict_metadata  # type: ignore[union-attr]
        items = []
        for index, (place, _, shape) in self.boxes.items():
            if index.fqn not in written or written[index.fqn].size != shape:
                raise ValueError(f"the checkpoint has no {index.fqn} of shape {list(shape)}")
            items += create_read_items_for_chunk_list(index.fqn, written[index.fqn], [place])
        return dcp.LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.boxes[index][1]


def tensors(state: TrainState) -> dict[str, Any]:
    """This rank's stretches of weights and optimizer state, by parameter. Loading writes into them."""
    named = named_parameters(state.model)
    # An empty stretch gets no gradient, so its step count stands still: it must not be saved as the parameter's.
    return {"model": dict(named), "optimizer": {name: state.optimizer.state[p] for name, p in named if p.numel()}}


def checksum(path: Path) -> int:
    """crc32 of a file: torch.distributed.checkpoint itself loads a flipped byte without a word."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(2**24):
            crc = zlib.crc32(chunk, crc)
    return crc


def save(core_context: core.Context, state: TrainState, config: Config, seed: int, trial_id: int | None) -> str:
    """Write a checkpoint, each rank its own file, and return its UUID. COLLECTIVE.

    train_state.json comes last: without it a checkpoint is half written. Determined's own metadata.json cannot say so:
    a sharded save does not upload it to cloud storage.
    """
    with core_context.checkpoint.store_path({"steps_completed": state.step}, shard=True) as (path, uuid):  # COLLECTIVE
        if hasattr(torch.serialization, "set_crc32_options"):  # from torch 2.6 on
            torch.serialization.set_crc32_options(False)  # of each tensor: nothing reads them
        writer = dcp.FileSystemWriter(path)
        writer.fs = file_system = SummingFileSystem()
        dcp.save(tensors(state), storage_writer=writer, planner=SavePlanner(state.layout))  # COLLECTIVE
        files = {name: [file.size, file.crc] for name, file in file_system.files.items()}
        everywhere = [files] * dist.get_world_size()
        dist.all_gather_object(everywhere, files)  # COLLECTIVE
        if dist.get_rank() == 0:
            train_state = {
                "format": CHECKPOINT_FORMAT,
                "torch": torch.__version__,
                "trial_id": trial_id,
                "steps_completed": state.step,
                "skipped_steps": state.skipped_steps,
                "data": state.data.state_dict(),
                "scaler": state.scaler.state_dict(),
                "hyperparameters": asdict(config) | {"seed": seed},
                "files": {name: entry for files in everywhere for name, entry in files.items()},
            }
            crc = zlib.crc32(json.dumps(train_state).encode())
            partial = path / "train_state.json.partial"
            partial.write_text(json.dumps({"crc32": crc, "train_state": train_state}))
            partial.rename(path / "train_state.json")
    return uuid


def read_train_state(path: Path) -> dict[str, Any]:
    """The content of train_state.json in a checkpoint. Raises ValueError if the checkpoint is not whole."""
    try:
        document = json.loads((path / "train_state.json").read_text())
        train_state = document["train_state"]
        intact = zlib.crc32(json.dumps(train_state).encode()) == document["crc32"]
    except FileNotFoundError:
        raise ValueError("train_state.json is missing: the checkpoint was not written to its end") from None
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise ValueError(f"train_state.json cannot be read: {problem!r}") from None
    if not intact:
        raise ValueError("train_state.json was changed after it was written")
    if train_state["format"] != CHECKPOINT_FORMAT:
        raise ValueError(f"train_state.json has format {train_state['format']}, this script reads {CHECKPOINT_FORMAT}")
    for name, (size, _) in train_state["files"].items():
        found = (path / name).stat().st_size if (path / name).is_file() else "no file"
        if found != size:
            raise ValueError(f"{name} was written with {size} bytes, but there is {found}")
    return train_state


def check(saved: dict[str, Any], path: Path, config: Config) -> None:
    """Raises ValueError if the checkpoint in `path` must not be loaded. Each rank checks some of its node's files."""
    then, now = saved["hyperparameters"], asdict(config)
    if other := [f"{k} = {then.get(k)}, but here {k} = {now[k]}" for k in SHAPE if then.get(k) != now[k]]:
        raise ValueError(f"is of another model: {'; '.join(other)}")
    here, there = ([int(n) for n in version.split(".")[:2]] for version in (torch.__version__, saved["torch"]))
    if here < there:
        raise ValueError(f"was written by torch {saved['torch']}, which {torch.__version__} cannot read: use the newer")
    for name in sorted(saved["files"])[int(os.environ["LOCAL_RANK"]) :: int(os.environ["LOCAL_WORLD_SIZE"])]:
        if checksum(path / name) != saved["files"][name][1]:
            raise ValueError(f"{name} was changed after it was written")


def load(
    core_context: core.Context, uuid: str, state: TrainState, config: Config, seed: int, trial_id: int | None
) -> None:
    """Bring `state` to where it was saved, by any number of ranks. COLLECTIVE.

    If another trial saved it (a fork, a warm start), only the weights are loaded. Ends the job if the checkpoint is not
    whole, was changed, or is of another model.
    """
    problem, saved, same_trial = None, {}, False
    with core_context.checkpoint.restore_path(uuid) as path:  # COLLECTIVE
        try:
            saved = read_train_state(path)
            check(saved, path, config)
        except ValueError as error:
            problem = str(error)
        problems = [problem] * dist.get_world_size()
        dist.all_gather_object(problems, problem)  # COLLECTIVE: all ranks load, or none
        if not any(problems):
            # On a cluster a fork comes in the same way as a pause; a local run goes on because the user said so.
            same_trial = trial_id is None or saved["trial_id"] == trial_id
            wanted = tensors(state) if same_trial else {"model": tensors(state)["model"]}
            dcp.load(wanted, checkpoint_id=path, planner=LoadPlanner(state.layout))  # COLLECTIVE
    if any(problems):
        stop(f"checkpoint {uuid}: {next(filter(None, problems))}")
    if not same_trial:
        origin = f"checkpoint {uuid} of trial {saved['trial_id']}"
        log.info("weights from %s; this is trial %s, so it starts at step 0", origin, trial_id)
        return
    state.step, state.skipped_steps = saved["steps_completed"], saved["skipped_steps"]
    state.data.load_state_dict(saved["data"])
    if saved["scaler"]:
        state.scaler.load_state_dict(saved["scaler"])
    then, now = saved["hyperparameters"], asdict(config) | {"seed": seed}
    changed = [f"{name} was {then[name]}, is {now.get(name)}" for name in then if then[name] != now.get(name)]
    changes = ", ".join(changed) or "nothing"
    log.info("going on from checkpoint %s at step %d; changed since: %s", uuid, state.step, changes)


def find_checkpoint(resume: str, directory: Path) -> str:
    """The UUID that --resume means: itself, or for `latest` that of the whole checkpoint with the most steps."""
    if resume != "latest":
        if resume not in {path.name for path in directory.glob("*")}:
            stop(f"--resume {resume}: there is no such checkpoint in {directory}")
        return resume
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        try:
            found.append((read_train_state(path)["steps_completed"], path.stat().st_mtime, path.name))
        except ValueError as problem:
            log.warning("skipping checkpoint %s: %s", path, problem)
    if not found:
        stop(f"--resume latest: there is no whole checkpoint in {directory}; start without --resume")
    return max(found)[2]


# ---- The run ----


def describe(config: Config, seed: int, ranks: int, local_ranks: int, amp_dtype: torch.dtype | None, why: str) -> str:
    """The banner: what `ranks` ranks, `local_ranks` of them on each node, will do and what it costs."""
    model = build_model(config)
    data, _ = build_data(config, seed, 0, ranks, torch.device("cpu"))
    with FlopCounterMode(display=False) as flops:
        tokens = torch.zeros((1, config.max_seq_len), dtype=torch.long, device=next(model.parameters()).device)
        model(tokens).sum().backward()
    n = sum(p.numel() for p in model.parameters())
    shards = count_shards(config, ranks, local_ranks)
    replicas = ranks // shards
    rows = config.global_batch_size // ranks
    micro_batches = rows // (config.micro_batch_size or rows)
    step_tokens = config.global_batch_size * config.max_seq_len
    dtype, reduce_dtype = amp_dtype or torch.float32, reduction_dtype(config, amp_dtype)
    # A rank receives what it lacks for each micro-batch: of the parameters twice, of the gradients to sum up once; with
    # replicas also their sums of its shard, there and back.
    traffic = n * (2 * dtype.itemsize + reduce_dtype.itemsize) * (shards - 1) / shards
    traffic += 2 * n / shards * reduce_dtype.itemsize * (replicas - 1) / replicas

    def size(count: float) -> str:
        power = min(int(math.log10(max(count, 1)) / 3), 4)
        return f"{count / 1000**power:.4g} {['', 'k', 'M', 'G', 'T'][power]}B"

    held = 4 * n / shards
    lines = {
        "model": f"{n:,} parameters: {config.n_layers} blocks of width {config.d_model}, {config.n_heads} heads",
        "ranks": f"{ranks}: {ranks // local_ranks} node(s) x {local_ranks}; {replicas} replica(s) x {shards} shard(s)",
        "precision": f"{amp_dtype or 'float32'} ({why}); parameters and autocast {dtype}, reduction {reduce_dtype}, "
        f"master weights and Adam torch.float32, loss scaler {'on' if amp_dtype == torch.float16 else 'off'}",
        "step": f"{config.global_batch_size} sequences x {config.max_seq_len} = {step_tokens:,} tokens; each rank "
        f"{micro_batches} micro-batch(es) of {rows // micro_batches} sequences; "
        f"{flops.get_total_flops() * config.global_batch_size:.3g} FLOPs",
        "run": f"{config.max_steps:,} steps, {config.max_steps * step_tokens:,} tokens; seed {seed}",
        "periods": f"report every {config.reporting_period}, validation every {config.validation_period}, "
        f"checkpoint every {config.checkpoint_period} steps",
        "memory": f"{size(4 * held)} a rank: weights {size(held)}, gradients {size(held)}, Adam {size(2 * held)}; "
        "gathered units and activations on top",
        "traffic": f"{size(micro_batches * traffic)} received a rank and step",
        "checkpoint": size(12 * n),
        "loss": f"starts near ln({config.vocab_size}) = {math.log(config.vocab_size):.3f}; "
        f"floor of the validation loss {data.entropy:.3f}, the entropy of the data",
    }
    return "\n".join(f"  {name:11}{text}" for name, text in lines.items()).replace("torch.", "")


def trace_steps(core_context: core.Context, config: Config) -> AbstractContextManager[Any]:
    """torch's profiler over steps 3 to 5 of this run, or nothing; wants its step() called after each step."""
    if not config.torch_profiler:
        return nullcontext()
    folder = core_context.train.get_tensorboard_path() or Path("traces")  # off-cluster it is None
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank{dist.get_rank()}"),
    )


def train(
    core_context: core.Context,
    config: Config,
    seed: int,
    device: torch.device,
    trial_id: int | None = None,
    checkpoint: str | None = None,
) -> None:
    """Train to max_steps or preemption, from the start or from `checkpoint`. COLLECTIVE."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    amp_dtype, why = agree_on_amp_dtype(config, device)
    banner = describe(config, seed, ranks, int(os.environ["LOCAL_WORLD_SIZE"]), amp_dtype, why)
    log.info("this run:\n%s", banner)
    state = build_state(config, seed, device, amp_dtype)
    _, validation_data = build_data(config, seed, rank, ranks, device)
    if checkpoint:
        load(core_context, checkpoint, state, config, seed, trial_id)
    if state.step >= config.max_steps:
        log.info("nothing left to do at step %d of %d; to go on, raise max_steps", state.step, config.max_steps)
        return
    # Let each report return when the master has it. Determined 0.38.1 sends metrics from a thread, some time later: if
    # that fails, the checkpoint of the same step may be known already, and no run would report those metrics again.
    if shipper := getattr(core_context._metrics, "_shipper", None):  # none off-cluster
        shipper.publish_metrics = shipper._post_metrics
    if config.core_api_profiler:
        core_context.profiler.on()

    signal.alarm(0)
    sums = torch.zeros(3, device=device)  # of loss, gradient norm and 1, since the last report
    first_step = reported_step = state.step
    start = reported_at = time.perf_counter()
    # None hides it where there is no terminal.
    bar = tqdm(initial=first_step, total=config.max_steps, unit="step", disable=True if rank else None)
    with trace_steps(core_context, config) as trace, logging_redirect_tqdm(), bar:
        for step in range(first_step + 1, config.max_steps + 1):
            is_last = step == config.max_steps
            # Each implies the next, so what is saved was just found finite, and no mean is half summed up.
            checkpoint_due = is_last or step % config.checkpoint_period == 0
            validation_due = checkpoint_due or step % config.validation_period == 0
            report_due = validation_due or step % config.reporting_period == 0

            # Dropout follows from seed, step and rank: there is no generator to save.
            torch.manual_seed(int(np.random.SeedSequence((seed, step, rank)).generate_state(1)[0]))
            for group in state.optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            loss, grad_norm = train_step(state, next(state.data), config, amp_dtype)
            state.step = step
            # The scaler has skipped exactly the steps whose norm is not finite; without it such a norm must show.
            skipped = ~grad_norm.isfinite() & state.scaler.is_enabled()
            sums += torch.stack((loss, grad_norm, torch.ones_like(loss))).masked_fill(skipped, 0)
            bar.update()
            if trace:
                trace.step()
            if not report_due:
                continue

            signal.alarm(round(PATIENCE.total_seconds()))
            metrics = training_metrics(state, sums, step - reported_step, reported_at, config)
            # All ranks hold the same numbers, so all go the same way. At a scale below 1, float16 overflows for good.
            bad = [f"{k} = {v:g}" for k, v in metrics.items() if not math.isfinite(v) or (k == "loss_scale" and v < 1)]
            if bad:
                stop(
                    f"training is not finite in steps {reported_step + 1}..{step}: {', '.join(bad)}. Nothing was saved "
                    "from them: resume or start again with a lower lr, a longer warm-up or amp_dtype = null"
                )
            seconds = (time.perf_counter() - start) / (step - first_step) * (config.max_steps - step)
            text = " | ".join(f"{name} {value:.5g}" for name, value in metrics.items())
            log.info("step %d/%d | %s | ETA %s", step, config.max_steps, text, timedelta(seconds=round(seconds)))
            if validation_due:
                validation_loss = validate(state.model, validation_data, config, amp_dtype)
                if not math.isfinite(validation_loss):
                    stop(f"validation_loss = {validation_loss} is not finite at step {step}. Nothing was saved from it")
                log.info("step %d/%d | validation_loss %.5g", step, config.max_steps, validation_loss)
            # While rank 0 waits for the master, the others wait in the Core API, where they have PATIENCE, not TIMEOUT.
            if rank == 0:
                core_context.train.report_training_metrics(step, metrics)
                core_context.train.report_progress(step / config.max_steps)
                if validation_due:  # `batches` is what a search can measure time in
                    report = {"validation_loss": validation_loss, "batches": step}
                    core_context.train.report_validation_metrics(step, report)
            if checkpoint_due:
                checkpoint = save(core_context, state, config, seed, trial_id)
                log.info("step %d/%d | checkpoint %s", step, config.max_steps, checkpoint)
            # As late as can be, since a yes is acknowledged at once; not on the last step, which is an end of its own.
            if not is_last and core_context.preempt.should_preempt():  # COLLECTIVE
                if not checkpoint_due:
                    checkpoint = save(core_context, state, config, seed, trial_id)
                log.info("preempted at step %d; to be resumed from checkpoint %s", step, checkpoint)
                return
            signal.alarm(0)
            sums.zero_()
            reported_step, reported_at = step, time.perf_counter()
    text = f"loss {metrics['loss']:.4f}, " if "loss" in metrics else ""
    log.info("done: %svalidation_loss %.4f, floor %.4f", text, validation_loss, validation_data.entropy)
    way = "--resume latest max_steps=N" if trial_id is None else "det experiment continue, with a higher max_steps"
    log.info("checkpoint %s; to go on from it: %s", checkpoint, way)


def connect(on_cluster: bool) -> core.DistributedContext:
    """Join the process group, and give the Core API its own channel between the ranks. COLLECTIVE."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
    if on_cluster:
        return core.DistributedContext.from_torch_distributed()
    # Off-cluster its two ports are fixed by default: a second job on the host would fail, or join the first.
    servers = [socket.create_server(("", 0)) for _ in range(2)]
    ports = [server.getsockname()[1] for server in servers]
    dist.broadcast_object_list(ports)  # COLLECTIVE
    for server in servers:
        server.close()
    variables = {"rank": "RANK", "size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_size": "LOCAL_WORLD_SIZE"}
    variables |= {"cross_rank": "GROUP_RANK", "cross_size": "GROUP_WORLD_SIZE"}
    place = {name: int(os.environ[variable]) for name, variable in variables.items()}
    chief = os.environ["MASTER_ADDR"]
    return core.DistributedContext(**place, chief_ip=chief, pub_port=ports[0], pull_port=ports[1])  # type: ignore[arg-type]


# ---- Start and end ----


def stop(message: str) -> NoReturn:
    """End the job with one message and exit code 1; all ranks call it."""
    if os.environ["RANK"] == "0":
        print(f"\nfsdp_train.py: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(5)  # the launcher kills all ranks as soon as one is gone: let rank 0 speak
    sys.exit(1)


def exit_on_signal(signum: int, _: Any) -> None:
    """Exit at once: a half-written checkpoint is never resumed from, so there is nothing to tidy up."""
    if os.environ["RANK"] == "0" or signum == signal.SIGALRM:  # which takes all ranks, whichever is first
        cause = f" after {PATIENCE} of waiting: does the master answer?" if signum == signal.SIGALRM else ""
        os.write(2, f"\nfsdp_train.py: ended by {signal.Signals(signum).name}{cause}\n".encode())
    os._exit(128 + signum)


@record
def main() -> None:
    if "RANK" not in os.environ:  # not under torchrun: a world of one
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT"), "0")
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    rank, ranks, local_ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    info = det.get_cluster_info()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, exit_on_signal)
    signal.signal(signal.SIGALRM, exit_on_signal if info else signal.SIG_IGN)  # locally there is no master to wait for
    signal.alarm(round(PATIENCE.total_seconds()))
    logging.basicConfig(level=logging.ERROR if rank else logging.INFO, format=det.LOG_FORMAT)
    logging.getLogger("determined").setLevel(logging.WARNING)
    logging.getLogger("determined.common.storage").setLevel(logging.ERROR)  # warns at every restore
    warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # as it should, in a world of one
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # inside torch 2.3's checkpoints
    args = argparse.Namespace(dry_run=False, resume=None, checkpoint_dir=None)
    try:
        if info:
            if len(sys.argv) > 1:
                raise ConfigError(f"arguments {sys.argv[1:]}: on a cluster, write them as hyperparameters")
            hparams, seed = info.trial.hparams, info.trial.trial_seed
        else:
            args = parse_arguments()
            hparams, seed, slots = read_experiment(args)
            if args.dry_run:
                ranks = slots
                local_ranks = max(n for n in range(1, 9) if ranks % n == 0)
        config = parse_config(hparams, ranks, local_ranks)
    except ConfigError as problem:
        stop(str(problem))
    except det.InvalidHP as problem:
        if not info:
            stop(str(problem))
        log.warning("%s", problem)  # rank 0 only
        with core.init(distributed=core.DistributedContext.from_torch_distributed()):
            raise  # the master wants to hear of it from every rank
    if args.dry_run:
        if rank == 0:
            choice = choose_amp_dtype(config.amp_dtype, "cuda", (8, 0), "GPUs assumed")
            print(describe(config, seed, ranks, local_ranks, *choice))
        return
    checkpoint = info.latest_checkpoint if info else None
    if args.resume is not None:
        checkpoint = find_checkpoint(args.resume, args.checkpoint_dir)

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    storage = None if info else str(args.checkpoint_dir)  # on a cluster the experiment's
    with core.init(distributed=connect(bool(info)), checkpoint_storage=storage) as core_context:
        try:
            train(core_context, config, seed, device, info.trial.trial_id if info else None, checkpoint)
        except det.InvalidHP as problem:
            if not info:
                stop(str(problem))
            log.warning("%s", problem)  # rank 0 only
            raise
        finally:
            signal.alarm(round(PATIENCE.total_seconds()))
    dist.destroy_process_group()  # only after success: it would hide an error, or wait for a rank that is gone


if __name__ == "__main__":
    exit_code: Any = 1
    try:
        main()
        exit_code = 0
    except SystemExit as end:
        exit_code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit(): threads of gloo and autograd sometimes abort a finished process in the interpreter's shutdown.
    os._exit(exit_code)
