"""Stopping changes nothing: not the numbers on as many ranks, and on others nothing but rounding."""

import dataclasses
import itertools
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from determined import core

import fsdp_train
from launch import ROOT, on_ranks, run
from observe import FIRST_SCALE, Observed, differences, held, observe
from tiny import overrides, tiny_config, tiny_run

CHECKPOINTS = Path("checkpoints")  # of on_ranks, in the current folder

# ---- Exact on as many ranks ----

STEPS = 10
# Reports after steps 2, 4, 6, 8, validations after 3, 6, 9, a checkpoint after 7, the end of the data's cycle after 4
# and 8, of the warm-up after 4; all after the last. Every step is clipped.
GRID: dict[str, Any] = {"reporting_period": 2, "validation_period": 3, "checkpoint_period": 7, "max_steps": STEPS}
GRID |= {"simulated_size_in_batches": 4, "warmup_steps": 4, "micro_batch_size": 3, "n_layers": 1, "max_grad_norm": 0.5}
GRID |= {"dropout": 0.1}
REPORTED, VALIDATED = [2, 3, 4, 6, 7, 8, 9, 10], [3, 6, 7, 9, 10]
STOPS = [2, 3, 4, 6, 7, 8, 9]
DTYPES = [None, "bfloat16", "float16"]


def exact(core_context: core.Context) -> dict[Any, Any]:
    """For each dtype an undisturbed run, and the parts of one that stops wherever it can.

    Every second part recomputes its blocks, which changes nothing either.
    """
    results: dict[Any, Any] = {}
    for amp_dtype in DTYPES:
        run = tiny_run(dist.get_world_size(), **GRID, amp_dtype=amp_dtype)
        other = tiny_run(dist.get_world_size(), **GRID, amp_dtype=amp_dtype, activation_checkpointing=True)
        parts = [observe(core_context, run, CHECKPOINTS, stop=STOPS[0])]
        for stop, this in zip([*STOPS[1:], None], itertools.cycle((other, run))):
            parts.append(observe(core_context, this, CHECKPOINTS, stop=stop, checkpoint=parts[-1].saved[-1][1]))
        results[amp_dtype] = observe(core_context, run, CHECKPOINTS), parts
    return results


def assert_same(straight: Observed, parts: list[Observed]) -> None:
    """The parts of an interrupted run are, one after the other, the undisturbed run."""
    assert differences(straight.held, parts[-1].held) == []
    assert straight.scaler == parts[-1].scaler
    for kind in ("reports", "progress", "rates"):
        assert getattr(straight, kind) == [item for part in parts for item in getattr(part, kind)], kind


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_stops_everywhere_is_the_undisturbed_run(ranks: int, tmp_path: Path) -> None:
    results = on_ranks(exact, ranks, tmp_path)
    for of_rank, amp_dtype in itertools.product(results, DTYPES):
        straight, parts = of_rank[amp_dtype]
        assert_same(straight, parts)
        # Step 7 has a checkpoint of its own: to be preempted there takes no second one.
        assert [step for part in parts for step, _ in part.saved] == [*STOPS, STEPS]
        assert [step for step, _ in straight.saved] == [7, STEPS]
        assert straight.polled == REPORTED[:-1], "the last step is an end of its own"
        for stop, part in zip(STOPS, parts, strict=False):
            assert f"preempted at step {stop}" in part.messages
        assert any("changed: {'activation_checkpointing'" in message for message in parts[1].messages)
    seeds = [seed for of_rank in results for seed in of_rank[None][0].seeds]
    assert len(set(seeds)) == STEPS * ranks, "each step and rank drops out other numbers"

    firsts = [results[0][amp_dtype][0] for amp_dtype in DTYPES]
    for straight in firsts:
        assert list(straight.numbers("training")) == REPORTED
        assert list(straight.numbers("validation")) == VALIDATED
    assert all(differences(a.held, b.held) for a, b in itertools.combinations(firsts, 2)), "the dtypes differ"
    reports = list(firsts[-1].numbers("training").values())
    assert 0 < reports[0]["skipped_steps"] < reports[-1]["skipped_steps"] < STEPS, "float16 overflows and recovers"
    assert len({report["loss_scale"] for report in reports}) > 2 and FIRST_SCALE > 2**16


# ---- Elastic ----

WORLDS = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2)]  # ranks, nodes
HALF, END = 3, 6


