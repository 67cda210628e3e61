"""Stopping changes nothing: not the numbers on as many ranks, and on others nothing but rounding."""

import functools
import itertools
import json
import os
import random
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from determined import core

import fsdp_train
from launch import launch, on_ranks
from model import Transformer
from observe import FIRST_SCALE, Observed, differences, held, observe
from tiny import tiny_config, tiny_run

# ---- Exact on as many ranks ----

STEPS = 10
# Reports after steps 2, 4, 6, 8, validations after 3, 6, 9, a checkpoint after 7, the end of the data's cycle after 4
# and 8, of the warm-up after 4; all after the last. Every step is clipped.
GRID: dict[str, Any] = {"reporting_period": 2, "validation_period": 3, "checkpoint_period": 7, "max_steps": STEPS}
GRID |= {"simulated_size_in_batches": 4, "warmup_steps": 4, "micro_batch_size": 3, "n_layers": 1, "max_grad_norm": 0.5}
REPORTED, VALIDATED = [2, 3, 4, 6, 7, 8, 9, 10], [3, 6, 7, 9, 10]
STOPS = [2, 3, 4, 6, 7, 8, 9]
CASES = [(None, 0.1), ("bfloat16", 0.1), ("float16", 0.0), ("float16", 0.1)]


def exact(core_context: core.Context, storage: Path) -> dict[Any, Any]:
    """For each case an undisturbed run, and one that stops wherever it can; for the last case more."""
    results: dict[Any, Any] = {}
    for amp_dtype, dropout in CASES:
        run = tiny_run(dist.get_world_size(), **GRID, amp_dtype=amp_dtype, dropout=dropout)
        straight = observe(core_context, run, storage)
        chain = [observe(core_context, run, storage, stop=STOPS[0])]
        for stop in [*STOPS[1:], None]:
            chain.append(observe(core_context, run, storage, stop=stop, checkpoint=chain[-1].saved[-1][1]))
        results[amp_dtype, dropout] = straight, chain
    first = observe(core_context, run, storage, stop=4)
    results["pair"] = straight, first, observe(core_context, run, storage, checkpoint=first.saved[-1][1])
    last = observe(core_context, run, storage, stop=STEPS)
    results["last"] = straight, last, observe(core_context, run, storage, checkpoint=last.saved[-1][1])
    return results


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def exact_runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("exact")
    return on_ranks(exact, request.param, folder, folder / "checkpoints")


def assert_same(straight: Observed, parts: list[Observed]) -> None:
    """The parts of an interrupted run are, one after the other, the undisturbed run."""
    assert differences(straight.held, parts[-1].held) == []
    assert straight.scaler == parts[-1].scaler
    for kind in ("reports", "progress", "rates"):
        assert getattr(straight, kind) == [item for part in parts for item in getattr(part, kind)], kind


def test_a_run_that_stops_everywhere_is_the_undisturbed_run(exact_runs: list[dict[Any, Any]]) -> None:
    for (rank, results), case in itertools.product(enumerate(exact_runs), CASES):
        straight, chain = results[case]
        assert_same(straight, chain)
        if rank == 0:
            assert [step for what, step, _ in straight.reports if what == "training"] == REPORTED
            assert [step for what, step, _ in straight.reports if what == "validation"] == VALIDATED
        # Step 7 has a checkpoint of its own: to be preempted there takes no second one.
        assert [step for part in chain for step, _ in part.saved] == [*STOPS, STEPS]
        assert [step for step, _ in straight.saved] == [7, STEPS]
        assert straight.polled == REPORTED[:-1]
    seeds = [seed for results in exact_runs for seed in results[CASES[0]][0].seeds]
    assert len(set(seeds)) == STEPS * len(exact_runs), "each step and rank drops out other numbers"
    finals = [exact_runs[0][case][0].held for case in CASES]
    assert all(differences(a, b) for a, b in itertools.combinations(finals, 2)), "the cases differ"
    reports = exact_runs[0]["float16", 0.1][0].numbers("training")
    skipped = [reports[step]["skipped_steps"] for step in REPORTED]
    assert 0 < skipped[0] < skipped[-1] < STEPS, "float16 overflows and recovers"
    assert len({reports[step]["loss_scale"] for step in REPORTED}) > 2 and FIRST_SCALE > 2**16


