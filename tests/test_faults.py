"""Kills, full disks and broken checkpoints: the job ends soon, says why, and the next one goes on unharmed."""

import contextlib
import io
import itertools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from determined import core
from launch import ROOT, SCRIPT, Outcome, finish, on_ranks, start, torchrun
from observe import SEED, differences, held, observe
from processes import (
    kill_all,
    last_state,
    leftovers,
    new_mark,
    processes,
    read_tensors,
    unfinished_checkpoints,
    whole_checkpoints,
)
from tiny import overrides, tiny_config

import fsdp_train

CPU = torch.device("cpu")
SABOTAGE = Path(__file__).parent / "sabotage.py"
SOON = 60  # seconds from a fault to the end of the job
FINISHED_RUNS = 3


# ---- Broken checkpoints, on two ranks ----

SHARDS = ("__0_0.distcp", "__1_0.distcp")
FILES = (*SHARDS, ".metadata", "train_state.json")
FLIPS = 40  # random ones in each file, besides those of its ends


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of train_state.json as its writer would: with the right checksum."""
    state = json.loads((path / "train_state.json").read_text())["train_state"] | changes
    document = {"crc32": zlib.crc32(json.dumps(state).encode()), "train_state": state}
    (path / "train_state.json").write_text(json.dumps(document))


def flip(file: Path, position: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


def cut_off(file: Path, size: int) -> None:
    os.truncate(file, size)


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def remove(path: Path, *names: str) -> None:
    for name in names:
        (path / name).unlink()


def swap(path: Path, a: str, b: str) -> None:
    contents = (path / a).read_bytes(), (path / b).read_bytes()
    (path / b).write_bytes(contents[0])
    (path / a).write_bytes(contents[1])


@dataclass
class Damage:
    apply: Callable[[Path], object]  # to the folder of a checkpoint
    words: tuple[str, ...]  # that the refusal must hold
    changes: dict[str, Any]  # to the hyperparameters of the run that loads


def damages(intact: Path, later: Path, wider: Path) -> dict[str, Damage]:
    """All that is done to copies of `intact`; `later` is of the same run, `wider` of another model."""
    found: dict[str, Damage] = {}

    def to_file(name: str, what: str, damage: Callable[..., object], *args: Any, word: str = "") -> None:
        found[f"{name} {what}"] = Damage(lambda path: damage(path / name, *args), (word or name,), {})

    def to_folder(what: str, words: tuple[str, ...], damage: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        found[what] = Damage(lambda path: damage(path, *args, **kwargs), words, {})

    def to_config(**changes: int) -> None:
        old = tiny_config()
        words = [f"{key} = {size}" for key, new in changes.items() for size in (new, getattr(old, key))]
        found[f"other {' and '.join(changes)}"] = Damage(lambda path: None, tuple(words), changes)

    dice = random.Random(0)
    for name in FILES:
        size = (intact / name).stat().st_size
        to_file(name, "missing", Path.unlink)
        to_file(name, "a folder", make_folder)
        for length in (0, 1, size // 2, size - 1, size + 1):
            to_file(name, f"of {length} bytes", cut_off, length)
        for position in sorted({0, size - 1, *(dice.randrange(size) for _ in range(FLIPS))}):
            to_file(name, f"flipped at {position}", flip, position, dice.randrange(8))
        for origin in (later, wider):
            # torch 2.3 writes no UUID into .metadata: that of the same run is the same.
            if (content := (origin / name).read_bytes()) != (intact / name).read_bytes():
                # A foreign train_state.json is whole, but not of these files.
                word = " was " if name == "train_state.json" else name
                to_file(name, f"of {origin.name}", Path.write_bytes, content, word=word)
    state = ("train_state.json",)
    to_folder("shards swapped", (".distcp",), swap, *SHARDS)
    to_folder("nothing written yet", state, remove, *FILES)
    to_folder("nothing but shards", state, remove, ".metadata", *state)
    for text in ("{}", "[]", "null", '{"crc32": 1}', '{"crc32": 0, "train_state": {}}', "\0"):
        to_file(*state, f"holds {text!r}", Path.write_text, text)
    for number in (0, 2, 99):
        to_folder(f"format {number}", (f"format {number}",), rewrite, format=number)
    to_folder("newer torch", ("torch 99.1.0",), rewrite, torch="99.1.0")
    for key, value in {"vocab_size": 64, "max_seq_len": 8, "d_model": 24, "n_heads": 4, "n_layers": 3}.items():
        to_config(**{key: value})
    to_config(d_model=32, n_layers=1)
    return found


@dataclass
class Attempt:
    code: Any  # of the exit; None: loaded
    text: str  # on stderr
    seconds: float
    untouched: bool  # the state is what it was


def attempt(core_context: core.Context, uuid: str, state: fsdp_train.TrainState, config: fsdp_train.Config) -> Attempt:
    before, step = held(state), state.step
    text, code = io.StringIO(), None
    # The courtesy of the other ranks, to let rank 0 speak first, is not needed here.
    hurried = types.SimpleNamespace(**{**vars(time), "sleep": lambda _: None})
    began = time.monotonic()
    with mock.patch.object(fsdp_train, "time", hurried), contextlib.redirect_stderr(text):
        try:
            fsdp_train.load(core_context, uuid, state, config, SEED, None)
        except SystemExit as end:
            code = end.code
    seconds = time.monotonic() - began
    return Attempt(code, text.getvalue(), seconds, differences(before, held(state)) == [] and state.step == step)


def refusals(core_context: core.Context, storage: Path) -> dict[str, Any]:
    """Try to load every damaged copy, and the intact one last."""
    logging.getLogger("determined").setLevel(logging.ERROR)  # as the script does
    ranks = dist.get_world_size()
    config = tiny_config(ranks, checkpoint_period=2, max_steps=4)
    (_, intact), (_, later) = observe(core_context, config).saved
    ((_, wider),) = observe(core_context, tiny_config(ranks, d_model=32, max_steps=2)).saved
    state = fsdp_train.build_state(config, SEED, CPU, None)
    results: dict[str, Any] = {}
    for name, damage in damages(*(storage / uuid for uuid in (intact, later, wider))).items():
        if dist.get_rank() == 0:
            shutil.copytree(storage / intact, storage / "damaged")
            damage.apply(storage / "damaged")
        dist.barrier()
        here = tiny_config(ranks, **{"checkpoint_period": 2, "max_steps": 4, **damage.changes})
        results[name] = attempt(core_context, "damaged", state, here), damage.words
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(storage / "damaged")
    for name in ("missing", "empty"):
        if dist.get_rank() == 0:
            file = storage / intact / "metadata.json"
            file.unlink() if name == "missing" else file.write_text("")
            (storage / intact / "stray file").touch()
        dist.barrier()
        results[f"metadata.json {name}"] = attempt(core_context, intact, state, config), ()
        dist.barrier()
        if dist.get_rank() == 0:
            (storage / intact / "metadata.json").touch()
    return results


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("refusals")
    return on_ranks(refusals, 2, folder, folder / "checkpoints")


def test_every_damage_is_refused_by_name_on_all_ranks(attempts: list[dict[str, Any]]) -> None:
    assert len(attempts[0]) > 4 * FLIPS
    for rank, results in enumerate(attempts):
        for name, (tried, words) in results.items():
            if name.startswith("metadata.json"):
                continue
            assert tried.code == 1, f"{name} was loaded by rank {rank}"
            assert tried.untouched, name
            assert tried.seconds < 5, name
            lines = tried.text.strip().splitlines()
            if rank:
                assert lines == [], name
            else:
                assert len(lines) == 1, f"{name}: {tried.text}"
                assert lines[0].startswith("fsdp_train.py: checkpoint damaged: "), name
                assert all(word in lines[0] for word in words), f"{name}: {tried.text}"


def test_what_determined_adds_is_not_needed(attempts: list[dict[str, Any]]) -> None:
    """metadata.json does not reach cloud storage; nor does a stray file harm."""
    for results in attempts:
        for name in ("missing", "empty"):
            tried, _ = results[f"metadata.json {name}"]
            assert tried.code is None, tried.text
        assert not results["metadata.json missing"][0].untouched, "nothing was loaded"


def test_every_bit_of_the_state_file_counts(tmp_path: Path) -> None:
    state = {"format": 1, "files": {}, "steps_completed": 3, "scaler": {"scale": 65536.0}, "trial_id": None}
    file = tmp_path / "train_state.json"
    file.write_text('{"train_state": {}}')
    rewrite(tmp_path, **state)
    assert fsdp_train.read_train_state(tmp_path) == state
    for position, bit in itertools.product(range(file.stat().st_size), range(8)):
        flip(file, position, bit)
        with pytest.raises(ValueError, match=r"train_state\.json"):
            fsdp_train.read_train_state(tmp_path)
        flip(file, position, bit)


# ---- Which checkpoint to go on from ----


def place(directory: Path, name: str, step: int) -> Path:
    path = directory / name
    path.mkdir(parents=True)
    (path / "a").write_bytes(b"abc")
    (path / "train_state.json").write_text('{"train_state": {}}')
    rewrite(path, format=1, files={"a": [3, zlib.crc32(b"abc")]}, steps_completed=step)
    return path


def test_latest_is_the_whole_one_with_the_most_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, step in (("b", 9), ("a", 100), ("d", 20)):
        os.utime(place(tmp_path, name, step), (step % 7, step % 7))
    (place(tmp_path, "cut", 200) / "a").write_bytes(b"ab")
    (place(tmp_path, "shard gone", 300) / "a").unlink()
    (place(tmp_path, "unfinished", 400) / "train_state.json").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert fsdp_train.find_checkpoint("latest", tmp_path) == "a"
    for name in ("cut", "shard gone", "unfinished", "empty", "file"):
        (message,) = [m for m in caplog.messages if f"{tmp_path / name}:" in m]
        assert "skipping" in message
    assert len(caplog.messages) == 5
    assert fsdp_train.find_checkpoint("d", tmp_path) == "d"


@pytest.mark.parametrize("resume", ["latest", "no-such-uuid"])
@pytest.mark.parametrize("exists", [True, False])
def test_nothing_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], resume: str, exists: bool
) -> None:
    monkeypatch.setenv("RANK", "0")
    directory = tmp_path / "checkpoints"
    if exists:
        directory.mkdir()
    with pytest.raises(SystemExit) as end:
        fsdp_train.find_checkpoint(resume, directory)
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert f"--resume {resume}" in error
    assert str(directory) in error


# ---- The script itself ----

# bfloat16 with dropout and accumulation, 4 checkpoints, slow enough to be met in the act.
JOB: dict[str, Any] = {
    "amp_dtype": "bfloat16",
    "dropout": 0.1,
    "micro_batch_size": 3,
    "max_steps": 12,
    "reporting_period": 1,
    "validation_period": 3,
    "checkpoint_period": 3,
}


@dataclass
class Job:
    """The script on two ranks, all of whose processes can be told from others."""

    process: subprocess.Popen[str]
    mark: dict[str, str]

    @classmethod
    def start(
        cls, cwd: Path, *arguments: str, sabotage: tuple[str, int, int] | None = None, ranks: int = 2, **hparams: Any
    ) -> "Job":
        mark = new_mark()
        home = cwd / "home"
        home.mkdir(exist_ok=True)
        command = [SCRIPT] if not sabotage else [SABOTAGE, *sabotage]
        command += ["--config", ROOT / "config.yaml", *overrides(**JOB | hparams), *arguments]
        launcher = torchrun(ranks) if ranks else [sys.executable]
        environment = {**mark, "HOME": str(home), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        (cwd / "work").mkdir(exist_ok=True)
        return cls(start([*launcher, *map(str, command)], cwd / "work", environment), mark)

    def end(self, timeout: float = 120) -> Outcome:
        """Wait for the end, after which nothing may be left running."""
        try:
            outcome = finish(self.process, timeout)
            assert leftovers(self.mark) == {}, outcome.text
            return outcome
        finally:
            kill_all(self.mark)

    def wait_for(self, words: str) -> None:
        """Read the output up to a line with `words`."""
        assert self.process.stdout
        seen = ""
        for line in self.process.stdout:
            seen += line
            if words in line:
                return
        raise AssertionError(f"no {words!r} in:\n{seen}")


def checkpoints_of(cwd: Path) -> Path:
    return cwd / "work" / "checkpoints"


def final_tensors(cwd: Path) -> dict[str, torch.Tensor]:
    whole = whole_checkpoints(checkpoints_of(cwd))
    return read_tensors(whole[JOB["max_steps"]], cwd)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run, the last of several that all ended well."""
    for _ in range(FINISHED_RUNS):
        cwd = tmp_path_factory.mktemp("finished")
        outcome = Job.start(cwd).end()
        assert outcome.code == 0, outcome.text
        assert "done: " in outcome.text
    return cwd