def run_on(nodes: int) -> fsdp_train.Run:
    """The width makes stretches end inside rows, and 3 ranks share no tensor evenly."""
    ranks = dist.get_world_size()
    periods = {"reporting_period": 1, "validation_period": 2, "validation_batches": 1, "max_steps": END}
    sharding = "hybrid" if nodes > 1 else "full"
    return tiny_run(ranks, ranks // nodes, **periods, n_layers=1, d_model=10, sharding=sharding)


def first_half(core_context: core.Context, nodes: int) -> tuple[Observed, Observed]:
    straight = observe(core_context, run_on(nodes), CHECKPOINTS)
    return straight, observe(core_context, run_on(nodes), CHECKPOINTS, stop=HALF, gather=True)


def second_half(core_context: core.Context, nodes: int, checkpoints: list[str]) -> list[Observed]:
    return [observe(core_context, run_on(nodes), CHECKPOINTS, checkpoint=path, gather=True) for path in checkpoints]


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    firsts, checkpoints = [], []
    for ranks, nodes in WORLDS:
        firsts.append(on_ranks(first_half, ranks, tmp_path, nodes, nodes=nodes))
        checkpoints.append(str(tmp_path / CHECKPOINTS / firsts[-1][0][1].saved[-1][1]))
    for after in WORLDS:
        ranks, nodes = after
        seconds = on_ranks(second_half, ranks, tmp_path, nodes, checkpoints, nodes=nodes)
        for before, first, *second in zip(WORLDS, firsts, *seconds, strict=True):
            straight, half = first[0]
            assert len(half.saved_whole) == 4 * (2 + 6 + 2), "of embedding, block and head: a weight and its Adam state"
            for seen in second:
                assert differences(half.saved_whole, seen.loaded_whole) == [], (before, after)
                assert seen.loaded["step"] == HALF
            for step in range(HALF + 1, END + 1):
                here = torch.cat([seen.batches[step] for seen in second])
                there = torch.cat([undisturbed.batches[step] for undisturbed, _ in first])
                assert torch.equal(here, there) and len(here) == 12, "the very next global batch"
            for kind, key in (("training", "loss"), ("training", "grad_norm"), ("validation", "validation_loss")):
                expected = {step: metrics[key] for step, metrics in straight.numbers(kind).items() if step > HALF}
                resumed = {step: metrics[key] for step, metrics in second[0].numbers(kind).items()}
                assert resumed == pytest.approx(expected, abs=1e-5, rel=0), (before, after, key)


# ---- Another trial ----


def of_trials(core_context: core.Context) -> list[Observed]:
    """What trial 1 did to step 4, and how trial 1, a local run and trial 2 go on from there."""
    run = tiny_run(dist.get_world_size(), **GRID, amp_dtype="float16")
    half = observe(core_context, run, CHECKPOINTS, stop=4, trial_id=1)
    uuid = half.saved[-1][1]
    return [half, *(observe(core_context, run, CHECKPOINTS, checkpoint=uuid, trial_id=id) for id in (1, None, 2))]


def test_another_trial_takes_the_weights_only(tmp_path: Path) -> None:
    for half, same, local, forked in on_ranks(of_trials, 2, tmp_path):
        assert_same(local, [same])
        assert same.loaded["step"] == 4 and differences(half.held, same.loaded["held"]) == []
        assert (forked.loaded["step"], forked.loaded["skipped_steps"], forked.loaded["position"]) == (0, 0, 0)
        for name, value in forked.loaded["held"].items():
            if ": " in name:
                assert not value.any(), f"{name} is not that of a new run"
            else:
                assert torch.equal(value, half.held[name]), name
        assert [step for step, _ in forked.rates] == list(range(1, STEPS + 1))
        assert forked.loaded["scaler"]["scale"] == FIRST_SCALE
        assert any("weights of trial 1, from step 0" in message for message in forked.messages)


# ---- What is refused ----

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "train_state.json")
OTHERS = [{"vocab_size": 64}, {"max_seq_len": 8}, {"d_model": 24}, {"n_heads": 4}, {"n_layers": 3}]


def flip(content: bytes, position: int) -> bytes:
    flipped = bytearray(content)
    flipped[position] ^= 1
    return bytes(flipped)