def test_a_stop_a_last_stop_and_nothing_left(exact_runs: list[dict[Any, Any]]) -> None:
    for results in exact_runs:
        straight, first, rest = results["pair"]
        assert_same(straight, [first, rest])
        assert any("preempted at step 4" in message for message in first.messages)
        straight, last, nothing = results["last"]
        assert_same(straight, [last])
        assert not any("preempted" in message for message in last.messages), "the last step is an end of its own"
        assert differences(straight.held, nothing.held) == []
        assert (nothing.reports, nothing.progress, nothing.saved, nothing.rates) == ([], [], [], [])
        assert any("nothing left to do at step 10" in message for message in nothing.messages)


# ---- Elastic ----

WORLDS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "4": (4, 1), "2x2": (4, 2)}  # ranks, nodes
HALF, END = 3, 6


def run_of(name: str) -> fsdp_train.Run:
    """The width makes stretches end inside rows, and 3 ranks share no tensor evenly."""
    ranks, nodes = WORLDS[name]
    periods = {"reporting_period": 1, "validation_period": 2, "validation_batches": 1, "max_steps": END}
    sharding = "hybrid" if nodes > 1 else "full"
    return tiny_run(ranks, ranks // nodes, **periods, n_layers=1, d_model=10, sharding=sharding)


def first_half(core_context: core.Context, name: str, storage: Path) -> tuple[Observed, Observed]:
    straight = observe(core_context, run_of(name), storage)
    return straight, observe(core_context, run_of(name), storage, stop=HALF, gather=True)


def second_half(core_context: core.Context, name: str, storages: dict[str, tuple[Path, str]]) -> dict[str, Observed]:
    return {
        other: observe(core_context, run_of(name), storage, checkpoint=uuid, gather=True)
        for other, (storage, uuid) in storages.items()
    }


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    firsts, places = {}, {}
    for name, (ranks, nodes) in WORLDS.items():
        folder = tmp_path / name
        folder.mkdir()
        firsts[name] = on_ranks(first_half, ranks, folder, name, folder / "checkpoints", nodes=nodes)
        places[name] = folder / "checkpoints", firsts[name][0][1].saved[-1][1]
    for name, (ranks, nodes) in WORLDS.items():
        others = {other: place for other, place in places.items() if other != name}
        seconds = on_ranks(second_half, ranks, tmp_path / name, name, others, nodes=nodes)
        for other in others:
            straight, half = firsts[other][0]
            assert len(half.saved_whole) == 4 * (2 + 6 + 2), "of embedding, block and head: a weight and its Adam state"
            for results in seconds:
                assert differences(half.saved_whole, results[other].loaded_whole) == [], (other, name)
                assert results[other].loaded["step"] == HALF
            for step in range(HALF + 1, END + 1):
                here = torch.cat([results[other].batches[step] for results in seconds])
                there = torch.cat([results[0].batches[step] for results in firsts[other]])
                assert torch.equal(here, there) and len(here) == 12, "the very next global batch"
            for kind, key in (("training", "loss"), ("training", "grad_norm"), ("validation", "validation_loss")):
                expected = {step: metrics[key] for step, metrics in straight.numbers(kind).items() if step > HALF}
                resumed = {step: metrics[key] for step, metrics in seconds[0][other].numbers(kind).items()}
                assert resumed == pytest.approx(expected, abs=1e-5, rel=0), (other, name, key)


# ---- What a checkpoint is to another trial, another wrapping, another program ----


def scenarios(core_context: core.Context, storage: Path) -> dict[Any, Any]:
    ranks = dist.get_world_size()
    results: dict[Any, Any] = {}
    run = tiny_run(ranks, **GRID, amp_dtype="float16", dropout=0.1)
    half = observe(core_context, run, storage, stop=4, trial_id=1)
    for trial_id in (1, None, 2):
        results[trial_id] = half, observe(core_context, run, storage, checkpoint=half.saved[-1][1], trial_id=trial_id)
    for recompute in (False, True):
        run = tiny_run(ranks, **GRID, dropout=0.1, activation_checkpointing=recompute)
        other = tiny_run(ranks, **GRID, dropout=0.1, activation_checkpointing=not recompute)
        half = observe(core_context, run, storage, stop=4)
        rest = observe(core_context, other, storage, checkpoint=half.saved[-1][1])
        results["recompute", recompute] = observe(core_context, run, storage), half, rest
    run = tiny_run(ranks)
    state = fsdp_train.build_state(run)
    tokens = next(state.data)
    fsdp_train.train_step(state, tokens, run)
    uuid = fsdp_train.save(core_context, state, run)
    with torch.no_grad():
        results["export"] = uuid, tokens[:, :-1], state.model(tokens[:, :-1])
    return results


@pytest.fixture(scope="module")
def scenario_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scenarios")


@pytest.fixture(scope="module")
def scenario_runs(scenario_folder: Path) -> list[dict[Any, Any]]:
    return on_ranks(scenarios, 2, scenario_folder, scenario_folder / "checkpoints")


def test_another_trial_takes_the_weights_only(scenario_runs: list[dict[Any, Any]]) -> None:
    for results in scenario_runs:
        half, same = results[1]
        assert_same(results[None][1], [same])
        assert same.loaded["step"] == 4 and differences(half.held, same.loaded["held"]) == []
        half, forked = results[2]
        assert (forked.loaded["step"], forked.loaded["skipped_steps"], forked.loaded["position"]) == (0, 0, 0)
        for name, value in forked.loaded["held"].items():
            if ": " in name:
                assert not value.any(), f"{name} is not that of a new run"
            else:
                assert torch.equal(value, half.held[name]), name
        assert [step for step, _ in forked.rates] == list(range(1, STEPS + 1))
        assert forked.loaded["scaler"]["scale"] == FIRST_SCALE
        assert any("weights of trial 1, from step 0" in message for message in forked.messages)


def test_recomputing_can_be_switched_at_a_resume(scenario_runs: list[dict[Any, Any]]) -> None:
    for results in scenario_runs:
        for recompute in (False, True):
            straight, *parts = results["recompute", recompute]
            assert_same(straight, parts)
            assert any("changed: {'activation_checkpointing'" in message for message in parts[1].messages)


def test_export_is_one_plain_file(scenario_runs: list[dict[Any, Any]], scenario_folder: Path) -> None:
    uuid, _, _ = scenario_runs[0]["export"]
    path = scenario_folder / "checkpoints" / uuid
    convert = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    outcome = launch([[*convert, str(path), "weights.pt"]], scenario_folder).finish()
    assert outcome.code == 0, outcome.text
    weights = torch.load(scenario_folder / "weights.pt", weights_only=True)["model"]
    model = Transformer(vocab_size=32, max_seq_len=16, d_model=16, n_heads=2, n_layers=2)
    assert weights.keys() == model.state_dict().keys(), "the model's own names"
    model.load_state_dict(weights)
    for results in scenario_runs:
        _, tokens, logits = results["export"]
        torch.testing.assert_close(model(tokens), logits)


# ---- What is refused ----

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "train_state.json")