def assert_ends_as(finished: Path, cwd: Path) -> None:
    """What an interrupted run left is, bit for bit, what the undisturbed one did."""
    assert differences(final_tensors(finished), final_tensors(cwd)) == []
    assert last_state(checkpoints_of(finished)) == last_state(checkpoints_of(cwd))


def test_only_checkpoints_are_left_behind(finished: Path) -> None:
    assert [path.name for path in (finished / "work").iterdir()] == ["checkpoints"]
    assert list((finished / "home").iterdir()) == []
    whole = whole_checkpoints(checkpoints_of(finished))
    assert sorted(whole) == [3, 6, 9, 12]
    for path in checkpoints_of(finished).iterdir():
        assert {file.name for file in path.iterdir()} == {*FILES, "metadata.json"}


def test_a_finished_run_is_not_run_again(finished: Path) -> None:
    before = sorted(checkpoints_of(finished).iterdir())
    outcome = Job.start(finished, "--resume", "latest").end()
    assert outcome.code == 0, outcome.text
    assert "nothing left to do at step 12 of 12" in outcome.text
    assert " | loss" not in outcome.text
    assert sorted(checkpoints_of(finished).iterdir()) == before


def test_killed_ranks(finished: Path, tmp_path: Path) -> None:
    """Rank 0 while it trains, the other half-way through its file, rank 0 just before the save is complete."""
    directory = checkpoints_of(tmp_path)
    kills = [("killed_in_backward", 0, 9), ("killed_in_write", 1, 1), ("killed_after_metadata", 0, 2)]
    for resume, sabotage in zip([(), *[("--resume", "latest")] * 2], kills, strict=True):
        began = time.monotonic()
        outcome = Job.start(tmp_path, *resume, sabotage=sabotage).end()
        assert outcome.code != 0, outcome.text
        assert f"rank      : {sabotage[1]} (local_rank: {sabotage[1]})" in outcome.text
        assert "(exitcode: -9)" in outcome.text or "exitcode  : -9" in outcome.text
        assert time.monotonic() - began < SOON
    # The first ended in step 5, the second in the save of step 6, the third in that of step 9.
    assert sorted(whole_checkpoints(directory)) == [3, 6]
    unfinished = unfinished_checkpoints(directory)
    assert len(unfinished) == 2
    outcome = Job.start(tmp_path, "--resume", "latest").end()
    assert outcome.code == 0, outcome.text
    for name in unfinished:
        assert outcome.text.count(f"skipping checkpoint checkpoints/{name}: train_state.json is missing") == 1
    assert f"going on from checkpoint {whole_checkpoints(directory)[6].name} at step 6" in outcome.text
    assert_ends_as(finished, tmp_path)


