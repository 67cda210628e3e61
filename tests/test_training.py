"""Training under FSDP: the same numbers however it is split, in the dtypes that it says, and an end when they fail."""

import contextlib
import io
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import determined as det
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from determined import core
from launch import SCRIPT, Outcome, finish, on_ranks, run, start, torchrun
from tiny import overrides, tiny, tiny_config
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_train
from model import Block, Embedding, Head, Transformer

CPU = torch.device("cpu")
SEED = 1

# ---- The same numbers, however it is split ----

STEPS = 20
# A run of 20 steps that reports each one, clips most and validates twice.
CURVE: dict[str, Any] = {
    "global_batch_size": 8,
    "max_steps": STEPS,
    "reporting_period": 1,
    "validation_period": 10,
    "checkpoint_period": STEPS,
    "warmup_steps": 5,
    "max_grad_norm": 0.75,
}

# By number of ranks: hyperparameters and ranks per node.
VARIANTS: dict[int, list[tuple[dict[str, Any], int]]] = {
    1: [*(({"micro_batch_size": size}, 1) for size in (None, 1, 2, 4, 8)), ({"activation_checkpointing": True}, 1)],
    2: [
        *(({"micro_batch_size": size}, 2) for size in (1, 2, 4)),
        ({"activation_checkpointing": True, "sharding": "hybrid"}, 2),  # one node: nothing to replicate
    ],
    4: [
        *(({"micro_batch_size": size}, 4) for size in (1, 2)),
        *(({"micro_batch_size": size, "sharding": "hybrid"}, 2) for size in (1, 2)),
        ({"activation_checkpointing": True, "sharding": "hybrid"}, 2),
    ],
}


def reports_of_training(core_context: core.Context, config: fsdp_train.Config) -> dict[str, list[dict[str, float]]]:
    """What `train` reports on this rank."""
    reports: dict[str, list[dict[str, float]]] = {"training": [], "validation": []}
    with (
        patch.object(core_context.train, "report_training_metrics", lambda _, m: reports["training"].append(m)),
        patch.object(core_context.train, "report_validation_metrics", lambda _, m: reports["validation"].append(m)),
    ):
        fsdp_train.train(core_context, config, SEED, CPU)
    return reports


def whole_weights(model: FSDP) -> dict[str, Tensor]:
    """COLLECTIVE."""
    with FSDP.summon_full_params(model, writeback=False):
        return {name: p.detach().clone() for name, p in fsdp_train.named_parameters(model)}


