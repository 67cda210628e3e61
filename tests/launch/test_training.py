"""Training under FSDP: the same numbers however it is split, in the dtypes that it says, and an end when they fail."""

import functools
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from determined import core
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_train
from data import build_data
from launch import ROOT, on_ranks, run, start, torchrun
from model import Embedding, Head, Transformer
from observe import differences, held
from tiny import overrides, tiny_config, tiny_run

CONFIG = ("--config", str(ROOT / "config.yaml"))
Reports = list[dict[str, float]]

# ---- The same numbers, however it is split ----

STEPS = 12
# Reports each step, clips most and validates twice.
CURVE: dict[str, Any] = {"global_batch_size": 8, "max_steps": STEPS, "reporting_period": 1, "validation_period": 6}
CURVE |= {"checkpoint_period": STEPS, "warmup_steps": 4, "max_grad_norm": 0.75}

# Hyperparameters by number of ranks, on nodes of two. Micro-batches of 3 divide nothing.
VARIANTS: dict[int, list[dict[str, Any]]] = {
    1: [*({"micro_batch_size": size} for size in (None, 1, 3)), {"activation_checkpointing": True}],
    2: [{"micro_batch_size": 3}, {"activation_checkpointing": True, "sharding": "hybrid"}],
    4: [
        {"micro_batch_size": 1},
        {"sharding": "hybrid"},
        {"activation_checkpointing": True, "sharding": "hybrid", "micro_batch_size": 1},
    ],
}


def run_of(**hparams: Any) -> fsdp_train.Run:
    """A run of all ranks, on nodes of two."""
    ranks = dist.get_world_size()
    return tiny_run(ranks, min(ranks, 2), **hparams)


def reports_of(core_context: core.Context, run: fsdp_train.Run) -> tuple[Reports, Reports]:
    """What `train` reports on this rank, of training and of validation."""
    training: Reports = []
    validation: Reports = []
    with patch.multiple(
        core_context.train,
        report_training_metrics=lambda _, metrics: training.append(metrics),
        report_validation_metrics=lambda _, metrics: validation.append(metrics),
    ):
        fsdp_train.train(core_context, run)
    return training, validation


def split(core_context: core.Context, variants: list[dict[str, Any]]) -> dict[str, Any]:
    """On each rank: what every variant reports, and how the last one starts, with dropout."""
    curves = [reports_of(core_context, replace(run_of(**CURVE, **v), peak_rate=1e6)) for v in variants]

    run = run_of(**CURVE, **variants[-1], dropout=0.9)
    torch.manual_seed(1000 + dist.get_rank())  # the ranks' generators differ before
    # What FSDP gives a parameter in memory is not zero by luck.
    nan_like = Mock(wraps=functools.partial(torch.full_like, fill_value=math.nan))
    with patch.object(torch, "empty_like", nan_like):
        state = fsdp_train.build_state(run)
    with FSDP.summon_full_params(state.model, writeback=False):
        weights = [p.detach().clone() for p in state.model.parameters()]
    data = build_data(run.config, "validation", dist.get_rank(), dist.get_world_size())
    return {
        "curves": curves,
        "from memory": nan_like.call_count,
        "weights": weights,
        "units": sorted(type(unit.module).__name__ for unit in FSDP.fsdp_modules(state.model)),
        "held": sum(p.numel() for p in state.model.parameters()),
        "adam": sum(t.numel() for s in state.optimizer.state.values() for t in s.values() if t.ndim),
        "adam_steps": {float(s["step"]) for s in state.optimizer.state.values()},
        "decay": [group["weight_decay"] for group in state.optimizer.param_groups],
        "validations": {fsdp_train.validate(state.model, data, run) for _ in range(2)},
    }