def rewrite(path: Path, **changes: Any) -> None:
    """Change train_state.json as its writer could have."""
    document = json.loads((path / "train_state.json").read_text())
    state = document["train_state"] | changes
    crc = zlib.crc32(json.dumps(state).encode())
    (path / "train_state.json").write_text(json.dumps({"crc32": crc, "train_state": state}))


def flip(file: Path, position: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


def damage(name: str, path: Path, dice: random.Random) -> str:
    """Do what `name` says to a copy of a checkpoint; returns what the refusal must name."""
    what, _, file = name.partition(" of ")
    size = (path / file).stat().st_size if file else 0
    if what.startswith("flipped"):
        flip(path / file, dice.randrange(size), dice.randrange(8))
    elif what == "missing":
        (path / file).unlink()
    elif what.startswith("cut"):
        os.truncate(path / file, {"cut to nothing": 0, "cut in half": size // 2, "cut by a byte": size - 1}[what])
    elif what == "a folder in place":
        (path / file).unlink()
        (path / file).mkdir()
    elif what == "older format":
        # As the script's first version wrote it.
        rewrite(path, format=1, torch="2.3.1", files={"__0_0.distcp": [1, 2]})
        return "format, 1, is older"
    elif what == "nothing but shards":
        (path / "train_state.json").unlink()
    elif what == "shards swapped":
        one, two = ((path / name).read_bytes() for name in FILES[1:3])
        (path / FILES[1]).write_bytes(two)
        (path / FILES[2]).write_bytes(one)
        return ".distcp"
    elif what.startswith("holds"):
        (path / "train_state.json").write_text(what[6:])
    return file or "train_state.json"


CUTS = ("missing", "cut to nothing", "cut in half", "cut by a byte")
DAMAGES = [f"{what} of {file}" for file in FILES for what in CUTS]
DAMAGES += [f"flipped {n} of {file}" for file in FILES for n in range(6)]
DAMAGES += [f"a folder in place of {file}" for file in FILES]
DAMAGES += ["older format", "nothing but shards", "shards swapped"]
DAMAGES += [f"holds {text}" for text in ("{}", "[]", "null", '{"crc32": 1}', '{"crc32": 0, "train_state": {}}', "\0")]
OTHERS = [{"vocab_size": 64}, {"max_seq_len": 8}, {"d_model": 24}, {"n_heads": 4}, {"n_layers": 3}]


def refusals(core_context: core.Context, storage: Path) -> dict[str, tuple[str, str, bool]]:
    """For each damage what the refusal must name, what it says, and whether the state is as it was."""
    ranks = dist.get_world_size()
    intact = observe(core_context, tiny_run(ranks, max_steps=2), storage).saved[-1][1]
    results: dict[str, tuple[str, str, bool]] = {}

    def attempt(name: str, folder: str, word: str, **hparams: Any) -> None:
        run = fsdp_train.Run(tiny_config(ranks, **hparams), torch.device("cpu"), dist.get_rank(), ranks)
        object.__setattr__(run, "checkpoint", str(storage / folder))
        state = fsdp_train.build_state(run)
        before, message = held(state), ""
        try:
            fsdp_train.load(core_context, state, run)
        except fsdp_train.Refusal as refusal:
            message = str(refusal)
        results[name] = word, message, differences(before, held(state)) == [] and state.step == 0

    dice = random.Random(0)
    for name in DAMAGES:
        word = ""
        if dist.get_rank() == 0:
            shutil.rmtree(storage / "damaged", ignore_errors=True)
            shutil.copytree(storage / intact, storage / "damaged")
            word = damage(name, storage / "damaged", dice)
        attempt(name, "damaged", fsdp_train.everywhere(functools.partial(str, word))[0])
        fsdp_train.everywhere(lambda: None)  # nobody reads any more when the next copy is made
    for changes in OTHERS:
        attempt(f"other {changes}", intact, "is of another model", **changes)
    if dist.get_rank() == 0:
        (storage / intact / "metadata.json").unlink()
        (storage / intact / "stray file").touch()
    attempt("intact", intact, "")
    return results


def test_every_damage_is_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    for results in on_ranks(refusals, 2, tmp_path, tmp_path / "checkpoints"):
        for name, (word, message, untouched) in results.items():
            if name == "intact":  # metadata.json does not reach cloud storage; nor does a stray file harm
                assert message == "" and not untouched, "nothing was loaded"
                continue
            assert message, f"{name} was loaded"
            assert word in message and "checkpoint" in message, f"{name}: {message}"
            assert len(message.splitlines()) == 1, f"{name}: {message}"
            assert untouched, f"{name} changed the state"
        for changes in OTHERS:
            ((key, value),) = changes.items()
            assert f"{key} = {getattr(tiny_config(), key)}, here {value}" in results[f"other {changes}"][1]


def test_every_bit_of_the_state_file_counts(tmp_path: Path) -> None:
    state = {"format": 2, "files": [], "steps_completed": 3, "scaler": {"scale": 65536.0}, "trial_id": None}
    file = tmp_path / "train_state.json"
    file.write_text('{"train_state": {}}')
    rewrite(tmp_path, **state)
    assert fsdp_train.read_train_state(tmp_path) == state
    for position, bit in itertools.product(range(file.stat().st_size), range(8)):
        flip(file, position, bit)
        with pytest.raises(fsdp_train.Refusal, match=r"train_state\.json"):
            fsdp_train.read_train_state(tmp_path)
        flip(file, position, bit)


# ---- Which checkpoint to go on from ----


def place(directory: Path, name: str, step: int) -> Path:
    path = directory / name
    path.mkdir(parents=True)
    (path / "train_state.json").write_text('{"train_state": {}}')
    rewrite(path, format=2, files=[], steps_completed=step)
    return path


def test_latest_is_the_whole_one_with_the_most_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    for name, step in (("b", 9), ("a", 100), ("d", 20)):
        os.utime(place(folder, name, step), (step % 7, step % 7))
    (place(folder, "unfinished", 400) / "train_state.json").unlink()
    rewrite(place(folder, "old", 500), format=1)
    (folder / "empty").mkdir()
    (folder / "file").touch()
    assert fsdp_train.find_checkpoint("latest", folder) == folder / "a"
    for name in ("unfinished", "old", "empty", "file"):
        (message,) = [m for m in caplog.messages if f"{folder / name}:" in m]
        assert "skipping" in message
    monkeypatch.chdir(tmp_path)
    for resume in ("d", "d/", "runs/d", "./runs/d/", str(folder / "d")):
        assert fsdp_train.find_checkpoint(resume, folder).resolve() == folder / "d", resume
    (tmp_path / "none").mkdir()
    for resume in ("latest", "no-such-uuid", "runs/e"):
        with pytest.raises(fsdp_train.Refusal) as error:
            fsdp_train.find_checkpoint(resume, tmp_path / "none")
        assert f"--resume {resume}" in str(error.value) and str(tmp_path / "none") in str(error.value)