def split(core_context: core.Context, variants: list[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """On each rank: what every variant reports, and how training starts."""
    curves = []
    for hparams, local_ranks in variants:
        os.environ["LOCAL_WORLD_SIZE"] = str(local_ranks)
        config = fsdp_train.parse_config(tiny(**CURVE, **hparams), dist.get_world_size(), local_ranks)
        curves.append(reports_of_training(core_context, config))

    # What FSDP gives a parameter in memory is not zero by luck.
    empty_like, poisoned = torch.empty_like, []

    def poison(*arguments: Any, **options: Any) -> Tensor:
        tensor = empty_like(*arguments, **options)
        if tensor.is_floating_point():
            poisoned.append(tensor.fill_(math.nan))
        return tensor

    torch.manual_seed(1000 + dist.get_rank())  # the ranks' generators differ before
    with patch.object(torch, "empty_like", poison):
        state = fsdp_train.build_state(config, SEED, CPU, None)
    groups = [
        ({name for name, p in fsdp_train.named_parameters(state.model) if any(p is q for q in group["params"])}, group)
        for group in state.optimizer.param_groups
    ]
    return {
        "curves": curves,
        "poisoned": len(poisoned),
        "weights": whole_weights(state.model),
        "units": [type(unit.module) for unit in FSDP.fsdp_modules(state.model)],
        "groups": [(names, group["weight_decay"], len(group["params"])) for names, group in groups],
        "held": sum(p.numel() for p in state.model.parameters()),
        "adam": sum(t.numel() for s in state.optimizer.state.values() for t in s.values() if t.ndim),
        "adam_steps": {float(s["step"]) for s in state.optimizer.state.values()},
    }


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What `split` gives on each rank, by number of ranks."""
    return {
        ranks: on_ranks(split, ranks, tmp_path_factory.mktemp("split"), variants)
        for ranks, variants in VARIANTS.items()
    }


def plain_transformer() -> Transformer:
    torch.manual_seed(SEED)
    return Transformer(vocab_size=32, max_seq_len=16, d_model=16, n_heads=2, n_layers=2)


def plain_loss(model: Transformer, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    """The numbers of a loop by hand over the same model: one process, no FSDP, no gradient accumulation."""
    config = tiny_config(**CURVE)
    model = plain_transformer()
    data, _ = fsdp_train.build_data(config, SEED, 0, 1, CPU)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=False, foreach=False)
    numbers: dict[str, list[float]] = {"loss": [], "grad_norm": [], "lr": [], "validation_loss": []}
    for step in range(1, STEPS + 1):
        rate = 1e-2 * (step / 5 if step < 5 else 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 5) / 15)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = plain_loss(model, next(data))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.75)
        optimizer.step()
        optimizer.zero_grad()
        for name, value in (("loss", loss.item()), ("grad_norm", norm.item()), ("lr", rate)):
            numbers[name].append(value)
        if step % 10 == 0:
            _, validation = fsdp_train.build_data(config, SEED, 0, 1, CPU)
            with torch.no_grad():
                losses = [plain_loss(model, next(validation)).item() for _ in range(2)]
            numbers["validation_loss"].append(sum(losses) / 2)
    return numbers


def test_plain_loop_is_a_test(plain: dict[str, list[float]]) -> None:
    """It clips in some steps and not in others, and learns enough for an error to show."""
    assert min(plain["grad_norm"]) < 0.75 < max(plain["grad_norm"])
    assert plain["loss"][0] - plain["loss"][-1] > 0.3


@pytest.mark.parametrize(
    ("ranks", "index"),
    [
        pytest.param(
            ranks, index, id="-".join([f"{ranks} ranks", *(f"{name}={value}" for name, value in hparams.items())])
        )
        for ranks, variants in VARIANTS.items()
        for index, (hparams, _) in enumerate(variants)
    ],
)
def test_trains_like_the_plain_loop(
    splits: dict[int, list[dict[str, Any]]], plain: dict[str, list[float]], ranks: int, index: int
) -> None:
    for rank in range(1, ranks):
        assert splits[ranks][rank]["curves"][index] == {"training": [], "validation": []}, "only rank 0 reports"
    reports = splits[ranks][0]["curves"][index]
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("lr", 1e-12)):
        assert [m[name] for m in reports["training"]] == pytest.approx(plain[name], abs=tolerance), name
    assert [m["validation_loss"] for m in reports["validation"]] == pytest.approx(plain["validation_loss"], abs=1e-5)
    assert [m["batches"] for m in reports["validation"]] == [10, 20]
    assert all("loss_scale" not in m for m in reports["training"])


# By sharding: ranks, and the settings in which compiled and recomputed blocks are compared with plain ones, all with
# dropout, and the tolerance of the losses. 5 blocks are more than torch 2.3 compiles by itself.
BLOCKS: dict[str, tuple[int, list[tuple[dict[str, Any], float]]]] = {
    "full": (2, [({"n_layers": 5}, 1e-5), ({"n_layers": 1, "amp_dtype": "bfloat16"}, 1e-3)]),
    "hybrid": (4, [({"n_layers": 1}, 1e-5), ({"n_layers": 1, "amp_dtype": "bfloat16"}, 1e-3)]),
}
WAYS = [{"activation_checkpointing": True}, {"compile": True}, {"activation_checkpointing": True, "compile": True}]


def losses_of_blocks(core_context: core.Context, sharding: str) -> list[list[tuple[list[float], int]]]:
    """The losses, of training and validation, and the number of compiled graphs: by setting, plain and in each way."""
    ranks, settings = BLOCKS[sharding]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    results: list[list[tuple[list[float], int]]] = []
    for hparams, _ in settings:
        results.append([])
        for way in ({}, *WAYS):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            periods = {"max_steps": 4, "reporting_period": 1, "validation_period": 2, "checkpoint_period": 4}
            batch = {"global_batch_size": 2 * ranks, "sharding": sharding}
            config = fsdp_train.parse_config(tiny(**periods, **batch, **hparams, **way, dropout=0.1), ranks, 2)
            reports = reports_of_training(core_context, config)
            losses = [m["loss"] for m in reports["training"]] + [m["validation_loss"] for m in reports["validation"]]
            results[-1].append((losses, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return results


@pytest.mark.parametrize("sharding", BLOCKS)
def test_compiled_and_recomputed_blocks_give_the_same_losses(sharding: str, tmp_path: Path) -> None:
    ranks, settings = BLOCKS[sharding]
    results = on_ranks(losses_of_blocks, ranks, tmp_path, sharding, timeout=400)[0]
    for (hparams, tolerance), ((plain_losses, _), *ways) in zip(settings, results, strict=True):
        assert len(plain_losses) == 6
        for way, (losses, graphs) in zip(WAYS, ways, strict=True):
            # Recomputing alone does exactly the same again.
            allowed = tolerance if "compile" in way else 0
            assert losses == pytest.approx(plain_losses, abs=allowed), (hparams, way)
            # Blocks that run the same code share their graphs, of training and validation, but not in torch 2.3.
            apart = hparams["n_layers"] if torch.__version__ < "2.4" else 1
            assert graphs == (2 * apart + 1 if "compile" in way else 0), (hparams, way)


def test_refuses_a_model_that_would_not_be_what_it_seems() -> None:
    tied, buffered, mask = (cast(Transformer, fsdp_train.build_model(tiny_config())) for _ in range(3))
    tied.head.out.weight = tied.embedding.token
    buffered.head.register_buffer("scale", torch.ones(32))
    with torch.device("meta"):
        mask.blocks[0].register_buffer("mask", torch.ones(16, 16), persistent=False)
    for model, name in ((tied, "head.out.weight"), (buffered, "head.scale"), (mask, "blocks.0.mask")):
        with pytest.raises(RuntimeError, match=f"^{name}: tied weights or buffers"):
            fsdp_train.shard(model, tiny_config(), CPU, None)


@pytest.mark.parametrize("ranks", VARIANTS)
def test_starts_from_the_weights_of_the_plain_model(splits: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    """So all numbers of ranks start alike, and nothing is left as it was found in memory."""
    expected = dict(plain_transformer().named_parameters())
    for result in splits[ranks]:
        assert result["poisoned"] >= len(expected)
        assert result["weights"].keys() == expected.keys()
        assert all(torch.equal(result["weights"][name], p) for name, p in expected.items())
        assert result["adam_steps"] == {0.0}


@pytest.mark.parametrize("ranks", VARIANTS)
def test_shards(splits: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    total = sum(p.numel() for p in plain_transformer().parameters())
    # The last variant of 4 ranks is hybrid: 2 replicas of 2 shards.
    replicas = 2 if ranks == 4 else 1
    assert sum(result["held"] for result in splits[ranks]) == replicas * total
    for result in splits[ranks]:
        kinds = [kind for kind in result["units"] if kind is not Transformer]
        assert sorted(kinds, key=lambda kind: kind.__name__) == [Block, Block, Embedding, Head]
        assert result["units"].count(Transformer) == 1
        assert result["held"] == pytest.approx(replicas * total / ranks, abs=8), "even, but for padding"
        assert result["adam"] == 2 * result["held"]


@pytest.mark.parametrize("ranks", VARIANTS)
def test_only_matrices_decay(splits: dict[int, list[dict[str, Any]]], ranks: int) -> None:
    names = set(dict(plain_transformer().named_parameters()))
    norms = {name for name in names if "norm" in name}
    assert len(norms) == 5
    for result in splits[ranks]:
        assert result["groups"] == [(names - norms, 0.1, len(names - norms)), (norms, 0.0, len(norms))]


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    with patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_units_must_fit_the_model(world_of_one: None) -> None:
    config = tiny_config()
    with (
        patch.object(fsdp_train, "UNITS", (Embedding, Head, torch.nn.TransformerEncoderLayer)),
        pytest.raises(RuntimeError, match="UNITS"),
    ):
        fsdp_train.shard(fsdp_train.build_model(config), config, CPU, None)


# ---- Precision ----

MATMULS = {"mm", "bmm", "addmm", "baddbmm"}
ATTENTION = "_scaled_dot_product"
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
        if name in MATMULS or name.startswith(ATTENTION):
            self.add(f"matmul, {self.phase}", *args[:3])  # attention's backward also takes float32 statistics
        elif name.startswith("native_layer_norm"):
            self.add(f"norm, {self.phase}", *args)
        elif name.startswith(("_log_softmax", "_softmax")):
            self.add(f"softmax, {self.phase}", *args)
        elif name.startswith("nll_loss"):
            self.add(f"loss, {self.phase}", *args)
        return func(*args, **(kwargs or {}))


def probe(config: fsdp_train.Config, amp_dtype: torch.dtype | None) -> tuple[Dtypes, float]:
    """The dtypes in one training step, and its gradient norm. COLLECTIVE."""
    state = fsdp_train.build_state(config, SEED, CPU, amp_dtype)
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
        _, grad_norm = fsdp_train.train_step(state, next(state.data), config, amp_dtype)
    seen.add("norm of the gradients", grad_norm)
    seen.add("weights", *state.model.parameters())
    seen.add("Adam", *(t for s in state.optimizer.state.values() for t in s.values()))
    assert grad_norm.isfinite(), "or the scaler has skipped the step"
    assert all(not torch.equal(p, torch.zeros_like(p)) for p in state.model.parameters() if p.numel())
    return seen.seen, grad_norm.item()


def right_dtypes(amp_dtype: str | None, reduce_dtype: str | None) -> Dtypes:
    low = getattr(torch, amp_dtype or "float32")
    return {
        "gathered": {low},
        "matmul, forward": {low},
        "matmul, backward": {low},
        "norm, forward": {torch.float32},
        "norm, backward": {torch.float32},
        "softmax, forward": {torch.float32},
        "softmax, backward": {torch.float32},
        "loss, forward": {torch.float32},
        "loss, backward": {torch.float32},
        "loss": {torch.float32},
        "reduced": {torch.float32 if reduce_dtype else low},
        "gradients": {torch.float32},
        "norm of the gradients": {torch.float32},
        "weights": {torch.float32},
        "Adam": {torch.float32},
    }


PRECISIONS = [(amp, reduce) for amp in (None, "bfloat16", "float16") for reduce in (None, "float32")]
CAPABILITIES = {"V100": (7, 0), "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "H100": (9, 0)}
PAIRS = [("A100", "T4"), ("T4", "A100"), ("H100", "A10"), ("V100", "T4"), ("A10", "A100")]


def look_inside(core_context: core.Context) -> dict[str, Any]:
    """On each rank: the dtypes of every setting, the same without autocast and without MixedPrecision, agreements."""
    result: dict[str, Any] = {"right": {}, "no autocast": {}, "no MixedPrecision": {}, "grad_norm": {}, "agreed": {}}
    autocast = torch.autocast
    mutations: dict[str, contextlib.AbstractContextManager[Any]] = {
        "right": contextlib.nullcontext(),
        "no autocast": patch.object(torch, "autocast", lambda *a, **k: autocast(*a, **{**k, "enabled": False})),
        "no MixedPrecision": patch.object(fsdp_train, "MixedPrecision", lambda **_: None),
    }
    for mutation, context in mutations.items():
        for amp, reduce in PRECISIONS:
            config = tiny_config(2, amp_dtype=amp, reduce_dtype=reduce)
            amp_dtype, _ = fsdp_train.agree_on_amp_dtype(config, CPU)
            with context:
                try:
                    result[mutation][amp, reduce], grad_norm = probe(config, amp_dtype)
                    if mutation == "right":
                        result["grad_norm"][amp, reduce] = grad_norm
                except RuntimeError as error:  # two dtypes met in one operation
                    result[mutation][amp, reduce] = str(error)

    rank = dist.get_rank()
    for pair in PAIRS:
        for setting in ("auto", "bfloat16", "float16", None):
            config = tiny_config(2, amp_dtype=setting)
            with (
                patch.object(torch.cuda, "get_device_capability", lambda _, pair=pair: CAPABILITIES[pair[rank]]),
                patch.object(torch.cuda, "get_device_name", lambda _, pair=pair: pair[rank]),
            ):
                try:
                    agreed: Any = fsdp_train.agree_on_amp_dtype(config, torch.device("cuda", rank))
                except det.InvalidHP as problem:
                    agreed = str(problem)
            result["agreed"][pair, setting] = agreed
    return result


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(look_inside, 2, tmp_path_factory.mktemp("inside"))


@pytest.mark.parametrize(("amp", "reduce"), PRECISIONS)
def test_dtypes_inside_a_step(inside: list[dict[str, Any]], amp: str | None, reduce: str | None) -> None:
    right = right_dtypes(amp, reduce)
    for result in inside:
        assert result["right"][amp, reduce] == right
        # Of unscaled gradients, so the same whatever the precision.
        assert result["grad_norm"][amp, reduce] == pytest.approx(result["grad_norm"][None, None], rel=0.02)


@pytest.mark.parametrize(("amp", "reduce"), PRECISIONS)
@pytest.mark.parametrize("mutation", ["no autocast", "no MixedPrecision"])
def test_shows_what_is_missing(
    inside: list[dict[str, Any]], mutation: str, amp: str | None, reduce: str | None
) -> None:
    """Without either, some dtype is not the right one; float32 needs neither."""
    right = right_dtypes(amp, reduce)
    for result in inside:
        assert (result[mutation][amp, reduce] == right) is (amp is None)


@pytest.mark.parametrize("pair", PAIRS)
def test_ranks_agree_on_the_weakest_gpu(inside: list[dict[str, Any]], pair: tuple[str, str]) -> None:
    weakest = min(pair, key=CAPABILITIES.__getitem__)
    capability = "{}.{}".format(*CAPABILITIES[weakest])
    expected = torch.bfloat16 if CAPABILITIES[weakest] >= (8, 0) else torch.float16
    for result in inside:
        dtype, why = result["agreed"][pair, "auto"]
        assert dtype == expected
        assert weakest in why and capability in why
        assert result["agreed"][pair, "float16"][0] == torch.float16
        assert result["agreed"][pair, None][0] is None
        asked_for = result["agreed"][pair, "bfloat16"]
        if expected == torch.bfloat16:
            assert asked_for[0] == torch.bfloat16
        else:
            assert "amp_dtype = bfloat16" in asked_for and "use auto or float16" in asked_for
            assert weakest in asked_for and capability in asked_for


@pytest.mark.parametrize(
    ("capability", "auto"),
    [
        ((7, 0), torch.float16),
        ((7, 5), torch.float16),
        ((8, 0), torch.bfloat16),
        ((8, 6), torch.bfloat16),
        ((9, 0), torch.bfloat16),
    ],
)
def test_dtype_by_capability(capability: tuple[int, int], auto: torch.dtype) -> None:
    dtype, why = fsdp_train.choose_amp_dtype("auto", "cuda", capability, "Some GPU")
    assert dtype == auto
    assert "Some GPU" in why and "{}.{}".format(*capability) in why
    assert fsdp_train.choose_amp_dtype("float16", "cuda", capability)[0] == torch.float16
    assert fsdp_train.choose_amp_dtype(None, "cuda", capability)[0] is None
    if auto == torch.bfloat16:
        assert fsdp_train.choose_amp_dtype("bfloat16", "cuda", capability)[0] == torch.bfloat16
    else:
        with pytest.raises(det.InvalidHP) as error:
            fsdp_train.choose_amp_dtype("bfloat16", "cuda", capability, "Some GPU")
        for part in ("amp_dtype = bfloat16", "Some GPU", "{}.{}".format(*capability), "8.0", "auto or float16"):
            assert part in str(error.value)


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [("auto", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float16", torch.float16), (None, None)],
)
def test_dtype_on_cpu(setting: str | None, dtype: torch.dtype | None) -> None:
    assert fsdp_train.choose_amp_dtype(setting, "cpu", (0, 0))[0] == dtype


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
        finite = all(t.isfinite().all() for t in numbers(state))
        history.append(
            {
                "moved": (any(moved), all(moved)),
                "finite": finite,
                "scale": state.scaler.get_scale(),
                "enabled": state.scaler.is_enabled(),
                "loss": loss.item(),
                "grad_norm": grad_norm.item(),
            }
        )
        return loss, grad_norm

    config = tiny_config(
        2, amp_dtype="float16", max_steps=8, reporting_period=2, validation_period=8, checkpoint_period=8
    )
    with (
        patch.object(fsdp_train, "train_step", spied),
        patch.object(fsdp_train, "next_token_loss", at_step(3, lambda loss: hugely(loss, 1e30))),
    ):
        reports = reports_of_training(core_context, config)
    return {"history": history, "reports": reports["training"]}


NAN = math.nan
# By name: amp_dtype, the change of the loss on rank 1, at which step, in training, and what the message says.
FAILURES: dict[str, tuple[str | None, Callable[[Tensor], Tensor], int | None, bool, str]] = {
    "float32, loss": (None, lambda loss: loss + NAN, 8, True, "training is not finite in steps 7..8"),
    "float32, gradient": (None, lambda loss: hugely(loss, NAN), 8, True, "training is not finite in steps 7..8"),
    "float32, negative": (None, lambda loss: loss - math.inf, 8, True, "training is not finite in steps 7..8"),
    "float32, early": (None, lambda loss: loss * math.inf, 5, True, "training is not finite in steps 5..6"),
    "float32, validation": (None, lambda loss: loss * NAN, 3, False, "validation_loss = nan is not finite at step 8"),
    "bfloat16, loss": ("bfloat16", lambda loss: loss * NAN, 7, True, "training is not finite in steps 7..8"),
    "bfloat16, gradient": (
        "bfloat16",
        lambda loss: hugely(loss, math.inf),
        8,
        True,
        "training is not finite in steps 7..8",
    ),
    "float16, loss": ("float16", lambda loss: loss + NAN, 8, True, "training is not finite in steps 7..8"),
}


def attempt(core_context: core.Context, config: fsdp_train.Config, loss: Callable[..., Tensor]) -> tuple[Any, str, Any]:
    """Train with `loss` in place of the right one: exit code of this rank, its message, and the steps saved."""
    save, saved, code = fsdp_train.save, [], None

    def spy(core_context: core.Context, state: fsdp_train.TrainState, *arguments: Any) -> str:
        saved.append(state.step)
        return save(core_context, state, *arguments)

    with (
        patch.object(fsdp_train, "next_token_loss", loss),
        patch.object(fsdp_train, "save", spy),
        # No sleep: it waits for the launcher, which ends the other ranks.
        patch.object(fsdp_train, "time", SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)),
        contextlib.redirect_stderr(io.StringIO()) as stderr,
        warnings.catch_warnings(),
    ):
        # Once in a while torch 2.3 says so of what an earlier run has left.
        warnings.filterwarnings("ignore", "Deallocating Tensor that still has live PyObject references")
        try:
            fsdp_train.train(core_context, config, SEED, CPU)
        except SystemExit as end:
            code = end.code
    dist.barrier()
    return code, stderr.getvalue(), saved


def fail(core_context: core.Context, folder: str) -> dict[str, Any]:
    """How runs with a non-finite number on rank 1 end on this rank, and how many checkpoints there are then."""
    ends = {}
    periods = {"max_steps": 8, "reporting_period": 2, "validation_period": 4, "checkpoint_period": 4}
    for name, (amp, change, step, training, _) in FAILURES.items():
        config = tiny_config(2, amp_dtype=amp, **periods)
        ends[name] = attempt(core_context, config, at_step(step, change, training))
    periods = dict.fromkeys(("max_steps", "reporting_period", "validation_period", "checkpoint_period"), 20)
    config = tiny_config(2, amp_dtype="float16", **periods)
    ends["float16, for good"] = attempt(core_context, config, at_step(None, lambda loss: hugely(loss, 1e30)))
    return {"ends": ends, "checkpoints": len(list(Path(folder).iterdir()))}


def overflow_and_fail(core_context: core.Context, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return overflow(core_context), fail(core_context, folder)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("failures")
    return on_ranks(overflow_and_fail, 2, folder, str(folder / "checkpoints"))


Failures = list[tuple[dict[str, Any], dict[str, Any]]]


def test_overflow_on_one_rank_skips_the_step_on_all(failures: Failures) -> None:
    scale = 2.0**16
    for index in range(8):
        skipped = index + 1 in OVERFLOWS
        scale /= 2 if skipped else 1
        for result, _ in failures:
            step = result["history"][index]
            assert step["enabled"] and step["finite"]
            assert step["moved"] == ((False, False) if skipped else (True, True)), index + 1
            assert step["scale"] == scale
            assert math.isfinite(step["grad_norm"]) is not skipped


def test_skipped_steps_are_reported(failures: Failures) -> None:
    reports = failures[0][0]["reports"]
    assert failures[1][0]["reports"] == []
    assert [m["skipped_steps"] for m in reports] == [0, 1, 2, 2]
    assert [m["loss_scale"] for m in reports] == [65536, 32768, 16384, 16384]
    # The means are over the steps that were not skipped.
    for report, steps in zip(reports, ([1, 2], [4], [5], [7, 8]), strict=True):
        taken = [result["history"][step - 1] for result, _ in failures for step in steps]
        for name in ("loss", "grad_norm"):
            assert report[name] == pytest.approx(sum(step[name] for step in taken) / len(taken), rel=1e-6)


@pytest.mark.parametrize("name", FAILURES)
def test_ends_when_not_finite(failures: Failures, name: str) -> None:
    for rank, (_, result) in enumerate(failures):
        code, text, saved = result["ends"][name]
        assert code == 1
        assert saved == [4], "nothing from the steps that failed"
        assert text.count(FAILURES[name][-1]) == (rank == 0), "rank 0 says so once"
        assert text.strip() == "" or rank == 0


def test_ends_when_float16_overflows_for_good(failures: Failures) -> None:
    for rank, (_, result) in enumerate(failures):
        code, text, saved = result["ends"]["float16, for good"]
        assert code == 1 and saved == []
        assert text.count("training is not finite in steps 1..20") == (rank == 0)
        assert result["checkpoints"] == 1 + len(FAILURES), "of the run that overflows twice, and of step 4 each"


# ---- The command line ----

FLOOR = math.log(4)
# Enough to learn by, in a few seconds; bfloat16, as configured for a CPU.
LONGER = {
    "max_seq_len": 32,
    "d_model": 32,
    "simulated_size_in_batches": 1000,
    "lr": 2e-2,
    "max_steps": 120,
    "reporting_period": 40,
    "validation_period": 40,
    "checkpoint_period": 120,
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Outcome, Path]]:
    """Two jobs that start at the same time on one host, and their folders."""
    arguments = {
        "tiny": overrides(amp_dtype="auto", micro_batch_size=3),
        "longer": overrides(amp_dtype="auto", **LONGER),
    }
    started = {}
    for name, words in arguments.items():
        folder = tmp_path_factory.mktemp(name)
        command = [*torchrun(2), str(SCRIPT), "--config", str(SCRIPT.parent / "config.yaml"), *words]
        started[name] = start(command, folder), folder
    return {name: (finish(process), folder) for name, (process, folder) in started.items()}


def test_two_jobs_on_one_host(jobs: dict[str, tuple[Outcome, Path]]) -> None:
    for outcome, folder in jobs.values():
        assert outcome.code == 0, outcome.text
        assert "Traceback" not in outcome.text and "warn" not in outcome.text.lower(), outcome.text
        assert [path.name for path in folder.iterdir()] == ["checkpoints"]


def test_learns(jobs: dict[str, tuple[Outcome, Path]]) -> None:
    outcome, _ = jobs["longer"]
    losses = [float(loss) for loss in re.findall(r"\| validation_loss ([\d.]+)", outcome.text)]
    assert len(losses) == 3
    assert FLOOR < losses[-1] < 1.1 * FLOOR
    assert losses == sorted(losses, reverse=True)
    assert float(re.findall(r"done: loss ([\d.]+)", outcome.text)[0]) > FLOOR, "nothing was memorised"


def test_banner(jobs: dict[str, tuple[Outcome, Path]]) -> None:
    """Width 16, vocabulary 32, 2 blocks, 12 sequences of 16 tokens in micro-batches of 3 on 2 ranks.

    Parameters: (32 + 16) * 16 embedded; a block 2 * 16 + 12 * 16^2 = 3104; the head 16 + 16 * 32; in all 7504.
    FLOPs of a sequence forward: 2 * 16 tokens * (2 * 12 * 16^2 + 16 * 32) + 2 blocks * 4 * 16^2 * 16 = 245760, of
    which attention is 32768; backward twice as much, where attention is not computed again.
    """
    outcome, _ = jobs["tiny"]
    lines = {
        match[1]: match[2]
        for match in re.finditer(r"^  (\w+) +(.+)$", outcome.text.split("this run:")[1].split("INFO")[0], re.M)
    }
    assert outcome.text.count("this run:") == 1
    assert lines["model"].startswith("7,504 parameters: 2 blocks of width 16, 2 heads")
    assert lines["ranks"].startswith("2: 1 node(s) x 2; 1 replica(s) x 2 shard(s)")
    for part in ("bfloat16 (auto: CPU", "reduction bfloat16", "master weights and Adam float32", "loss scaler off"):
        assert part in lines["precision"]
    assert "12 sequences x 16 = 192 tokens" in lines["step"]
    assert "2 micro-batch(es) of 3 sequences" in lines["step"]
    flops = float(re.findall(r"([\d.e+]+) FLOPs", lines["step"])[0])
    assert 12 * 3 * 245_760 * 0.995 < flops < 12 * (3 * 245_760 + 32_768) * 1.005
    assert lines["run"].startswith("12 steps, 2,304 tokens; seed 1")
    assert lines["periods"] == "report every 2, validation every 4, checkpoint every 8 steps"
    # 4 bytes each of weight and gradient and 8 of Adam, of half the parameters.
    assert lines["memory"].startswith("60.03 kB a rank: weights 15.01 kB, gradients 15.01 kB, Adam 30.02 kB")
    # Half the parameters, twice gathered and once reduced, 2 bytes each; for each of 2 micro-batches.
    assert lines["traffic"].startswith("45.02 kB ")
    assert lines["checkpoint"] == "90.05 kB"
    assert "ln(32) = 3.466" in lines["loss"] and "1.386" in lines["loss"]


def test_log_lines(jobs: dict[str, tuple[Outcome, Path]]) -> None:
    outcome, folder = jobs["tiny"]
    steps = re.findall(r"step (\d+)/12 \| (loss|validation_loss|checkpoint) (\S+)(.*)", outcome.text)
    kinds = [(int(step), kind) for step, kind, _, _ in steps]
    assert kinds == [
        (2, "loss"),
        (4, "loss"),
        (4, "validation_loss"),
        (6, "loss"),
        (8, "loss"),
        (8, "validation_loss"),
        (8, "checkpoint"),
        (10, "loss"),
        (12, "loss"),
        (12, "validation_loss"),
        (12, "checkpoint"),
    ]
    number = r"[\d.e+-]+"
    report = re.compile(
        rf" \| grad_norm {number} \| lr {number} \| tokens_per_second {number} \| peak_memory_gib {number}"
        r" \| ETA \d+:\d\d:\d\d"
    )
    for step, kind, value, rest in steps:
        if kind == "loss":
            assert report.fullmatch(rest), rest
            rate = float(re.findall(r"lr (\S+)", rest)[0])
            # Warm-up of 3 steps, then a cosine from 0.01 to 0.001 in 9.
            n = int(step)
            expected = 0.01 * n / 3 if n < 3 else 0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * (n - 3) / 9)))
            assert rate == pytest.approx(expected, rel=1e-4)
        if kind != "checkpoint":
            assert 1 < float(value) < 4
    assert steps[-3][3].endswith("ETA 0:00:00")
    uuids = [value for _, kind, value, _ in steps if kind == "checkpoint"]
    assert sorted(uuids) == sorted(path.name for path in (folder / "checkpoints").iterdir())
    losses = re.findall(r"done: loss ([\d.]+), validation_loss ([\d.]+), floor 1\.3863", outcome.text)
    assert len(losses) == 1
    assert float(losses[0][0]) == pytest.approx(float(steps[-3][2]), abs=1e-3)
    assert float(losses[0][1]) == pytest.approx(float(steps[-2][2]), abs=1e-3)
    last = [line for line in outcome.text.splitlines() if "fsdp_train" in line][-1]
    assert uuids[-1] in last and "--resume" in last and "max_steps" in last


def test_one_process(tmp_path: Path) -> None:
    arguments = overrides(max_steps=2, validation_period=2, warmup_steps=1)
    outcome = run("--config", str(SCRIPT.parent / "config.yaml"), *arguments, ranks=0, cwd=tmp_path)
    assert outcome.code == 0, outcome.text
    assert "1: 1 node(s) x 1; 1 replica(s) x 1 shard(s)" in outcome.text
    assert "float32 (as configured)" in outcome.text
    assert "done: loss" in outcome.text and "warn" not in outcome.text.lower(), outcome.text
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_dry_run(tmp_path: Path) -> None:
    arguments = [*overrides(global_batch_size=32, sharding="hybrid", amp_dtype="auto"), "slots_per_trial=16"]
    outcome = run("--config", str(SCRIPT.parent / "config.yaml"), "--dry-run", *arguments, ranks=0, cwd=tmp_path)
    assert outcome.code == 0, outcome.text
    assert "16: 2 node(s) x 8; 2 replica(s) x 8 shard(s)" in outcome.text
    assert "7,504 parameters" in outcome.text and "bfloat16" in outcome.text
    # Of 7504 parameters: 7/8 gathered twice and reduced once, then an eighth summed up over 2 nodes, half of it there
    # and half back; 2 bytes each.
    assert "traffic    41.27 kB " in outcome.text
    assert list(tmp_path.iterdir()) == []


def test_diverged_run_ends(tmp_path: Path) -> None:
    arguments = overrides(lr="1e30", warmup_steps=0, checkpoint_period=2)
    outcome = run("--config", str(SCRIPT.parent / "config.yaml"), *arguments, ranks=2, cwd=tmp_path)
    assert outcome.code != 0
    assert outcome.text.count("training is not finite in steps 1..2") == 1, outcome.text
    assert 'fsdp_train.py", line' not in outcome.text, "no traceback of ours"
    assert list(tmp_path.iterdir()) == []