def attempts(core_context: core.Context, cases: list[tuple[Path, dict[str, Any]]]) -> list[tuple[str, bool]]:
    """For each checkpoint and hyperparameters the refusal, and whether the state is as it was."""
    results = []
    for path, hparams in cases:
        run = dataclasses.replace(tiny_run(2, **hparams), checkpoint=str(path))
        state = fsdp_train.build_state(run)
        before, message = held(state), ""
        try:
            fsdp_train.load(core_context, state, run)
        except fsdp_train.Refusal as refusal:
            message = str(refusal)
        results.append((message, differences(before, held(state)) == [] and state.step == 0))
    return results


def test_every_damage_is_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    outcome = run("--config", str(ROOT / "config.yaml"), *overrides(max_steps=2), ranks=2, cwd=tmp_path)
    assert outcome.code == 0, outcome.text
    (intact,) = (tmp_path / "checkpoints").iterdir()
    cases: list[tuple[Path, dict[str, Any]]] = []
    refusals = []
    for name in FILES:
        content = (intact / name).read_bytes()
        middle = len(content) // 2
        damages = {"missing": b"", "a folder": b"", "empty": b"", "half": content[:middle], "short": content[:-1]}
        damages |= {f"bit {position}": flip(content, position) for position in (0, middle // 2, middle, -1)}
        for damage, changed in damages.items():
            path = shutil.copytree(intact, tmp_path / f"copy {len(cases)}")
            (path / name).unlink()
            if damage == "a folder":
                (path / name).mkdir()
            elif damage != "missing":
                (path / name).write_bytes(changed)
            cases.append((path, {}))
            refusals.append((f"{name} {damage}", name))
    for changes in OTHERS:
        ((key, value),) = changes.items()
        cases.append((intact, changes))
        refusals.append((key, f"is of another model: {key} = {getattr(tiny_config(), key)}, here {value}"))
    # Cloud storage lacks the first; the second does no harm.
    (intact / "metadata.json").unlink()
    (intact / "stray file").touch()
    for results in on_ranks(attempts, 2, tmp_path, [*cases, (intact, {})]):
        assert results.pop() == ("", False), "nothing was loaded of the intact one"
        for (path, _), (case, words), (message, untouched) in zip(cases, refusals, results, strict=True):
            assert message, f"{case} was loaded"
            assert message.startswith(f"checkpoint {path}: ") and words in message, f"{case}: {message}"
            assert len(message.splitlines()) == 1, f"{case}: {message}"
            assert untouched, f"{case} changed the state"


# ---- Which checkpoint to go on from ----


def write_state(path: Path, **state: Any) -> None:
    """A folder with the train_state.json that the script would write."""
    path.mkdir(parents=True)
    crc = zlib.crc32(json.dumps(state).encode())
    (path / "train_state.json").write_text(json.dumps({"crc32": crc, "train_state": state}))


def test_latest_is_the_whole_one_with_the_most_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    for name, step in (("b", 9), ("a", 100), ("d", 20)):
        write_state(folder / name, format=2, steps_completed=step)
    write_state(folder / "old", format=1, steps_completed=500)
    skipped = {"old": "its format, 1, is older", "empty": "train_state.json is not", "file": "train_state.json is not"}
    (folder / "empty").mkdir()
    (folder / "file").touch()
    for number, text in enumerate(("{}", "[]", "null", '{"crc32": 1}', '{"crc32": 0, "train_state": {}}', "\0")):
        (folder / f"wrong {number}").mkdir()
        (folder / f"wrong {number}" / "train_state.json").write_text(text)
        skipped[f"wrong {number}"] = "train_state.json is not whole"
    assert fsdp_train.find_checkpoint("latest", folder) == folder / "a"
    for name, why in skipped.items():
        (message,) = [message for message in caplog.messages if f"{folder / name}:" in message]
        assert message.startswith(f"skipping checkpoint {folder / name}: {why}")
    monkeypatch.chdir(tmp_path)
    for resume in ("d", "d/", "runs/d", "./runs/d/", str(folder / "d")):
        assert fsdp_train.find_checkpoint(resume, folder).resolve() == folder / "d", resume
    (tmp_path / "none").mkdir()
    for resume in ("latest", "no-such-uuid", "runs/e"):
        with pytest.raises(fsdp_train.Refusal) as error:
            fsdp_train.find_checkpoint(resume, tmp_path / "none")
        assert f"--resume {resume}" in str(error.value) and str(tmp_path / "none") in str(error.value)