@pytest.mark.parametrize("fault", ["disk_full", "file_too_large"])
def test_one_rank_cannot_save(finished: Path, tmp_path: Path, fault: str) -> None:
    job = Job.start(tmp_path, sabotage=(fault, 1, 2))
    job.wait_for("step 3/12 | checkpoint")
    began = time.monotonic()
    outcome = job.end(SOON)
    assert time.monotonic() - began < SOON
    assert outcome.code != 0
    assert {"disk_full": "No space left on device", "file_too_large": "File too large"}[fault] in outcome.text
    assert sorted(whole_checkpoints(checkpoints_of(tmp_path))) == [3]
    if fault == "disk_full":
        outcome = Job.start(tmp_path, "--resume", "latest").end()
        assert outcome.code == 0, outcome.text
        assert_ends_as(finished, tmp_path)


@pytest.mark.parametrize(
    ("signum", "ranks"), [(signal.SIGTERM, 2), (signal.SIGINT, 2), (signal.SIGINT, 0)], ids=lambda n: str(int(n))
)
def test_signals_end_the_job(tmp_path: Path, signum: signal.Signals, ranks: int) -> None:
    job = Job.start(tmp_path, ranks=ranks, max_steps=10**5)
    job.wait_for("| loss")
    assert len([rank for rank in processes(job.mark).values() if rank is not None]) >= ranks
    os.killpg(job.process.pid, signum)
    began = time.monotonic()
    outcome = job.end(SOON)
    assert time.monotonic() - began < 10
    assert outcome.code != 0
    assert outcome.text.count(f"fsdp_train.py: ended by {signum.name}") == 1
    assert 'fsdp_train.py", line' not in outcome.text
    if ranks == 0:  # torchrun prints one of its own
        assert "Traceback" not in outcome.text


