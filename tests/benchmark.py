"""Measure the script against what the machine can do: one table of ratios, each beside its bar.

    python tests/benchmark.py [--only NAME ...] [--rounds X] [--json FILE]

Nothing is compared with a number from another run. The two sides of a ratio are timed in turn in the same processes, so
that whatever else the machine does weighs on both; a ratio is the median over the rounds, with the quartiles behind it.
The script's own functions are what is measured. All cores are used: each rank has its share of them.

A step of B sequences of T tokens counts as 6 B T P + 6 B T^2 C L floating-point operations: P parameters that multiply
(the embeddings only look up), and the causal half of attention over L blocks of width C. Backward counts twice forward.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from determined import core
from determined.common.util import yaml_safe_load
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent.parent))

from launch import ROOT, on_ranks

import fsdp_train

IMPORTED = time.time()
SEED = 1
CUDA = torch.cuda.is_available()
CORES = len(os.sched_getaffinity(0))
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if CUDA else torch.device("cpu")
DTYPES = {"fp32": None, "bf16": "bfloat16"} | ({"fp16": "float16"} if CUDA else {})
Seconds = dict[str, list[float]]  # of each thing, in each round

SHIPPED = yaml_safe_load((ROOT / "config.yaml").read_text())["hyperparameters"]
# No report, validation or checkpoint falls due; a step of MEDIUM takes some tenths of a second, one of SMALL a tenth.
ENDLESS = dict.fromkeys(("max_steps", "reporting_period", "validation_period", "checkpoint_period"), 10**6)
MEDIUM = {"global_batch_size": 8, "max_seq_len": 256, "vocab_size": 2048, "d_model": 512, "n_heads": 8, "n_layers": 4}
SMALL = {"global_batch_size": 8, "max_seq_len": 128, "vocab_size": 1024, "d_model": 256, "n_heads": 4, "n_layers": 4}
if CUDA:
    MEDIUM |= {"global_batch_size": 16, "max_seq_len": 1024, "vocab_size": 32768, "d_model": 2048, "n_heads": 16}
    SMALL |= {"global_batch_size": 16, "max_seq_len": 512, "vocab_size": 16384, "d_model": 1024}
# 25 million parameters: a checkpoint of 300 MB.
LARGE = {"global_batch_size": 2, "max_seq_len": 64, "vocab_size": 4096, "d_model": 512, "n_heads": 8, "n_layers": 7}


@dataclass
class Row:
    what: str
    values: list[float]  # one for each round
    low: float = -math.inf
    high: float = math.inf
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def cells(self) -> list[str]:
        """What, measured, bar, verdict, note."""
        measured = f"{self.median:.4g}"
        if len(self.values) > 1:
            first, _, third = statistics.quantiles(self.values, n=4, method="inclusive")
            measured += f" ({first:.4g} to {third:.4g})"
        bar = " and ".join(
            [f">= {self.low:.4g}"] * (self.low > -math.inf) + [f"<= {self.high:.4g}"] * (self.high < math.inf)
        )
        verdict = ("pass" if self.low <= self.median <= self.high else "MISS") if bar else ""
        return [self.what, measured, bar, verdict, self.note]


# ---- Tools ----


def prepare(ranks: int, **hparams: Any) -> tuple[fsdp_train.Config, torch.dtype | None]:
    """The Config and amp dtype of an endless run, and this rank's share of the cores."""
    torch.set_num_threads(max(1, CORES // ranks))
    if CUDA:
        torch.cuda.set_device(DEVICE)
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    config = fsdp_train.parse_config(SHIPPED | ENDLESS | hparams, ranks, local_ranks)
    return config, fsdp_train.agree_on_amp_dtype(config, DEVICE)[0]


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def in_turn(actions: dict[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> Seconds:
    """Seconds of each action in each round; all ranks start each together. COLLECTIVE."""
    seconds: Seconds = {name: [] for name in actions}
    for number in range(-warmup, rounds):
        for name in list(actions)[:: -1 if number % 2 else 1]:
            dist.barrier()
            start = now()
            actions[name]()
            if number >= 0:
                seconds[name].append(now() - start)
    return seconds


def over(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def milliseconds(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.4g} ms"


def stepper(config: fsdp_train.Config, amp_dtype: torch.dtype | None) -> Callable[[], None]:
    """A new state's next step, with the script's own functions."""
    state = fsdp_train.build_state(config, SEED, DEVICE, amp_dtype)

    def step() -> None:
        fsdp_train.train_step(state, next(state.data), config, amp_dtype)

    return step


def count_flops(config: fsdp_train.Config) -> float:
    """Floating-point operations of a step, as the head of this file says."""
    model = fsdp_train.build_model(config)
    multiplying = sum(p.numel() for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters())
    tokens = config.global_batch_size * config.max_seq_len
    return 6 * tokens * (multiplying + config.max_seq_len * config.d_model * config.n_layers)


def banner_bytes(config: fsdp_train.Config, amp_dtype: torch.dtype | None, line: str) -> float:
    """The first size in a line of the run's banner."""
    banner = fsdp_train.describe(
        config, SEED, dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]), amp_dtype, ""
    )
    match = re.search(rf"^ *{line} +([\d.]+) ?([kMGT]?)B", banner, re.MULTILINE)
    assert match, banner
    return float(match[1]) * 1000 ** " kMGT".index(match[2] or " ")


def loopback_bytes() -> int:
    """Bytes received so far over the interface through which gloo's ranks on one host talk."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def loopback_bytes_of(action: Callable[[], Any], times: int) -> float:
    """Bytes over the loopback interface in each of `times` calls of `action`, of all ranks together. COLLECTIVE."""
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    for _ in range(times):
        action()
    dist.barrier()
    return (loopback_bytes() - before) / times


# By what torch.distributed calls them, what a rank receives at least, in bytes.
COLLECTIVES: dict[str, Callable[..., float]] = {
    "all_gather": lambda outputs, part: (len(outputs) - 1) * part.nbytes,
    "all_gather_into_tensor": lambda whole, part: whole.nbytes - part.nbytes,
    "all_gather_single": lambda whole, part: whole.nbytes - part.nbytes,
    "reduce_scatter_tensor": lambda part, whole: whole.nbytes - part.nbytes,
    "reduce_scatter_single": lambda part, whole: whole.nbytes - part.nbytes,
    "all_reduce": lambda tensor, *_: 2 * tensor.nbytes * (1 - 1 / dist.get_world_size()),
}


@contextmanager
def collectives_replaced(by: Callable[..., Any]) -> Iterator[None]:
    """FSDP calls `by(name, original, *arguments)` in place of each collective."""
    with ExitStack() as stack:
        for name in COLLECTIVES:
            if original := getattr(dist, name, None):  # no torch has all of them
                stack.enter_context(mock.patch.object(dist, name, partial(by, name, original)))
        yield


# ---- What is measured ----


def overhead(core_context: core.Context, hparams: dict[str, Any], rounds: int) -> list[Row]:
    """The body of train()'s loop against bare steps with and without FSDP, one process."""
    config, amp_dtype = prepare(1, **hparams)
    tokens = next(fsdp_train.build_data(config, SEED, 0, 1, DEVICE)[0])
    stream = fsdp_train.build_data(config, SEED, 0, 1, DEVICE)[0]
    seconds: Seconds = defaultdict(list)
    actions: dict[str, Callable[[], Any]] = {"data": lambda: next(stream)}

    def bare(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], Tensor]) -> None:
        fsdp_train.next_token_loss(model, tokens, amp_dtype).backward()
        clip(config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    def build_state(*arguments: Any) -> fsdp_train.TrainState:
        state = original(*arguments)
        actions["bare"] = partial(bare, state.model, state.optimizer, state.model.clip_grad_norm_)
        plain = fsdp_train.build_model(config)
        for module in plain.modules():
            fsdp_train.materialise(module, DEVICE)
        optimizer = fsdp_train.build_optimizer(plain, config, state.optimizer.defaults["fused"])  # type: ignore[arg-type]
        actions["plain"] = partial(bare, plain, optimizer, partial(nn.utils.clip_grad_norm_, plain.parameters()))
        return state

    class Enough(Exception):
        pass

    class Turns:
        """In place of the profiler, which train() tells of the end of each step: time it, and the others after it."""

        start = 0.0

        def step(self) -> None:
            seconds["script"].append(now() - self.start)
            # There and back, so that each finds the caches as warm as the others do.
            for name in list(actions)[:: -1 if len(seconds["script"]) % 2 else 1]:
                start = now()
                actions[name]()
                seconds[name].append(now() - start)
            if len(seconds["script"]) == rounds + 3:
                raise Enough
            self.start = now()

    original = fsdp_train.build_state
    with (
        mock.patch.object(fsdp_train, "build_state", build_state),
        mock.patch.object(fsdp_train, "trace_steps", lambda *_: nullcontext(Turns())),
        suppress(Enough),
    ):
        fsdp_train.train(core_context, config, SEED, DEVICE)
    warm = {name: values[3:] for name, values in seconds.items()}
    label = f"d_model {config.d_model}, {'bf16' if amp_dtype else 'fp32'}"
    return [
        Row(
            f"train()'s step / bare loop, same FSDP model ({label})",
            over(warm["script"], warm["bare"]),
            high=1.02,
            note=milliseconds(warm["script"]),
        ),
        Row(f"train()'s step / model without FSDP ({label})", over(warm["script"], warm["plain"]), high=1.05),
        Row(
            f"drawing data / train()'s step ({label})",
            over(warm["data"], warm["script"]),
            high=0.01,
            note=milliseconds(warm["data"]),
        ),
    ]


def matmul_peak(dtype: torch.dtype, config: fsdp_train.Config) -> Callable[[], float]:
    """A function that measures the best rate, in FLOP/s, of large square products and of the model's own."""
    tokens, width = config.global_batch_size * config.max_seq_len, config.d_model
    shapes = [(n, n, n) for n in (1024, 2048, 3072, *([8192] * CUDA))]
    shapes += [(tokens, width, 3 * width), (tokens, width, 4 * width), (tokens, 4 * width, width)]
    shapes += [(tokens, width, config.vocab_size)]
    operands = []
    for rows, inner, columns in shapes:
        sides = torch.randn(rows, inner), torch.randn(columns, inner)
        operands.append([t.to(DEVICE, dtype) for t in sides] + [torch.empty(rows, columns, device=DEVICE, dtype=dtype)])

    def measure() -> float:
        rates = []
        for a, b, out in operands:
            start = now()
            torch.mm(a, b.T, out=out)
            rates.append(2 * a.numel() * len(b) / (now() - start))
        return max(rates)

    return measure


def fixed_share(step: Callable[[], None]) -> float:
    """The share of a step's time that goes into matrix products and attention, which compile leaves as they are."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    spent = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    fixed = sum(time for key, time in spent.items() if key == "aten::mm" or "scaled_dot_product" in key)
    return fixed / sum(spent.values())


def speed(_: core.Context, rounds: int) -> list[Row]:
    """Steps in each precision, eager and compiled, against matrix products and each other, one process."""
    actions: dict[str, Callable[[], Any]] = {}
    rates: Seconds = defaultdict(list)
    memory: dict[str, float] = {}

    def add(key: str, hparams: dict[str, Any]) -> fsdp_train.Config:
        config, amp_dtype = prepare(1, **hparams)
        actions[key] = stepper(config, amp_dtype)
        if CUDA:
            actions[key]()
            torch.cuda.reset_peak_memory_stats()
            actions[key]()
            memory[key] = torch.cuda.max_memory_allocated() / 2**30
        return config

    for name, amp in DTYPES.items():
        config = add(name, MEDIUM | {"amp_dtype": amp})
        add(f"{name} compiled", MEDIUM | {"amp_dtype": amp, "compile": True})
        peak = matmul_peak(getattr(torch, amp or "float32"), config)
        actions[f"{name} peak"] = lambda name=name, peak=peak: rates[name].append(peak())  # type: ignore[misc]
    add("bf16 recomputed", MEDIUM | {"amp_dtype": "bfloat16", "activation_checkpointing": True})
    add("bf16 small", {"amp_dtype": "bfloat16"})
    add("bf16 small compiled", {"amp_dtype": "bfloat16", "compile": True})
    seconds = in_turn(actions, rounds, warmup=3)

    flops, tokens = count_flops(config), config.global_batch_size * config.max_seq_len
    bars = {"fp32": 0.70, "bf16": 0.35, "bf16 compiled": 0.50}
    rows = []
    for name in DTYPES:
        peaks = rates[name][-rounds:]
        for key in (name, f"{name} compiled"):
            note = f"{tokens / statistics.median(seconds[key]):,.0f} tokens/s; peak {max(peaks) / 1e9:,.0f} GFLOP/s"
            note += f"; {memory[key]:.3g} GiB, of all states at once" if CUDA else ""
            reached = over([flops / s for s in seconds[key]], peaks)
            rows.append(Row(f"FLOP/s / matrix products, {key}", reached, low=bars.get(key, -math.inf), note=note))
    for name in list(DTYPES)[1:]:
        rows.append(Row(f"speed-up of {name} over fp32", over(seconds["fp32"], seconds[name]), low=1.8))
    labels = dict(zip(DTYPES, DTYPES, strict=True)) | {"bf16 small": "bf16, config.yaml's shape"}
    for name, label in labels.items():
        low = -math.inf if name == "fp32" else 1.3
        rows.append(Row(f"speed-up of compile, {label}", over(seconds[name], seconds[f"{name} compiled"]), low=low))
    if not CUDA:
        for name, label in (("bf16", "bf16"), ("bf16 small", "bf16, config.yaml's shape")):
            shares = [fixed_share(actions[name]) for _ in range(5)]
            note = f"so compile can gain at most {1 / statistics.median(shares):.3f}"
            rows.append(Row(f"matrix products and attention / step, {label}", shares, note=note))
    note = "a third more FLOPs in the blocks"
    recomputed = over(seconds["bf16 recomputed"], seconds["bf16"])
    rows.append(Row("step with activation checkpointing / without, bf16", recomputed, note=note))
    return rows


def ranks(_: core.Context, amp: str | None, rounds: int) -> list[Row]:
    """A step of two ranks against its compute and the least that must be communicated."""
    config, amp_dtype = prepare(2, **MEDIUM, amp_dtype=amp)
    world = dist.get_world_size()
    step = stepper(config, amp_dtype)
    received, copying = [], []

    def count(name: str, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        received.append(COLLECTIVES[name](*arguments[:2]))
        return original(*arguments, **options)

    def stay(name: str, _: Any, output: Any, source: Any = None, *__: Any, **___: Any) -> None:
        """As much memory is written, and the numbers stay sane."""
        start = now()
        if "gather" in name:
            for part in output if isinstance(output, list) else output.chunk(world):
                part.copy_(source)
        elif "scatter" in name:
            output.copy_(source.chunk(world)[dist.get_rank()])
        copying.append(now() - start)

    def compute() -> None:
        with collectives_replaced(stay):
            step()

    gathered, reduced = amp_dtype or torch.float32, fsdp_train.reduction_dtype(config, amp_dtype)
    sizes = []
    for module in fsdp_train.build_model(config).modules():
        if isinstance(module, fsdp_train.UNITS):
            sizes.append(-(-sum(p.numel() for p in module.parameters()) // world))
    buffers = [
        [torch.ones(n * each, dtype=dtype, device=DEVICE) for dtype in (gathered, reduced) for each in (1, world)]
        for n in sizes
    ]

    def communicate() -> None:
        for part, whole, gradient, gradients in buffers:
            for _ in range(2):
                dist.all_gather(list(whole.chunk(world)), part)
            dist.reduce_scatter_tensor(gradient, gradients)

    seconds = in_turn({"step": step, "compute": compute, "communicate": communicate}, rounds)
    with collectives_replaced(count):
        step()
    bound = (world - 1) * sum(sizes) * (2 * gathered.itemsize + reduced.itemsize)
    least = [a + b for a, b in zip(seconds["compute"], seconds["communicate"], strict=True)]
    label = "bf16" if amp_dtype else "fp32"
    note = f"step {milliseconds(seconds['step'])}, compute {milliseconds(seconds['compute'])}"
    note += f", communication {milliseconds(seconds['communicate'])}"
    note += f"; copies in compute {1000 * sum(copying) / (rounds + 2):.3g} ms"
    reached, link = count_flops(config) / world / statistics.median(seconds["compute"]), bound / world
    note += (
        f"; {reached / 1e9:.3g} GFLOP/s and {link / statistics.median(seconds['communicate']) / 1e9:.3g} GB/s a rank"
    )
    told = banner_bytes(config, amp_dtype, "traffic")
    rows = [
        Row(f"bound / step of 2 ranks ({label})", over(least, seconds["step"]), low=0.95, note=note),
        Row(f"bytes received / bound, by calls ({label})", [sum(received) / bound], high=1.01),
        Row(f"bytes received / those that the banner tells ({label})", [sum(received) / told], low=0.98, high=1.02),
    ]
    if not CUDA:
        wire = [loopback_bytes_of(step, 2) / loopback_bytes_of(communicate, 2) for _ in range(3)]
        rows.append(Row(f"bytes on the wire / bound, by the interface ({label})", wire, high=1.01))
    return rows


def memory(_: core.Context, variants: dict[str, dict[str, Any]]) -> list[Row]:
    """What a rank holds between steps, by its live tensors, and at the peak of a step, by its allocator."""
    return [row for label, hparams in variants.items() for row in memory_of(label, hparams)]


def memory_of(label: str, hparams: dict[str, Any]) -> list[Row]:
    gc.collect()
    world = dist.get_world_size()
    if hparams.get("sharding") == "hybrid":
        os.environ["LOCAL_WORLD_SIZE"] = str(world // 2)  # as if on two nodes
    config, amp_dtype = prepare(world, **(SMALL | {"global_batch_size": 4 * world} | hparams))
    state = fsdp_train.build_state(config, SEED, DEVICE, amp_dtype)
    tokens = next(state.data)
    held: list[int] = []

    def clip(*arguments: Any) -> Tensor:
        held.append(live_bytes())  # all gradients are there, and no activation
        return original(*arguments)

    def step() -> None:
        fsdp_train.train_step(state, tokens, config, amp_dtype)

    original = fsdp_train.clip_grad_norm
    step()
    with mock.patch.object(fsdp_train, "clip_grad_norm", clip):
        step()
    peak = live_bytes() + peak_bytes_of(step)

    model = fsdp_train.build_model(config)
    shards = fsdp_train.count_shards(config, world, int(os.environ["LOCAL_WORLD_SIZE"]))
    share = 16 * sum(p.numel() for p in model.parameters()) / shards
    units = [sum(p.numel() for p in m.parameters()) for m in model.modules() if isinstance(m, fsdp_train.UNITS)]
    unit = max(units) * (amp_dtype or torch.float32).itemsize
    told = banner_bytes(config, amp_dtype, "memory")
    note = f"{(peak - held[0]) / 1e6:.3g} MB of {peak / 1e6:.3g} MB; activations included"
    return [
        Row(f"weights, gradients, Adam / 16 P ({label})", [held[0] / share], high=1.02),
        Row(f"the same / what the banner tells ({label})", [held[0] / told], low=0.98, high=1.02),
        Row(f"peak above that / largest unit ({label})", [(peak - held[0]) / unit], note=note),
    ]


def live_bytes() -> int:
    """Bytes of all storages that some tensor uses."""
    time.sleep(0.1)  # gloo's threads let go of their tensors a little later
    storages = {}
    for thing in gc.get_objects():
        with suppress(RuntimeError):  # what torch 2.3 has left of a tensor that such a thread freed
            if issubclass(type(thing), Tensor) and thing.device.type == DEVICE.type:
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class MallInfo(ctypes.Structure):
    """What glibc's mallinfo2() returns."""

    _fields_ = [(f"field{n}", ctypes.c_size_t) for n in range(10)]  # 4: in blocks of their own, 7: in all others


class Heap(TorchDispatchMode):
    """Notes the most bytes that are allocated after any operation of torch.

    torch's own profiler would not do: it misses what gloo's threads free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mallinfo = ctypes.CDLL(None).mallinfo2
        self.mallinfo.restype = MallInfo
        self.most = self.start = self.allocated()

    def allocated(self) -> int:
        info = self.mallinfo()
        return info.field4 + info.field7

    def __torch_dispatch__(self, function: Any, _: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        self.most = max(self.most, self.allocated())
        return result


def peak_bytes_of(action: Callable[[], Any]) -> int:
    """The most that `action` ever holds beyond what there was before it."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    with Heap() as heap:
        action()
    return heap.most - heap.start


def growth(_: core.Context, rounds: int) -> list[Row]:
    """How a step's time grows with each size of the model, one process."""
    factors = {"n_layers": (1, 2, 4), "d_model": (1, 2, 4), "max_seq_len": (1, 2, 4), "vocab_size": (1, 4, 16)}
    actions, flops = {}, {}
    for name, multiples in factors.items():
        for multiple in multiples:
            sizes = SMALL | {"n_layers": 2, "amp_dtype": None}
            config, amp_dtype = prepare(
                1, **(sizes | {name: SMALL[name] * multiple if name != "n_layers" else 2 * multiple})
            )
            actions[f"{name} {multiple}"], flops[f"{name} {multiple}"] = stepper(config, amp_dtype), count_flops(config)
    seconds = in_turn(actions, rounds)
    rows = []
    for name, multiples in factors.items():
        first, last = (f"{name} {multiple}" for multiple in (multiples[0], multiples[-1]))
        expected = math.log(flops[last] / flops[first], multiples[-1])
        measured = [math.log(ratio, multiples[-1]) for ratio in over(seconds[last], seconds[first])]
        note = f"FLOPs grow with exponent {expected:.3f}; " + ", ".join(
            milliseconds(seconds[f"{name} {multiple}"]) for multiple in multiples
        )
        rows.append(Row(f"exponent of step time in {name} (fp32)", measured, high=expected + 0.1, note=note))
    return rows


def checkpoint(core_context: core.Context, rounds: int) -> list[Row]:
    """Saving against writing as many bytes, and loading, by two ranks."""
    config, amp_dtype = prepare(2, **LARGE, amp_dtype=None)
    state = fsdp_train.build_state(config, SEED, DEVICE, amp_dtype)
    parameters = sum(p.numel() for p in fsdp_train.build_model(config).parameters())
    folder, rank = Path("checkpoints").resolve(), dist.get_rank()
    saved: list[str] = []
    summing: list[float] = []  # of each checksum
    checking: list[float] = []  # of those of each load together

    def save() -> None:
        saved.append(fsdp_train.save(core_context, state, config, SEED, None))

    def files() -> list[Path]:
        return sorted(file for file in (folder / saved[0]).iterdir() if file.is_file())

    def shards() -> list[Path]:
        return [file for file in files() if file.suffix == ".distcp"]

    save()
    noise = torch.randint(256, (shards()[rank].stat().st_size,), dtype=torch.uint8).numpy().tobytes()

    def write() -> None:
        with (folder / f"noise{rank}").open("wb") as file:
            file.write(noise)
            file.flush()
            os.fsync(file.fileno())
        dist.barrier()

    def tidy() -> None:
        """Leave neither side the other's dirty pages."""
        if rank == 0:
            for uuid in saved[1:]:
                shutil.rmtree(folder / uuid)
        del saved[1:]
        (folder / f"noise{rank}").unlink(missing_ok=True)
        os.sync()

    def timed_checksum(path: Path) -> int:
        start = now()
        crc = checksum(path)
        summing.append(now() - start)
        return crc

    def load() -> None:
        before = sum(summing)
        fsdp_train.load(core_context, saved[0], state, config, SEED, None)
        checking.append(sum(summing) - before)

    def read() -> None:
        for file in shards()[rank :: dist.get_world_size()]:
            file.read_bytes()
        dist.barrier()

    checksum = fsdp_train.checksum
    moved = loopback_bytes_of(save, 1)
    seconds = in_turn({"save": save, "tidy": tidy, "write": write, "tidy again": tidy}, rounds, warmup=1)
    with mock.patch.object(fsdp_train, "checksum", timed_checksum):
        seconds |= in_turn({"read": read, "load": load}, rounds, warmup=1)
    written = [file.stat().st_size for file in shards()]
    total = sum(file.stat().st_size for file in files())
    note = f"{total / 1e6:.0f} MB: {milliseconds(seconds['save'])}, {milliseconds(seconds['write'])}"
    rows = [
        Row(
            "saving / writing and fsync of as many bytes", over(seconds["save"], seconds["write"]), high=1.3, note=note
        ),
        Row("bytes on disk / 12 P", [total / (12 * parameters)], high=1.02),
        Row("largest shard / mean", [max(written) / statistics.mean(written)], high=1.02),
        Row(
            "loading / reading as many bytes",
            over(seconds["load"], seconds["read"]),
            note=f"{milliseconds(seconds['load'])}, {milliseconds(seconds['read'])}; from the page cache",
        ),
        Row("checksums / loading", over(checking[-rounds:], seconds["load"]), note=milliseconds(checking[-rounds:])),
    ]
    if not CUDA:
        note = f"{moved / 1e3:.0f} kB between ranks"
        rows.insert(1, Row("bytes moved in saving / 12 P", [moved / (12 * parameters)], high=0.01, note=note))
    return rows


def startup(core_context: core.Context, launched: float) -> dict[str, float]:
    """Where the time from the launcher's start to the first step goes, on this rank."""
    entered = time.time()
    process = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    born = entered - uptime + int(process[19]) / os.sysconf("SC_CLK_TCK")
    config, amp_dtype = prepare(2)
    fsdp_train.describe(config, SEED, 2, 2, amp_dtype, "")
    step = stepper(config, amp_dtype)
    built = time.time()
    step()
    return {
        "launcher": born - launched,
        "imports": IMPORTED - born,
        "rendezvous": entered - IMPORTED,
        "build": built - entered,
        "first step": time.time() - built,
    }


# ---- The table ----


def rows_of(name: str, folder: Path, share: float) -> list[Row]:
    """Launch what measures the rows of one name, with a `share` of the rounds."""

    def launch(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Row]:
        if CUDA and ranks > torch.cuda.device_count():
            return []
        return on_ranks(function, ranks, folder, *arguments, timeout=1200)[0]

    def rounds(full: int) -> int:
        return max(2, round(full * share))

    rows: list[Row] = []
    if name == "overhead":
        for amp in (None, "bfloat16"):
            rows += launch(overhead, 1, MEDIUM | {"amp_dtype": amp}, rounds(15))
            rows += launch(overhead, 1, {"amp_dtype": amp}, rounds(100))
    elif name == "speed":
        rows += launch(speed, 1, rounds(12))
    elif name == "ranks":
        for amp in (None, "bfloat16"):
            rows += launch(ranks, 2, amp, rounds(12))
    elif name == "memory":
        bf16 = {"amp_dtype": "auto"}
        rows += launch(memory, 1, {"1 rank, bf16": bf16})
        variants: dict[str, dict[str, Any]] = {
            "2 ranks, fp32": {"amp_dtype": None},
            "2 ranks, bf16": bf16,
            "2 ranks, bf16, few tokens": bf16 | {"global_batch_size": 2, "max_seq_len": 16},
            "2 ranks, bf16, activation checkpointing": bf16 | {"activation_checkpointing": True},
            "2 ranks, bf16, 4 micro-batches": bf16 | {"micro_batch_size": 1},
        }
        rows += launch(memory, 2, variants)
        hybrid = bf16 | {"sharding": "hybrid", "reduce_dtype": "float32", "activation_checkpointing": True}
        rows += launch(memory, 4, {"4 ranks, bf16": bf16, "2 x 2 ranks, hybrid, as distributed.yaml": hybrid})
    elif name == "growth":
        rows += launch(growth, 1, rounds(7))
    elif name == "checkpoint":
        rows += launch(checkpoint, 2, rounds(9))
    elif name == "startup":
        parts: Seconds = defaultdict(list)
        for _ in range(rounds(3) if not CUDA or torch.cuda.device_count() > 1 else 0):
            for part, value in on_ranks(startup, 2, folder, time.time())[0].items():
                parts[part].append(value)
        total = [sum(values) for values in zip(*parts.values(), strict=True)]
        for part, values in parts.items():
            note = f"{statistics.median(values):.2f} s of {statistics.median(total):.2f} s"
            rows.append(Row(f"{part} / start-up of 2 ranks", over(values, total), note=note))
    return rows


NAMES = ("overhead", "speed", "ranks", "memory", "growth", "checkpoint", "startup")


def machine() -> str:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    text = f"{cpu[1] if cpu else 'CPU'}, {CORES} cores, {torch.backends.cpu.get_cpu_capability()}"
    if CUDA:
        text = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}; {text}"
    return f"{text}; torch {torch.__version__}, Python {sys.version.split()[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too, with each round's value")
    parser.add_argument("--rounds", type=float, default=1, metavar="X", help="that many times as many rounds")
    args = parser.parse_args()
    rows: list[Row] = []
    start = time.time()
    for name in args.only:
        print(f"{time.time() - start:.0f} s: {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(name, Path(folder), args.rounds)
    head = ["ratio", "measured (quartiles)", "bar", "", "note"]
    table = [head, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    table.insert(1, ["-" * width for width in widths])
    print(f"{machine()}; took {time.time() - start:.0f} s\n")
    for line in table:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    # By its module's name, under which the ranks find its functions.
    importlib.import_module("benchmark").main()
