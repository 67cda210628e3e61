"""Training under FSDP: the same numbers however it is split, in the dtypes that it says, and an end when they fail."""

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import determined as det
import pytest
import torch
import torch.distributed as dist
from determined import core
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_train
from data import build_data
from launch import ROOT, SCRIPT, on_ranks, run, start, torchrun
from model import Block, Embedding, Head, Transformer
from tiny import overrides, tiny_config, tiny_run

CONFIG = ("--config", str(ROOT / "config.yaml"))

# ---- The same numbers, however it is split ----

STEPS = 12
# Reports each step, clips most and validates twice.
CURVE: dict[str, Any] = {"global_batch_size": 8, "max_steps": STEPS, "reporting_period": 1, "validation_period": 6}
CURVE |= {"checkpoint_period": STEPS, "warmup_steps": 4, "max_grad_norm": 0.75}

# By number of ranks: hyperparameters and ranks per node. Micro-batches of 3 divide nothing.
VARIANTS: dict[int, list[tuple[dict[str, Any], int]]] = {
    1: [*(({"micro_batch_size": size}, 1) for size in (None, 1, 3)), ({"activation_checkpointing": True}, 1)],
    2: [({"micro_batch_size": 3}, 2), ({"activation_checkpointing": True, "sharding": "hybrid"}, 2)],
    4: [
        ({"micro_batch_size": 1}, 4),
        ({"sharding": "hybrid"}, 2),
        ({"activation_checkpointing": True, "sharding": "hybrid", "micro_batch_size": 1}, 2),
    ],
}


def reports_of(core_context: core.Context, run: fsdp_train.Run) -> dict[str, list[dict[str, float]]]:
    """What `train` reports on this rank."""
    reports: dict[str, list[dict[str, float]]] = {"training": [], "validation": []}
    with (
        patch.object(core_context.train, "report_training_metrics", lambda _, m: reports["training"].append(m)),
        patch.object(core_context.train, "report_validation_metrics", lambda _, m: reports["validation"].append(m)),
    ):
        fsdp_train.train(core_context, run)
    return reports