@pytest.fixture(scope="module")
def copied(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("copied")
    shutil.copytree(checkpoints_of(finished), cwd / "elsewhere")
    return cwd


def test_the_script_refuses_a_flipped_byte(copied: Path) -> None:
    path = whole_checkpoints(copied / "elsewhere")[6]
    file = path / SHARDS[1]
    flip(file, file.stat().st_size // 2, 3)
    outcome = Job.start(copied, "--checkpoint-dir", "../elsewhere", "--resume", path.name).end()
    flip(file, file.stat().st_size // 2, 3)
    assert outcome.code != 0
    assert outcome.text.count(f"fsdp_train.py: checkpoint {path.name}: {SHARDS[1]} was changed") == 1
    assert " | loss" not in outcome.text
    assert 'fsdp_train.py", line' not in outcome.text
    assert not checkpoints_of(copied).exists()


def test_the_script_refuses_another_model(copied: Path) -> None:
    outcome = Job.start(copied, "--checkpoint-dir", "../elsewhere", "--resume", "latest", d_model=32, n_layers=1).end()
    assert outcome.code != 0
    (line,) = [line for line in outcome.text.splitlines() if "fsdp_train.py: checkpoint " in line]
    assert all(words in line for words in ("d_model = 16", "d_model = 32", "n_layers = 2", "n_layers = 1"))
    assert " | loss" not in outcome.text


def test_no_place_to_save(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = Job.start(tmp_path, "--checkpoint-dir", str(tmp_path / "file" / "checkpoints"), ranks=0).end(SOON)
    assert outcome.code != 0
    assert "Not a directory" in outcome.text