@pytest.fixture(scope="module", params=VARIANTS)
def splits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `split` gives on each rank."""
    return on_ranks(split, request.param, tmp_path_factory.mktemp("split"), VARIANTS[request.param])


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


def test_trains_like_the_plain_loop(splits: list[dict[str, Any]], plain: dict[str, list[float]]) -> None:
    for index, variant in enumerate(VARIANTS[len(splits)]):
        assert all(result["curves"][index] == ([], []) for result in splits[1:]), "only rank 0 reports"
        training, validation = splits[0]["curves"][index]
        for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("lr", 1e-12)):
            assert [m[name] for m in training] == pytest.approx(plain[name], abs=tolerance), (variant, name)
        losses = [m["validation_loss"] for m in validation]
        assert losses == pytest.approx(plain["validation_loss"], abs=1e-5), variant
        assert [m["batches"] for m in validation] == [6, 12]
        assert all("loss_scale" not in m and m["peak_memory_gib"] > 0 for m in training)
        assert not {"tokens_per_second", "mfu"} & training[0].keys(), "step 1 also starts and compiles"
        assert all(m["mfu"] == m["tokens_per_second"] / 1e6 > 0 for m in training[1:])


def test_starts_sharded_from_the_weights_of_the_plain_model(splits: list[dict[str, Any]]) -> None:
    """So all numbers of ranks start alike, and nothing is left as it was found in memory."""
    expected = list(plain_transformer().parameters())
    total = sum(p.numel() for p in expected)
    replicas = 2 if len(splits) == 4 else 1  # the last variant of 4 ranks is hybrid: 2 replicas of 2 shards
    for result in splits:
        assert result["from memory"] >= len(expected)
        assert all(torch.equal(p, q) for p, q in zip(result["weights"], expected, strict=True))
        assert result["units"] == ["Block", "Block", "Embedding", "Head", "Transformer"]
        assert result["held"] == pytest.approx(replicas * total / len(splits), abs=8), "even, but for padding"
        assert result["adam"] == 2 * result["held"]
        assert result["adam_steps"] == {0.0}
        assert result["decay"] == [0.0, 0.1]
        assert result["validations"] == splits[0]["validations"] and len(result["validations"]) == 1, "no dropout"
    assert sum(result["held"] for result in splits) == replicas * total


# By ranks: settings and the tolerance of the losses. 10 blocks are more than torch 2.3 compiles by itself; float16 and
# dropout are another matter.
COMPILED: list[tuple[int, dict[str, Any], float]] = [
    (2, {"n_layers": 10}, 1e-5),
    (2, {"n_layers": 1, "amp_dtype": "bfloat16"}, 1e-3),
    (4, {"n_layers": 1, "sharding": "hybrid"}, 1e-5),
]
Losses = dict[tuple[bool, bool], tuple[list[float], int]]


def losses_of_blocks(core_context: core.Context, hparams: dict[str, Any]) -> Losses:
    """The losses and the number of compiled graphs, by whether blocks are compiled and recomputed."""
    results = {}
    shape = hparams | {"global_batch_size": 2 * dist.get_world_size(), "max_steps": 2, "reporting_period": 1}
    for compiled, recomputed in itertools.product((False, True), repeat=2):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run = run_of(**shape, compile=compiled, activation_checkpointing=recomputed)
        training, validation = reports_of(core_context, run)
        losses = [m["loss"] for m in training] + [m["validation_loss"] for m in validation]
        results[compiled, recomputed] = losses, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return results


@pytest.mark.parametrize(("ranks", "hparams", "tolerance"), COMPILED)
def test_compiled_and_recomputed_blocks_give_the_same_losses(
    ranks: int, hparams: dict[str, Any], tolerance: float, tmp_path: Path
) -> None:
    results: Losses = on_ranks(losses_of_blocks, ranks, tmp_path, hparams)[0]
    plain_losses, _ = results[False, False]
    assert len(plain_losses) == 3
    # Blocks that run the same code share their graphs, of training and validation, but not in torch 2.3.
    apart = hparams["n_layers"] if torch.__version__ < "2.4" else 1
    for (compiled, recomputed), (losses, graphs) in results.items():
        # Recomputing alone does exactly the same again.
        assert losses == pytest.approx(plain_losses, abs=tolerance * compiled), (compiled, recomputed)
        assert graphs == 2 * apart * compiled, (compiled, recomputed)


# ---- What is sharded, and how ----


def refused(_: core.Context) -> None:
    tied, buffered, masked, good = (fsdp_train.build_model(tiny_config()) for _ in range(4))
    tied.head.out.weight = tied.embedding.token
    buffered.head.register_buffer("scale", torch.ones(32))
    with torch.device("meta"):
        masked.blocks[0].register_buffer("mask", torch.ones(16, 16), persistent=False)
    for name, model in (("head.out.weight", tied), ("head.scale", buffered), ("blocks.0.mask", masked)):
        with pytest.raises(fsdp_train.Refusal, match=f"^{name}: tied weights or buffers"):
            fsdp_train.shard(model, tiny_run())
    with pytest.raises(fsdp_train.Refusal, match="rank 0"):
        fsdp_train.everywhere(Mock(side_effect=ValueError()))  # without a word
    with (
        patch.object(fsdp_train, "UNITS", (Embedding, Head, nn.TransformerEncoderLayer)),
        pytest.raises(fsdp_train.Refusal, match=r"UNITS.*TransformerEncoderLayer"),
    ):
        fsdp_train.shard(good, tiny_run())


def test_refuses_a_model_that_would_not_be_what_it_seems(tmp_path: Path) -> None:
    on_ranks(refused, 1, tmp_path)


def test_gpus_take_the_weights_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the same seed may draw other numbers on each model of them. On 16 ranks, on nodes of 8."""
    run = fsdp_train.Run(tiny_config(sharding="hybrid"), torch.device("cuda", 0), 0, 8)
    model, fsdp = fsdp_train.build_model(run.config), Mock()
    fsdp.fsdp_modules.return_value = [Mock(module=module) for module in model.modules()]
    monkeypatch.setattr(fsdp_train, "FSDP", fsdp)
    monkeypatch.setattr(fsdp_train, "init_device_mesh", lambda *mesh: mesh)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    fsdp_train.shard(model, run)
    asked = fsdp.call_args.kwargs
    assert asked["sync_module_states"] and asked["device_id"] == torch.device("cuda", 0)
    assert asked["device_mesh"] == ("cuda", (2, 8)), "shard in a node"


