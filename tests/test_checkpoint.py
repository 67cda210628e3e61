"""Stopping changes nothing: not the numbers on as many ranks, and on others nothing but rounding."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from determined import core
from launch import on_ranks
from observe import FIRST_SCALE, SEED, Observed, differences, observe
from tiny import tiny_config
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_train
from model import Transformer

CPU = torch.device("cpu")


# ---- cut ----

SHAPES = [(), (1,), (5,), (1, 4), (4, 1), (3, 4), (2, 3, 4), (3, 1, 2), (3, 3, 1), (1, 1, 1), (2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_tile_every_stretch(shape: tuple[int, ...]) -> None:
    size = torch.Size(shape)
    for start in range(size.numel()):
        for length in range(0 if shape else 1, size.numel() - start + 1):
            flat = torch.arange(start, start + length)
            values, times = torch.full(shape, -1), torch.zeros(shape)
            boxes = list(fsdp_train.cut(flat, start, size))
            for offsets, box in boxes:
                place = tuple(slice(o, o + n) for o, n in zip(offsets, box.shape, strict=True))
                assert values[place].shape == box.shape
                values[place] = box
                times[place] += 1
                box += 1000
            inside = (torch.arange(size.numel()) >= start) & (torch.arange(size.numel()) < start + length)
            expected = torch.arange(size.numel()).where(inside, torch.tensor(-1))
            assert torch.equal(values.flatten(), expected)
            assert torch.equal(times.flatten(), inside.float())
            assert (flat >= 1000).all(), "a box is a copy: loading into it would be lost"
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


# ---- Exact on as many ranks ----

STEPS = 10
# Reports after steps 2, 4, 6, 8, validations after 3, 6, 9, a checkpoint after 7, the end of the data's cycle after 4
# and 8, of the warm-up after 4; all after the last.
PERIODS = {"reporting_period": 2, "validation_period": 3, "checkpoint_period": 7}
GRID: dict[str, Any] = {
    **PERIODS,
    "max_steps": STEPS,
    "simulated_size_in_batches": 4,
    "warmup_steps": 4,
    "micro_batch_size": 3,
    "n_layers": 1,
    "max_grad_norm": 0.5,  # clips every step
}
REPORTED, VALIDATED = [2, 3, 4, 6, 7, 8, 9, 10], [3, 6, 7, 9, 10]
STOPS = [2, 3, 4, 6, 7, 8, 9]
CASES = [(amp_dtype, dropout) for amp_dtype in (None, "bfloat16", "float16") for dropout in (0.0, 0.1)]


def exact(core_context: core.Context) -> dict[Any, Any]:
    """For each case an undisturbed run, and one that stops wherever it can; for the last case more."""
    results: dict[Any, Any] = {}
    for amp_dtype, dropout in CASES:
        config = tiny_config(dist.get_world_size(), **GRID, amp_dtype=amp_dtype, dropout=dropout)
        straight = observe(core_context, config, trial_id=1)
        chain = [observe(core_context, config, stop=STOPS[0], trial_id=1)]
        for stop in [*STOPS[1:], None]:
            chain.append(observe(core_context, config, stop=stop, checkpoint=chain[-1].saved[-1][1], trial_id=1))
        results[amp_dtype, dropout] = straight, chain
    pairs = {}
    for stop in STOPS[::3]:
        first = observe(core_context, config, stop=stop, trial_id=1)
        pairs[stop] = first, observe(core_context, config, checkpoint=first.saved[-1][1], trial_id=1)
    results["pairs"] = straight, pairs

    last = observe(core_context, config, stop=STEPS, trial_id=1)
    results["last"] = straight, last, observe(core_context, config, checkpoint=last.saved[-1][1], trial_id=1)
    return results


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def exact_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return on_ranks(exact, request.param, tmp_path_factory.mktemp("exact"))


def assert_same(straight: Observed, parts: list[Observed]) -> None:
    """The parts of an interrupted run are, one after the other, the undisturbed run."""
    assert differences(straight.held, parts[-1].held) == []
    assert straight.scaler == parts[-1].scaler
    for kind in ("reports", "progress", "rates"):
        assert getattr(straight, kind) == [item for part in parts for item in getattr(part, kind)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_that_stops_everywhere_is_the_undisturbed_run(exact_runs: list[dict[Any, Any]], case: Any) -> None:
    for rank, results in enumerate(exact_runs):
        straight, chain = results[case]
        assert_same(straight, chain)
        if rank == 0:
            assert [step for what, step, _ in straight.reports if what == "training"] == REPORTED
            assert [step for what, step, _ in straight.reports if what == "validation"] == VALIDATED
        assert [part.saved[-1][0] for part in chain] == [*STOPS, STEPS]
        # Step 7 has a checkpoint of its own: to be preempted there takes no second one.
        assert [step for part in chain for step, _ in part.saved] == [*STOPS, STEPS]
        assert [step for step, _ in straight.saved] == [7, STEPS]
        assert straight.polled == REPORTED[:-1]


def test_a_run_that_stops_once_is_the_undisturbed_run(exact_runs: list[dict[Any, Any]]) -> None:
    for results in exact_runs:
        straight, pairs = results["pairs"]
        for stop, parts in pairs.items():
            assert_same(straight, parts)
            assert len(parts[0].rates) == stop


def test_float16_overflows_and_recovers_in_the_grid(exact_runs: list[dict[Any, Any]]) -> None:
    reports = exact_runs[0]["float16", 0.1][0].numbers("training")
    skipped = [reports[step]["skipped_steps"] for step in REPORTED]
    assert 0 < skipped[0] < skipped[-1] < STEPS
    assert len({reports[step]["loss_scale"] for step in REPORTED}) > 2


def test_runs_of_the_grid_differ(exact_runs: list[dict[Any, Any]]) -> None:
    finals = [exact_runs[0][case][0].held for case in CASES]
    for i, a in enumerate(finals):
        assert all(differences(a, b) for b in finals[:i])


def test_a_preemption_on_the_last_step_is_the_end(exact_runs: list[dict[Any, Any]]) -> None:
    for results in exact_runs:
        straight, last, _ = results["last"]
        assert_same(straight, [last])
        assert [step for step, _ in last.saved] == [7, STEPS]
        assert not any("preempted" in message for message in last.messages)


def test_with_nothing_left_to_do_nothing_is_done(exact_runs: list[dict[Any, Any]]) -> None:
    for results in exact_runs:
        straight, _, nothing = results["last"]
        assert differences(straight.held, nothing.held) == []
        assert (nothing.reports, nothing.progress, nothing.saved, nothing.rates) == ([], [], [], [])
        assert any("nothing left to do at step 10 of 10" in message for message in nothing.messages)


# ---- Elastic ----

WORLDS = {"1": (1, 1), "2": (2, 2), "3": (3, 3), "4": (4, 4), "2x2": (4, 2)}
HALF, END = 3, 6


def leave() -> None:
    """End the process group, once its threads have freed the tensors of the last collectives.

    torch 2.3 waits for these threads while it holds the lock that they need for that.
    """
    time.sleep(0.3)
    dist.destroy_process_group()


def agree_on_port(note: Path) -> int:
    """A free port, which rank 0 writes down and the others read."""
    if os.environ["RANK"] == "0":
        with socket.create_server(("", 0)) as server:
            note.with_suffix(".partial").write_text(str(server.getsockname()[1]))
        note.with_suffix(".partial").rename(note)
    while not note.exists():
        time.sleep(0.01)
    return int(note.read_text())


@contextlib.contextmanager
def world(name: str, storage: Path, note: str) -> Iterator[core.Context | None]:
    """A process group of its own over the first ranks; None on the others."""
    ranks, local_ranks = WORLDS[name]
    rank = int(os.environ["RANK"])
    if rank >= ranks:
        yield None
        return
    places = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": local_ranks, "LOCAL_RANK": rank % local_ranks}
    places |= {
        "GROUP_RANK": rank // local_ranks,
        "GROUP_WORLD_SIZE": ranks // local_ranks,
        "MASTER_PORT": agree_on_port(storage / note),
    }
    before = dict(os.environ)
    os.environ |= {variable: str(value) for variable, value in places.items()}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # its keys are those of the first process group
    with core.init(distributed=fsdp_train.connect(False), checkpoint_storage=str(storage)) as core_context:
        yield core_context
        dist.barrier()
    leave()
    os.environ.clear()
    os.environ |= before


def elastic(core_context: core.Context, storage: Path) -> dict[Any, Any]:
    """On each world an undisturbed run and one that stops; then each of these resumed on every other world."""
    leave()

    def config_of(name: str) -> fsdp_train.Config:
        ranks, local_ranks = WORLDS[name]
        sharding = "hybrid" if local_ranks < ranks else "full"
        # The width makes stretches end inside rows, and 3 ranks share no tensor evenly.
        periods = {"reporting_period": 1, "validation_period": 2, "validation_batches": 1}
        return tiny_config(ranks, max_steps=END, **periods, n_layers=1, d_model=10, sharding=sharding)

    results: dict[Any, Any] = {}
    for name in WORLDS:
        with world(name, storage, f"first {name}") as here:
            if here:
                results[name, "straight"] = observe(here, config_of(name))
                results[name, "half"] = observe(here, config_of(name), stop=HALF, gather=True)
                if dist.get_rank() == 0:
                    (storage / f"of {name}").write_text(results[name, "half"].saved[-1][1])
    for name in WORLDS:
        with world(name, storage, f"second {name}") as here:
            for other in WORLDS:
                if here and other != name:
                    uuid = (storage / f"of {other}").read_text()
                    results[other, name] = observe(here, config_of(name), checkpoint=uuid, gather=True)
    os.environ["MASTER_PORT"] = str(agree_on_port(storage / "end"))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    dist.init_process_group("gloo")
    return results


@pytest.fixture(scope="module")
def elastic_runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "storage").mkdir()
    return on_ranks(elastic, 4, folder, folder / "storage")


def global_batch(runs: list[dict[Any, Any]], key: tuple[str, str], name: str, step: int) -> Tensor:
    """What the ranks of the world `name` drew together."""
    return torch.cat([results[key].batches[step] for results in runs[: WORLDS[name][0]]])


@pytest.mark.parametrize(("other", "name"), list(itertools.permutations(WORLDS, 2)))
def test_another_number_of_ranks_goes_on(elastic_runs: list[dict[Any, Any]], other: str, name: str) -> None:
    half = elastic_runs[0][other, "half"]
    assert len(half.saved_whole) == 4 * (2 + 6 + 2)  # of embedding, blocks and head: a weight and its Adam state
    assert all(half.saved_whole[f"{weight} exp_avg_sq"].any() for weight in ("head.out.weight", "embedding.token"))
    for results in elastic_runs[: WORLDS[name][0]]:
        assert differences(half.saved_whole, results[other, name].loaded_whole) == []
        assert results[other, name].loaded["step"] == HALF
    for step in range(HALF + 1, END + 1):
        here = global_batch(elastic_runs, (other, name), name, step)
        assert torch.equal(here, global_batch(elastic_runs, (other, "straight"), other, step))
        assert len(here) == 12
    straight, resumed = elastic_runs[0][other, "straight"], elastic_runs[0][other, name]
    for kind, key in (("training", "loss"), ("training", "grad_norm"), ("validation", "validation_loss")):
        expected = {step: metrics[key] for step, metrics in straight.numbers(kind).items() if step > HALF}
        assert {step: metrics[key] for step, metrics in resumed.numbers(kind).items()} == pytest.approx(
            expected, abs=1e-5, rel=0
        )
        assert expected


# ---- What a checkpoint is to another trial, another model wrapping, another program ----


class Traffic(TorchDispatchMode):
    """Adds up the bytes that this rank puts into collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.bytes += sum(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def traffic(core_context: core.Context, d_model: int) -> tuple[int, int, int]:
    """Bytes of the weights, of the collectives of a save, and of those that gather the weights."""
    config = tiny_config(dist.get_world_size(), d_model=d_model)
    state = fsdp_train.build_state(config, SEED, CPU, None)
    with Traffic() as saving:
        fsdp_train.save(core_context, state, config, SEED, None)
    with Traffic() as gathering, FSDP.summon_full_params(state.model):
        pass
    return sum(p.nbytes for p in fsdp_train.build_model(config).parameters()), saving.bytes, gathering.bytes


def scenarios(core_context: core.Context) -> dict[Any, Any]:
    ranks = dist.get_world_size()
    results: dict[Any, Any] = {"traffic": [traffic(core_context, d_model) for d_model in (16, 128)]}

    config = tiny_config(ranks, **GRID, amp_dtype="float16", dropout=0.1)
    straight = observe(core_context, config)
    for owner, trial_id in ((1, 1), (None, None), (1, None), (1, 2), (None, 2)):
        half = observe(core_context, config, stop=4, trial_id=owner)
        rest = observe(core_context, config, checkpoint=half.saved[-1][1], trial_id=trial_id)
        results["trials", owner, trial_id] = straight, half, rest

    for recompute in (False, True):
        config = tiny_config(ranks, **GRID, dropout=0.1, activation_checkpointing=recompute)
        other = tiny_config(ranks, **GRID, dropout=0.1, activation_checkpointing=not recompute)
        half = observe(core_context, config, stop=4)
        resumed = observe(core_context, other, checkpoint=half.saved[-1][1])
        results["recompute", recompute] = observe(core_context, config), half, resumed

    config = tiny_config(ranks)
    state = fsdp_train.build_state(config, SEED, CPU, None)
    tokens = next(state.data)
    fsdp_train.train_step(state, tokens, config, None)
    uuid = fsdp_train.save(core_context, state, config, SEED, None)
    with torch.no_grad():
        results["export"] = config, uuid, tokens[:, :-1], state.model(tokens[:, :-1])
    return results


@pytest.fixture(scope="module")
def scenario_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenarios")


@pytest.fixture(scope="module")
def scenario_runs(scenario_folder: Path) -> list[dict[Any, Any]]:
    return on_ranks(scenarios, 2, scenario_folder)


def test_a_save_moves_no_parameter(scenario_runs: list[dict[Any, Any]]) -> None:
    for results in scenario_runs:
        (small, small_save, _), (large, large_save, large_gather) = results["traffic"]
        assert large > 30 * small
        assert 0 < large_save < 1.2 * small_save
        assert large_gather > large / 2, "the count misses the collectives that it is to find"


@pytest.mark.parametrize(("owner", "trial_id"), [(1, 1), (None, None), (1, None)], ids=str)
def test_the_same_trial_and_a_local_run_go_on(scenario_runs: list[dict[Any, Any]], owner: Any, trial_id: Any) -> None:
    for results in scenario_runs:
        straight, half, resumed = results["trials", owner, trial_id]
        assert_same(straight, [half, resumed])
        uuid = half.saved[-1][1]
        assert any(f"going on from checkpoint {uuid} at step 4" in message for message in resumed.messages)


@pytest.mark.parametrize("owner", [1, None], ids=str)
def test_another_trial_takes_the_weights_only(scenario_runs: list[dict[Any, Any]], owner: Any) -> None:
    for rank, results in enumerate(scenario_runs):
        straight, half, forked = results["trials", owner, 2]
        loaded = forked.loaded
        assert half.scaler != loaded["scaler"], "nothing to tell a fresh scaler by"
        assert all(tensor.any() for name, tensor in half.held.items() if ": " in name), "nor fresh Adam states"
        assert (loaded["step"], loaded["skipped_steps"], loaded["position"]) == (0, 0, 0)
        assert loaded["scaler"]["scale"] == FIRST_SCALE
        assert loaded["scaler"]["_growth_tracker"] == 0
        for name, tensor in loaded["held"].items():
            if ": " in name:
                assert not tensor.any(), name
            else:
                assert torch.equal(tensor, half.held[name]), name
                assert not torch.equal(tensor, straight.held[name]) or "norm" in name
        assert [step for step, _ in forked.rates] == list(range(1, STEPS + 1))
        assert forked.rates == straight.rates
        assert differences(forked.batches, straight.batches) == []
        if rank == 0:
            assert [step for what, step, _ in forked.reports if what == "training"] == REPORTED
        uuid = half.saved[-1][1]
        (message,) = [message for message in forked.messages if uuid in message]
        assert f"weights from checkpoint {uuid} of trial {owner}; this is trial 2, so it starts at step 0" in message


@pytest.mark.parametrize("recompute", [True, False])
def test_activation_checkpointing_may_change(scenario_runs: list[dict[Any, Any]], recompute: bool) -> None:
    for results in scenario_runs:
        straight, half, resumed = results["recompute", recompute]
        assert_same(straight, [half, resumed])
        (message,) = [message for message in resumed.messages if "changed since" in message]
        assert f"activation_checkpointing was {recompute}, is {not recompute}" in message


def test_export_to_a_plain_file(scenario_runs: list[dict[Any, Any]], scenario_folder: Path, tmp_path: Path) -> None:
    config, uuid, _, _ = scenario_runs[0]["export"]
    tool = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    checkpoint = str(scenario_folder / "checkpoints" / uuid)
    subprocess.run([*tool, checkpoint, "weights.pt"], cwd=tmp_path, check=True, timeout=120)
    sizes = {name: getattr(config, name) for name in fsdp_train.SHAPE}
    model = Transformer(**sizes)
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True)["model"])
    for results in scenario_runs:
        _, _, tokens, logits = results["export"]
        with torch.no_grad():
            assert torch.equal(model(tokens), logits)


def compiled(core_context: core.Context) -> dict[bool, tuple[Observed, Observed, Observed]]:
    """A run that goes on with compilation and recomputation the other way round, and one without either."""
    results = {}
    plain = tiny_config(**GRID)
    both = tiny_config(**GRID, compile=True, activation_checkpointing=True)
    for first, second in ((plain, both), (both, plain)):
        half = observe(core_context, first, stop=4)
        resumed = observe(core_context, second, checkpoint=half.saved[-1][1])
        results[first.compile] = observe(core_context, plain), half, resumed
    return results


def test_compilation_may_change(tmp_path: Path) -> None:
    ((results,),) = [on_ranks(compiled, 1, tmp_path)]
    for was_compiled, (straight, half, resumed) in results.items():
        assert differences(half.held, resumed.loaded["held"]) == []
        (message,) = [message for message in resumed.messages if "changed since" in message]
        assert f"compile was {was_compiled}, is {not was_compiled}" in message
        losses = [[metrics["loss"] for _, _, metrics in part.reports if "loss" in metrics] for part in (half, resumed)]
        expected = [metrics["loss"] for _, _, metrics in straight.reports if "loss" in metrics]
        assert losses[0] + losses[1] == pytest.approx(expected, abs=1e-4)