def split(core_context: core.Context, variants: list[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """On each rank: what every variant reports, and how training starts."""
    ranks = dist.get_world_size()
    curves = [reports_of(core_context, tiny_run(ranks, local, **CURVE, **hparams)) for hparams, local in variants]

    # What FSDP gives a parameter in memory is not zero by luck.
    empty_like, poisoned = torch.empty_like, []

    def poison(*arguments: Any, **options: Any) -> Tensor:
        tensor = empty_like(*arguments, **options)
        if tensor.is_floating_point():
            poisoned.append(tensor.fill_(math.nan))
        return tensor

    torch.manual_seed(1000 + dist.get_rank())  # the ranks' generators differ before
    hparams, local = variants[-1]
    with patch.object(torch, "empty_like", poison):
        state = fsdp_train.build_state(tiny_run(ranks, local, **CURVE, **hparams))
    with FSDP.summon_full_params(state.model, writeback=False):
        weights = [p.detach().clone() for p in state.model.parameters()]
    return {
        "curves": curves,
        "poisoned": len(poisoned),
        "weights": weights,
        "units": sorted(type(unit.module).__name__ for unit in FSDP.fsdp_modules(state.model)),
        "held": sum(p.numel() for p in state.model.parameters()),
        "adam": sum(t.numel() for s in state.optimizer.state.values() for t in s.values() if t.ndim),
        "adam_steps": {float(s["step"]) for s in state.optimizer.state.values()},
        "decay": [group["weight_decay"] for group in state.optimizer.param_groups],
    }


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What `split` gives on each rank, by number of ranks."""
    return {n: on_ranks(split, n, tmp_path_factory.mktemp("split"), variants) for n, variants in VARIANTS.items()}


def plain_transformer() -> Transformer:
    torch.manual_seed(tiny_config().seed)
    return Transformer(vocab_size=32, max_seq_len=16, d_model=16, n_heads=2, n_layers=2)


def plain_loss(model: Transformer, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    """The numbers of a loop by hand over the same model: one process, no FSDP, no gradient accumulation."""
    config = tiny_config(**CURVE)
    model = plain_transformer()
    data = build_data(config, "training", 0, 1)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=False, foreach=False)
    numbers: dict[str, list[float]] = {"loss": [], "grad_norm": [], "lr": [], "validation_loss": []}
    for step in range(1, STEPS + 1):
        rate = 1e-2 * (step / 4 if step < 4 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / (STEPS - 4))) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = plain_loss(model, next(data))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.75)
        optimizer.step()
        optimizer.zero_grad()
        for name, value in (("loss", loss.item()), ("grad_norm", norm.item()), ("lr", rate)):
            numbers[name].append(value)
        if step % 6 == 0:
            validation = build_data(config, "validation", 0, 1)
            with torch.no_grad():
                losses = [plain_loss(model, next(validation)).item() for _ in range(2)]
            numbers["validation_loss"].append(sum(losses) / 2)
    assert min(numbers["grad_norm"]) < 0.75 < max(numbers["grad_norm"]), "some steps clip and some do not"
    assert numbers["loss"][0] - numbers["loss"][-1] > 0.2, "it learns enough for an error to show"
    return numbers


@pytest.mark.parametrize("ranks", VARIANTS)
def test_trains_like_the_plain_loop(
    splits: dict[int, list[dict[str, Any]]], plain: dict[str, list[float]], ranks: int
) -> None:
    for index, variant in enumerate(VARIANTS[ranks]):
        for rank in range(1, ranks):
            assert splits[ranks][rank]["curves"][index] == {"training": [], "validation": []}, "only rank 0 reports"
        reports = splits[ranks][0]["curves"][index]
        for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("lr", 1e-12)):
            measured = [m[name] for m in reports["training"]]
            assert measured == pytest.approx(plain[name], abs=tolerance), (variant, name)
        losses = [m["validation_loss"] for m in reports["validation"]]
        assert losses == pytest.approx(plain["validation_loss"], abs=1e-5), variant
        assert [m["batches"] for m in reports["validation"]] == [6, 12]
        assert all("loss_scale" not in m and "mfu" not in m for m in reports["training"])
        assert ["tokens_per_second" in m for m in reports["training"]] == [False] + [True] * (STEPS - 1), (
            "not of step 1"
        )
        assert all(m["peak_memory_gib"] > 0 for m in reports["training"])


@pytest.mark.parametrize("ranks", VARIANTS)
def test_starts_sharded_from_the_weights_of_the_plain_model(splits: dict[int, Any], ranks: int) -> None:
    """So all numbers of ranks start alike, and nothing is left as it was found in memory."""
    expected = list(plain_transformer().parameters())
    total = sum(p.numel() for p in expected)
    replicas = 2 if ranks == 4 else 1  # the last variant of 4 ranks is hybrid: 2 replicas of 2 shards
    for result in splits[ranks]:
        assert result["poisoned"] >= len(expected)
        assert all(torch.equal(p, q) for p, q in zip(result["weights"], expected, strict=True))
        assert result["units"] == ["Block", "Block", "Embedding", "Head", "Transformer"]
        assert result["held"] == pytest.approx(replicas * total / ranks, abs=8), "even, but for padding"
        assert result["adam"] == 2 * result["held"]
        assert result["adam_steps"] == {0.0}
        assert result["decay"] == [0.0, 0.1]
    assert sum(result["held"] for result in splits[ranks]) == replicas * total


# By ranks and ranks per node: settings and the tolerance of the losses. 10 blocks are more than torch 2.3 compiles by
# itself; float16 and dropout are another matter.
COMPILED: list[tuple[int, int, dict[str, Any], float]] = [
    (2, 2, {"n_layers": 10}, 1e-5),
    (2, 2, {"n_layers": 1, "amp_dtype": "bfloat16"}, 1e-3),
    (4, 2, {"n_layers": 1, "sharding": "hybrid"}, 1e-5),
]
WAYS = [{"activation_checkpointing": True}, {"compile": True}, {"activation_checkpointing": True, "compile": True}]


def losses_of_blocks(core_context: core.Context, local: int, hparams: dict[str, Any]) -> list[tuple[list[float], int]]:
    """The losses, of training and validation, and the number of compiled graphs: plain and in each way."""
    results = []
    ranks = dist.get_world_size()
    for way in ({}, *WAYS):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        periods = {"max_steps": 2, "reporting_period": 1, "validation_period": 2, "checkpoint_period": 2}
        reports = reports_of(
            core_context, tiny_run(ranks, local, global_batch_size=2 * ranks, **periods, **hparams, **way)
        )
        losses = [m["loss"] for m in reports["training"]] + [m["validation_loss"] for m in reports["validation"]]
        results.append((losses, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return results


@pytest.mark.parametrize(("ranks", "local", "hparams", "tolerance"), COMPILED)
def test_compiled_and_recomputed_blocks_give_the_same_losses(
    ranks: int, local: int, hparams: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    (plain_losses, none), *ways = on_ranks(losses_of_blocks, ranks, tmp_path, local, hparams)[0]
    assert len(plain_losses) == 3 and none == 0
    for way, (losses, graphs) in zip(WAYS, ways, strict=True):
        # Recomputing alone does exactly the same again.
        assert losses == pytest.approx(plain_losses, abs=tolerance if "compile" in way else 0), way
        # Blocks that run the same code share their graphs, of training and validation, but not in torch 2.3.
        apart = hparams["n_layers"] if torch.__version__ < "2.4" else 1
        assert graphs == (2 * apart if "compile" in way else 0), f"{way}: {graphs} graphs"


# ---- A model that would not be what it seems ----


def refused(_: core.Context) -> dict[str, str]:
    tied, buffered, mask, good = (fsdp_train.build_model(tiny_config()) for _ in range(4))
    tied.head.out.weight = tied.embedding.token
    buffered.head.register_buffer("scale", torch.ones(32))
    with torch.device("meta"):
        mask.blocks[0].register_buffer("mask", torch.ones(16, 16), persistent=False)
    messages = {}
    units: dict[str, Any] = {"units": (Embedding, Head, nn.TransformerEncoderLayer)}
    for name, model in (("head.out.weight", tied), ("head.scale", buffered), ("blocks.0.mask", mask), ("units", good)):
        with patch.object(fsdp_train, "UNITS", units.get(name, fsdp_train.UNITS)):
            try:
                fsdp_train.shard(model, tiny_run())
            except fsdp_train.Refusal as refusal:
                messages[name] = str(refusal)
    return messages


def test_refuses_a_model_that_would_not_be_what_it_seems(tmp_path: Path) -> None:
    (messages,) = on_ranks(refused, 1, tmp_path)
    for name in ("head.out.weight", "head.scale", "blocks.0.mask"):
        assert messages[name].startswith(f"{name}: tied weights or buffers"), messages
    assert "UNITS" in messages["units"] and "TransformerEncoderLayer" in messages["units"]


def on_gpus(_: core.Context) -> dict[str, Any]:
    """What FSDP is asked for on GPUs, where the same seed may draw other numbers on each model of them."""

    class Asked(Exception):
        pass

    def fsdp(*_: Any, **options: Any) -> None:
        raise Asked(options)

    run = fsdp_train.Run(tiny_config(sharding="hybrid"), torch.device("cuda", 0), 0, 8)
    with (
        patch.object(fsdp_train, "FSDP", fsdp),
        patch.object(fsdp_train, "init_device_mesh", lambda *mesh: mesh),
        patch.object(dist, "get_world_size", lambda: 16),
        pytest.raises(Asked) as asked,
    ):
        fsdp_train.shard(fsdp_train.build_model(run.config), run)
    return {name: asked.value.args[0][name] for name in ("sync_module_states", "device_id", "device_mesh")}


def test_gpus_take_the_weights_of_rank_0(tmp_path: Path) -> None:
    (asked,) = on_ranks(on_gpus, 1, tmp_path)
    assert asked["sync_module_states"] and asked["device_id"] == torch.device("cuda", 0)
    assert asked["device_mesh"] == ("cuda", (2, 8)), "of 16 ranks on nodes of 8: shard in a node"


def with_dropout(core_context: core.Context) -> list[Any]:
    """Validations without dropout, and with."""
    runs = (tiny_run(2, dropout=dropout, lr=1e-30, max_steps=1) for dropout in (0.0, 0.9))
    return [reports_of(core_context, run)["validation"] for run in runs]


def test_validation_has_no_dropout(tmp_path: Path) -> None:
    (without,), (with_it,) = on_ranks(with_dropout, 2, tmp_path)[0]
    assert without["validation_loss"] == pytest.approx(with_it["validation_loss"], abs=1e-6)


# ---- Precision ----

MATMULS = {"mm", "bmm", "addmm", "baddbmm"}
COLLECTIVES = {
    "gathered": ("all_gather", "all_gather_into_tensor", "all_gather_single"),
    "reduced": ("reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base"),
}
Dtypes = dict[str, set[torch.dtype]]


class Probe(TorchDispatchMode):
    """Collects the dtypes that go through one training step, forward and backward, by kind of operation."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "backward"
        self.seen: Dtypes = {}

    def add(self, kind: str, *values: Any) -> None:
        for value in values:
            if isinstance(value, (list, tuple)):
                self.add(kind, *value)
            elif isinstance(value, Tensor) and value.is_floating_point():
                self.seen.setdefault(kind, set()).add(value.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in MATMULS or name.startswith("_scaled_dot_product"):
            self.add(f"matmul, {self.phase}", *args[:3])  # attention's backward also takes float32 statistics
        for begin, kind in (("native_layer_norm", "norm"), ("_log_softmax", "softmax"), ("nll_loss", "loss")):
            if name.startswith(begin):
                self.add(f"{kind}, {self.phase}", *args)
        return func(*args, **(kwargs or {}))


def probe(run: fsdp_train.Run) -> tuple[Dtypes, float]:
    """The dtypes in one training step, and its gradient norm. COLLECTIVE."""
    state = fsdp_train.build_state(run)
    for group in state.optimizer.param_groups:
        group["lr"] = 1e-3
    seen = Probe()
    next_token_loss, clip = fsdp_train.next_token_loss, fsdp_train.clip_grad_norm

    def forward(*arguments: Any) -> Tensor:
        seen.phase = "forward"
        loss = next_token_loss(*arguments)
        seen.phase = "backward"
        seen.add("loss", loss)
        return loss

    def clip_and_look(model: FSDP, max_norm: float) -> Tensor:
        seen.add("gradients", [p.grad for p in model.parameters()])
        return clip(model, max_norm)

    def spy(kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.add(kind, *arguments)
            return collective(*arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(fsdp_train, "next_token_loss", forward))
        stack.enter_context(patch.object(fsdp_train, "clip_grad_norm", clip_and_look))
        for kind, names in COLLECTIVES.items():
            for name in (name for name in names if hasattr(dist, name)):
                stack.enter_context(patch.object(dist, name, spy(kind, getattr(dist, name))))
        stack.enter_context(seen)
        _, grad_norm = fsdp_train.train_step(state, next(state.data), run)
    seen.add("norm of the gradients", grad_norm)
    seen.add("weights", *state.model.parameters())
    seen.add("Adam", *(t for s in state.optimizer.state.values() for t in s.values()))
    assert grad_norm.isfinite(), "or the scaler has skipped the step"
    return seen.seen, grad_norm.item()


def right_dtypes(amp_dtype: str | None, reduce_dtype: str | None) -> Dtypes:
    low = getattr(torch, amp_dtype or "float32")
    full: tuple[str, ...] = (
        "norm, forward",
        "norm, backward",
        "softmax, forward",
        "softmax, backward",
        "loss, forward",
    )
    full += ("loss, backward", "loss", "gradients", "norm of the gradients", "weights", "Adam")
    right = {kind: {torch.float32} for kind in full}
    right |= {kind: {low} for kind in ("gathered", "matmul, forward", "matmul, backward")}
    return right | {"reduced": {torch.float32 if reduce_dtype else low}}


PRECISIONS = [(amp, reduce) for amp in (None, "bfloat16", "float16") for reduce in (None, "float32")]


def look_inside(_: core.Context) -> dict[str, Any]:
    """The dtypes of every setting, and the same without autocast and without MixedPrecision."""
    autocast = torch.autocast
    mutations: dict[str, contextlib.AbstractContextManager[Any]] = {
        "right": contextlib.nullcontext(),
        "no autocast": patch.object(torch, "autocast", lambda *a, **k: autocast(*a, **{**k, "enabled": False})),
        "no MixedPrecision": patch.object(fsdp_train, "MixedPrecision", lambda **_: None),
    }
    result: dict[str, Any] = {mutation: {} for mutation in mutations}
    for mutation, context in mutations.items():
        for amp, reduce in PRECISIONS:
            with context:
                try:
                    result[mutation][amp, reduce] = probe(tiny_run(2, amp_dtype=amp, reduce_dtype=reduce))
                except RuntimeError as error:  # two dtypes met in one operation
                    result[mutation][amp, reduce] = str(error), math.nan
    return result


def test_dtypes_inside_a_step(tmp_path: Path) -> None:
    """Without autocast or MixedPrecision some dtype is not the right one; float32 needs neither."""
    for result in on_ranks(look_inside, 2, tmp_path):
        for amp, reduce in PRECISIONS:
            seen, grad_norm = result["right"][amp, reduce]
            assert seen == right_dtypes(amp, reduce), (amp, reduce)
            # Of unscaled gradients, so the same whatever the precision.
            assert grad_norm == pytest.approx(result["right"][None, None][1], rel=0.02)
            for mutation in ("no autocast", "no MixedPrecision"):
                same = result[mutation][amp, reduce][0] == right_dtypes(amp, reduce)
                assert same is (amp is None), f"{mutation} does not show in {amp}, {reduce}"


# ---- Overflow, and numbers that are not finite ----


class Hugely(torch.autograd.Function):
    """The loss as it is, with a gradient that no low precision holds, or none at all does."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def hugely(loss: Tensor, factor: float) -> Tensor:
    changed: Tensor = Hugely.apply(loss, factor)
    return changed


def at_step(step: int | None, change: Callable[[Tensor], Tensor], training: bool = True) -> Callable[..., Tensor]:
    """`next_token_loss`, changed on rank 1 only, in the call number `step` of training (or validation) or in all."""
    original, calls = fsdp_train.next_token_loss, 0

    def next_token_loss(*arguments: Any) -> Tensor:
        nonlocal calls
        loss = original(*arguments)
        if torch.is_grad_enabled() is not training:
            return loss
        calls += 1
        return change(loss) if dist.get_rank() == 1 and calls == (step or calls) else loss

    return next_token_loss


OVERFLOWS = {3: "in backward", 6: "in a shard"}


def overflow(core_context: core.Context) -> dict[str, Any]:
    """A float16 run whose rank 1 overflows twice: in its whole gradient, and in one number of its own shard."""
    train_step = fsdp_train.train_step
    history: list[dict[str, Any]] = []

    def numbers(state: fsdp_train.TrainState) -> list[Tensor]:
        """Weights and Adam state that this rank holds some of."""
        held = [p for p in state.model.parameters() if p.numel()]
        adam = [t for p in held for t in state.optimizer.state[p].values()]
        return [t.detach().clone() for t in [*held, *adam]]

    def spied(state: fsdp_train.TrainState, *arguments: Any) -> tuple[Tensor, Tensor]:
        def unscale(optimizer: torch.optim.Optimizer) -> None:
            if dist.get_rank() == 1 and OVERFLOWS.get(len(history) + 1) == "in a shard":
                gradients = [p.grad for p in state.model.parameters() if p.grad is not None and p.grad.numel()]
                gradients[0].flatten()[0] = math.inf
            original(optimizer)

        original, before = state.scaler.unscale_, numbers(state)
        with patch.object(state.scaler, "unscale_", unscale):
            loss, grad_norm = train_step(state, *arguments)
        moved = [not torch.equal(*pair) for pair in zip(before, numbers(state), strict=True)]
        entry = {"moved": (any(moved), all(moved)), "finite": all(t.isfinite().all() for t in numbers(state))}
        entry |= {"scale": state.scaler.get_scale(), "loss": loss.item(), "grad_norm": grad_norm.item()}
        history.append(entry)
        return loss, grad_norm

    periods = {"max_steps": 8, "reporting_period": 2, "validation_period": 8, "checkpoint_period": 8}
    with (
        patch.object(fsdp_train, "train_step", spied),
        patch.object(fsdp_train, "next_token_loss", at_step(3, lambda loss: hugely(loss, 1e30))),
    ):
        reports = reports_of(core_context, tiny_run(2, amp_dtype="float16", **periods))
    return {"history": history, "reports": reports["training"]}


def test_overflow_on_one_rank_skips_the_step_on_all_and_is_counted(tmp_path: Path) -> None:
    results = on_ranks(overflow, 2, tmp_path)
    scale = 2.0**16
    for index in range(8):
        skipped = index + 1 in OVERFLOWS
        scale /= 2 if skipped else 1
        for result in results:
            step = result["history"][index]
            assert step["finite"] and step["scale"] == scale, index + 1
            assert step["moved"] == ((False, False) if skipped else (True, True)), index + 1
            assert math.isfinite(step["grad_norm"]) is not skipped
    reports = results[0]["reports"]
    assert [m["skipped_steps"] for m in reports] == [0, 1, 2, 2]
    assert [m["loss_scale"] for m in reports] == [65536, 32768, 16384, 16384]
    # The means are over the steps that were not skipped.
    for report, steps in zip(reports, ([1, 2], [4], [5], [7, 8]), strict=True):
        taken = [result["history"][step - 1] for result in results for step in steps]
        for name in ("loss", "grad_norm"):
            assert report[name] == pytest.approx(sum(step[name] for step in taken) / len(taken), rel=1e-6)


NAN = math.nan
# By name: amp_dtype, the change of the loss on rank 1, at which step, in training, and what the message says.
FAILURES: dict[str, tuple[str | None, Callable[[Tensor], Tensor], int | None, bool, str]] = {
    "float32, loss": (None, lambda loss: loss + NAN, 8, True, "training is not finite in steps 7..8"),
    "float32, gradient": (None, lambda loss: hugely(loss, NAN), 8, True, "training is not finite in steps 7..8"),
    "float32, early": (None, lambda loss: loss * math.inf, 5, True, "training is not finite in steps 5..6"),
    "float32, validation": (None, lambda loss: loss * NAN, 3, False, "validation_loss is not finite at step 8"),
    "bfloat16, gradient": ("bfloat16", lambda loss: hugely(loss, math.inf), 8, True, "is not finite in steps 7..8"),
    "float16, loss": ("float16", lambda loss: loss + NAN, 8, True, "training is not finite in steps 7..8"),
    "float16, for good": ("float16", lambda loss: hugely(loss, 1e30), None, True, "not finite in steps 1..20"),
}


def fail(core_context: core.Context) -> dict[str, tuple[str, list[int]]]:
    """How runs with a number that is not finite on rank 1 end here, and the steps that they saved."""
    ends = {}
    for name, (amp, change, step, training, _) in FAILURES.items():
        saved: list[int] = []
        save, message = fsdp_train.save, ""

        def spy(context: Any, state: Any, run: Any, save: Any = save, saved: Any = saved) -> str:
            saved.append(state.step)
            return str(save(context, state, run))

        periods = {"max_steps": 8, "reporting_period": 2, "validation_period": 4, "checkpoint_period": 4}
        if step is None:
            periods = dict.fromkeys(periods, 20)
        with (
            patch.object(fsdp_train, "next_token_loss", at_step(step, change, training)),
            patch.object(fsdp_train, "save", spy),
            warnings.catch_warnings(),
        ):
            # Once in a while torch 2.3 says so of what an earlier run has left.
            warnings.filterwarnings("ignore", "Deallocating Tensor that still has live PyObject references")
            try:
                fsdp_train.train(core_context, tiny_run(2, amp_dtype=amp, **periods))
            except fsdp_train.Refusal as refusal:
                message = str(refusal)
        ends[name] = message, saved
    return ends


def test_ends_when_not_finite(tmp_path: Path) -> None:
    for ends in on_ranks(fail, 2, tmp_path):
        for name, (*_, says) in FAILURES.items():
            message, saved = ends[name]
            assert says in message, f"{name}: {message}"
            assert saved == ([] if "for good" in name else [4]), f"{name}: nothing from the steps that failed"


def agree(_: core.Context) -> dict[Any, Any]:
    """What two ranks with other GPUs choose."""
    capabilities = {"V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "H100": (9, 0)}
    agreed: dict[Any, Any] = {}
    for pair in (("A100", "T4"), ("T4", "A100"), ("H100", "A100"), ("V100", "T4")):
        name = pair[dist.get_rank()]
        weakest = min(fsdp_train.everywhere(functools.partial(tuple, (capabilities[name], name))))
        for setting in ("auto", "bfloat16"):
            try:
                agreed[pair, setting] = fsdp_train.choose_amp_dtype(setting, "cuda", *weakest)
            except det.InvalidHP as problem:
                agreed[pair, setting] = str(problem)
    return agreed


def test_ranks_agree_on_the_weakest_gpu(tmp_path: Path) -> None:
    one, two = on_ranks(agree, 2, tmp_path)
    assert one == two
    for pair in (("A100", "T4"), ("T4", "A100"), ("V100", "T4")):
        assert one[pair, "auto"][0] == torch.float16
        assert "capability 8.0" in one[pair, "bfloat16"]
    assert one[("H100", "A100"), "auto"][0] == one[("H100", "A100"), "bfloat16"][0] == torch.bfloat16


# ---- The command line ----

# Enough to learn by, in a few seconds.
LONGER = {"max_seq_len": 32, "d_model": 32, "simulated_size_in_batches": 1000, "lr": 2e-2, "max_steps": 120}
LONGER |= dict.fromkeys(("reporting_period", "validation_period"), 40) | {"checkpoint_period": 120}


def test_two_jobs_on_one_host_learn(tmp_path: Path) -> None:
    """Both under torchrun itself, started at the same time; then a third, on one process of its own."""
    folders = {name: tmp_path / name for name in ("tiny", "longer", "one")}
    for folder in folders.values():
        folder.mkdir()
    longer = start(*CONFIG, *overrides(**LONGER), ranks=2, cwd=folders["longer"])
    small = torchrun(*CONFIG, *overrides(micro_batch_size=5, amp_dtype="bfloat16"), ranks=2, cwd=folders["tiny"])
    outcome = longer.finish()
    one = run(*CONFIG, *overrides(max_steps=4), ranks=0, cwd=folders["one"])
    for ended, job in ((small, "tiny"), (outcome, "longer"), (one, "one")):
        assert ended.code == 0, ended.text
        assert "Traceback" not in ended.text and "warn" not in ended.text.lower(), ended.text
        assert [path.name for path in folders[job].iterdir()] == ["checkpoints"]

    losses = [float(loss) for loss in re.findall(r"  validation_loss ([\d.]+)", outcome.text)]
    assert math.log(4) < losses[-1] < 1.1 * math.log(4), "near the floor, not below"
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)

    lines = [line for line in small.text.splitlines() if line.startswith(("INFO", "  "))]
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    banner = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith("  ")}
    # Width 16, vocabulary 32, 2 blocks. Parameters: (32 + 16) * 16 embedded; a block 2 * 16 + 12 * 16^2 = 3104; the
    # head 16 + 16 * 32; in all 7504. Bytes: 16 of each for weight, gradient and Adam, half of them on each rank.
    assert banner["model"].startswith("7,504 parameters, 2 blocks of width 16")
    assert banner["ranks"] == "1 node(s) x 2" and banner["sharding"] == "1 replica(s) x 2 shard(s)"
    assert banner["precision"] == "bfloat16 (as configured)" and banner["reduction"] == "bfloat16"
    assert banner["step"] == f"192 tokens, {192 * (6 * 7504 + 12 * 2 * 16 * 16):.3g} FLOPs"
    assert banner["each"] == "rank   6 sequences a step, 5 at a time"
    assert banner["memory"].startswith("0.1 MB a rank")
    assert banner["floor"].startswith("1.386")
    kinds = re.findall(r"step (\d+)/12  (loss|validation_loss|checkpoint) ", small.text)
    assert [f"{step} {kind[0]}" for step, kind in kinds] == (
        ["2 l", "4 l", "4 v", "6 l", "8 l", "8 v", "8 c", "10 l", "12 l", "12 v", "12 c"]
    )
    report = r"step 10/12  loss [\d.]+  norm [\d.]+  lr [\d.e-]+  \d+ tok/s  ETA 0:00:0\d"
    assert len(re.findall(report, small.text)) == 1, small.text
    assert small.text.count("first step ") == 1 and "--resume latest" in small.text
    uuids = re.findall(r"checkpoint (\S+)$", small.text, re.M)
    assert sorted(uuids[-2:]) == sorted(path.name for path in (folders["tiny"] / "checkpoints").iterdir())


def test_long_numbers_fit_a_terminal(tmp_path: Path) -> None:
    """Of a run of 54,000 steps on fast GPUs, of which 3 are done."""
    driver = "import time; c = time.perf_counter; time.perf_counter = lambda: c() / 100"
    periods = dict.fromkeys(("max_steps", "validation_period", "checkpoint_period"), 54000)
    job = start(*CONFIG, *overrides(**periods, reporting_period=1), ranks=0, cwd=tmp_path, before=driver)
    job.wait_for("step 9/54000")
    job.signal(9)
    lines = job.finish().text.splitlines()
    assert max(map(len, lines)) <= 100 - len("54000") + 1, max(lines, key=len)


def test_mfu_is_that_of_known_gpus(tmp_path: Path) -> None:
    assert on_ranks(measured_mfu, 1, tmp_path) == [True]


def measured_mfu(core_context: core.Context) -> bool:
    run = tiny_run(**CURVE)
    fast = fsdp_train.Run(run.config, run.device, 0, 1, None, peak_rate=1e6)
    reports = reports_of(core_context, fast)["training"][1:]
    return all(m["mfu"] == pytest.approx(m["tokens_per_second"] / 1e6) for m in reports)


def test_float32_means_float32(tmp_path: Path) -> None:
    """Whatever the environment or a plugin said of TF32 before."""
    tell = "import atexit, torch; torch.set_float32_matmul_precision('medium'); "
    tell += "atexit.register(lambda: print('products in', torch.get_float32_matmul_precision()))"
    outcome = run(*CONFIG, *overrides(max_steps=1), ranks=0, cwd=tmp_path, before=tell)
    assert outcome.code == 0 and "products in highest" in outcome.text, outcome.text


def test_dry_run(tmp_path: Path) -> None:
    """Of the large run, without a process group, a GPU, or memory for its weights."""
    refuse = "import torch, resource; torch.distributed.init_process_group = torch.cuda.device_count = None; "
    refuse += "resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))"
    large = ("--config", str(ROOT / "distributed.yaml"), "--dry-run")
    outcome = run(*large, ranks=0, cwd=tmp_path, before=refuse)
    assert outcome.code == 0, outcome.text
    for part in (
        "1,418,299,392 parameters, 24 blocks of width 2048",
        "2 node(s) x 8",
        "2 replica(s) x 8 shard(s)",
        "precision   bfloat16 (auto",
        "reduction   float32",
        "524,288 tokens, 5.09e+15 FLOPs",
        "16 sequences a step, 8 at a time",
        "54,000 steps, 28,311,552,000 tokens",
        "2,836.6 MB a rank",  # 16 bytes * n / 8
        "17,019.6 MB",  # 12 bytes * n
    ):
        assert part in outcome.text, f"{part}:\n{outcome.text}"
    assert max(map(len, outcome.text.splitlines())) <= 100
    other = run(*large, "slots_per_trial=32", "warmup_steps=54000", ranks=0, cwd=tmp_path)
    assert "4 node(s) x 8" in other.text and "rate never reaches lr" in other.text, other.text
    assert list(tmp_path.iterdir()) == []


def test_diverged_run_ends(tmp_path: Path) -> None:
    outcome = run(*CONFIG, *overrides(lr="1e30", warmup_steps=0, checkpoint_period=2), ranks=2, cwd=tmp_path)
    assert outcome.code == 1
    assert outcome.text.count("fsdp_train.py: training is not finite in steps 1..2") == 1, outcome.text
    assert "Traceback" not in outcome.text, "no traceback of ours"
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert SCRIPT.exists() and Block is not None