# ---- Precision ----

Dtypes = dict[str, set[torch.dtype]]
# Operations, forward and backward, by how their names begin.
OPERATIONS = {
    "matmul": ("mm", "bmm", "addmm", "baddbmm", "_scaled_dot_product"),
    "norm": ("native_layer_norm",),
    "softmax": ("_log_softmax",),
    "loss": ("nll_loss",),
    "gathered": ("allgather", "_allgather"),
    "reduced": ("reduce_scatter", "_reduce_scatter"),
    "gradients": ("linalg_vector_norm",),
}


class Probe(TorchDispatchMode):
    """Collects the dtypes that go into each kind of operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Dtypes = {}

    def add(self, kind: str, values: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        self.seen.setdefault(kind, set()).update(tensor.dtype for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind, names in OPERATIONS.items():
            if func.overloadpacket.__name__.startswith(names):
                self.add(kind, args[:3])  # attention's backward also takes float32 statistics
        return func(*args, **(kwargs or {}))


PRECISIONS = list(itertools.product((None, "bfloat16", "float16"), (None, "float32")))


def look_inside(_: core.Context) -> dict[Any, tuple[Dtypes, float]]:
    """The dtypes in one training step, and its gradient norm, in each precision."""
    results = {}
    for amp, reduce in PRECISIONS:
        run = tiny_run(2, amp_dtype=amp, reduce_dtype=reduce)
        state = fsdp_train.build_state(run)
        with Probe() as probe:
            loss, grad_norm = fsdp_train.train_step(state, next(state.data), run)
        probe.add("results", [loss, grad_norm])
        probe.add("weights", list(state.model.parameters()))
        probe.add("Adam", [list(moments.values()) for moments in state.optimizer.state.values()])
        results[amp, reduce] = probe.seen, grad_norm.item()
    return results


def test_dtypes_inside_a_step(tmp_path: Path) -> None:
    for results in on_ranks(look_inside, 2, tmp_path):
        for amp, reduce in PRECISIONS:
            seen, grad_norm = results[amp, reduce]
            low = getattr(torch, amp or "float32")
            right = {kind: {torch.float32} for kind in (*OPERATIONS, "results", "weights", "Adam")}
            right |= {"matmul": {low}, "gathered": {low}, "reduced": {torch.float32 if reduce else low}}
            assert seen == right, (amp, reduce)
            # Of unscaled gradients, so the same whatever the precision.
            assert grad_norm == pytest.approx(results[None, None][1], rel=0.02)


# ---- Overflow, and numbers that are not finite ----


def hugely(loss: Tensor, factor: float) -> Tensor:
    """The loss as it is, with a gradient that no low precision holds, or none at all does."""
    loss.register_hook(lambda gradient: gradient * factor)
    return loss


def at_step(step: int | None, change: Callable[[Tensor], Tensor], training: bool = True) -> Callable[..., Tensor]:
    """`next_token_loss`, changed on rank 1 only, in the call number `step` of training (or validation) or in all."""
    original, calls = fsdp_train.next_token_loss, 0

    def next_token_loss(*arguments: Any) -> Tensor:
        nonlocal calls
        loss = original(*arguments)
        calls += torch.is_grad_enabled() is training
        here = torch.is_grad_enabled() is training and calls == (step or calls)
        return change(loss) if dist.get_rank() == 1 and here else loss

    return next_token_loss


OVERFLOWS = {3: "in backward", 6: "in a shard"}


def overflow(core_context: core.Context) -> tuple[list[dict[str, Any]], Reports]:
    """A float16 run whose rank 1 overflows twice: in its whole gradient, and in one number of its own shard."""
    train_step, unscale = fsdp_train.train_step, fsdp_train.ShardedGradScaler.unscale_
    history: list[dict[str, Any]] = []

    def overflow_and_unscale(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if dist.get_rank() == 1 and OVERFLOWS.get(len(history) + 1) == "in a shard":
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
            parameters[0].grad.flatten()[0] = math.inf
        unscale(scaler, optimizer)

    def watched(state: fsdp_train.TrainState, *arguments: Any) -> tuple[Tensor, Tensor]:
        before = held(state)
        loss, grad_norm = train_step(state, *arguments)
        after = held(state)
        entry: dict[str, Any] = {"loss": loss.item(), "grad_norm": grad_norm.item(), "scale": state.scaler.get_scale()}
        entry |= {"changed": differences(before, after), "finite": all(t.isfinite().all() for t in after.values())}
        entry["all"] = sorted(name for name, tensor in after.items() if tensor.numel())
        history.append(entry)
        return loss, grad_norm

    with (
        patch.object(fsdp_train, "train_step", watched),
        patch.object(fsdp_train.ShardedGradScaler, "unscale_", overflow_and_unscale),
        patch.object(fsdp_train, "next_token_loss", at_step(3, lambda loss: hugely(loss, 1e30))),
    ):
        run = tiny_run(2, amp_dtype="float16", max_steps=8, validation_period=8)
        return history, reports_of(core_context, run)[0]


def test_overflow_on_one_rank_skips_the_step_on_all_and_is_counted(tmp_path: Path) -> None:
    (history, reports), (other_history, _) = on_ranks(overflow, 2, tmp_path)
    scale = 2.0**16
    for number, entries in enumerate(zip(history, other_history, strict=True), 1):
        skipped = number in OVERFLOWS
        scale /= 2 if skipped else 1
        for entry in entries:
            assert entry["finite"] and entry["scale"] == scale, number
            assert entry["changed"] == ([] if skipped else entry["all"]), number
            assert math.isfinite(entry["grad_norm"]) is not skipped, number
    assert [m["skipped_steps"] for m in reports] == [0, 1, 2, 2]
    assert [m["loss_scale"] for m in reports] == [65536, 32768, 16384, 16384]
    assert all("mfu" not in m for m in reports), "where the peak is not known"
    # The means are over the steps that were not skipped.
    for report, steps in zip(reports, ([1, 2], [4], [5], [7, 8]), strict=True):
        taken = [entries[step - 1] for entries in (history, other_history) for step in steps]
        for name in ("loss", "grad_norm"):
            assert report[name] == pytest.approx(sum(entry[name] for entry in taken) / len(taken), rel=1e-6)


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


def fail(core_context: core.Context) -> dict[str, tuple[str, int]]:
    """How runs with a number that is not finite on rank 1 end here, and how often they saved."""
    ends = {}
    for name, (amp, change, step, training, _) in FAILURES.items():
        periods = {"max_steps": 8, "reporting_period": 2, "validation_period": 4, "checkpoint_period": 4}
        if step is None:
            periods = dict.fromkeys(periods, 20)
        with (
            patch.object(fsdp_train, "next_token_loss", at_step(step, change, training)),
            patch.object(fsdp_train, "save", wraps=fsdp_train.save) as save,
            pytest.raises(fsdp_train.Refusal) as refusal,
        ):
            fsdp_train.train(core_context, tiny_run(2, amp_dtype=amp, **periods))
        ends[name] = str(refusal.value), save.call_count
    return ends


def test_ends_when_not_finite(tmp_path: Path) -> None:
    for ends in on_ranks(fail, 2, tmp_path):
        for name, (*_, says) in FAILURES.items():
            message, saves = ends[name]
            assert says in message, f"{name}: {message}"
            assert saves == ("for good" not in name), f"{name}: at step 4, and nothing from the steps that failed"


# ---- The command line ----

# Enough to learn by, in a few seconds.
LONGER = {"max_seq_len": 32, "d_model": 32, "simulated_size_in_batches": 1000, "lr": 2e-2, "max_steps": 120}
LONGER |= dict.fromkeys(("reporting_period", "validation_period"), 40) | {"checkpoint_period": 120}


def test_two_jobs_on_one_host_learn(tmp_path: Path) -> None:
    """The second under torchrun itself; then a third, of one process, where something turned TF32 on before."""
    folders = {name: tmp_path / name for name in ("tiny", "longer", "one")}
    for folder in folders.values():
        folder.mkdir()
    longer = start(*CONFIG, *overrides(**LONGER), ranks=2, cwd=folders["longer"])
    small = torchrun(*CONFIG, *overrides(micro_batch_size=5, amp_dtype="bfloat16"), ranks=2, cwd=folders["tiny"])
    outcome = longer.finish()
    tf32 = "import atexit, torch; torch.set_float32_matmul_precision('medium'); "
    tf32 += "atexit.register(lambda: print('products in', torch.get_float32_matmul_precision()))"
    one = run(*CONFIG, *overrides(max_steps=4), ranks=0, cwd=folders["one"], before=tf32)
    for ended, job in ((small, "tiny"), (outcome, "longer"), (one, "one")):
        assert ended.code == 0, ended.text
        assert "Traceback" not in ended.text and "warn" not in ended.text.lower(), ended.text
        assert [path.name for path in folders[job].iterdir()] == ["checkpoints"]
    assert "products in highest" in one.text, "float32 means float32"

    losses = [float(loss) for loss in re.findall(r"  validation_loss ([\d.]+)", outcome.text)]
    assert math.log(4) < losses[-1] < 1.1 * math.log(4), "near the floor, not below"
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)

    lines = [line for line in small.text.splitlines() if line.startswith(("INFO", "  "))]
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    banner = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line.startswith("  ")}
    assert banner["ranks"] == "1 node(s) x 2" and banner["sharding"] == "1 replica(s) x 2 shard(s)"
    assert banner["precision"] == "bfloat16 (as configured)" and banner["reduction"] == "bfloat16"
    assert banner["each"] == "rank   6 sequences a step, 5 at a time" and banner["floor"].startswith("1.386")
    kinds = re.findall(r"step (\d+)/12  (loss|validation_loss|checkpoint) ", small.text)
    assert [f"{step} {kind[0]}" for step, kind in kinds] == (
        ["2 l", "4 l", "4 v", "6 l", "8 l", "8 v", "8 c", "10 l", "12 l", "12 v", "12 c"]
    )
    report = r"step 10/12  loss [\d.]+  norm [\d.]+  lr [\d.e-]+  \d+ tok/s  ETA 0:00:0\d"
    assert len(re.findall(report, small.text)) == 1, small.text
    assert small.text.count("first step ") == 1 and "--resume latest" in small.text
    uuids = re.findall(r"checkpoint (\S+)$", small.text, re.M)
    assert sorted(uuids[-2:]) == sorted(path.name for path in (folders["tiny"] / "checkpoints").iterdir())


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
    assert list(tmp_path.iterdir()) == []
    apart = fsdp_train.describe(tiny_config(sharding="hybrid"), 2, 1, None, "")
    assert "1 replica(s) x 2 shard(s)" in apart, "nodes of one rank share what a node would"
