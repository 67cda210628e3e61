"""The script as a trial on a cluster: the real package, against a stub of the master that checks every request."""

import copy
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import boto3  # type: ignore[import-untyped]
import pytest
from cluster import Outcome, can_unshare, launch_line, processes, run_trial
from determined.common.context import read_v1_context
from determined.common.util import yaml_safe_load
from launch import ROOT, SCRIPT, finish, run, start
from moto.server import ThreadedMotoServer
from stub_master import Json, StubMaster
from tiny import TINY, overrides, tiny
from torch.distributed.checkpoint import FileSystemReader

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # inside determined

HPARAMS = tiny(max_steps=16, lr=0.03)
MASTER_CALLS = {
    "start": "POST .*/runs/start",
    "poll": "GET .*/signals/preemption",
    "metrics": "POST .*/metrics",
    "progress": "POST .*/progress",
    "checkpoint": "POST .*/checkpoints",
    "acknowledgement": "POST .*/ack_preemption",
}
# Makes a report take long enough for signals and kills to arrive a few reports later at most.
SLOWLY = (MASTER_CALLS["progress"], 0.25)

needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="containers need root and `unshare -m`")


class Finished(NamedTuple):
    """An undisturbed trial on 2 slots."""

    history: dict[str, list[tuple[int, Json]]]
    checkpoint: Json
    storage: Json
    text: str


def comparable(master: StubMaster, group: str) -> list[tuple[int, Json]]:
    """The history of a group without what no two runs share."""
    measured = ("tokens_per_second", "peak_memory_gib")
    return [(step, {k: v for k, v in row.items() if k not in measured}) for _, step, row in master.history(group)]


def assert_complete(master: StubMaster, undisturbed: Finished, rel: float = 1e-4) -> None:
    """The trial finished, and the cluster has of it what it has of an undisturbed one."""
    assert master.violations == []
    for group, rows in undisturbed.history.items():
        assert comparable(master, group) == [(step, pytest.approx(row, rel=rel)) for step, row in rows]
    assert master.progress[-1] == 1
    steps = [checkpoint["metadata"]["steps_completed"] for checkpoint in master.checkpoints]
    assert max(steps) == HPARAMS["max_steps"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("undisturbed")
    storage = {"type": "directory", "container_path": str(folder / "storage")}
    with StubMaster(time_metric="batches") as master:
        outcome = run_trial(master, SCRIPT, folder, HPARAMS, storage=storage)
    assert outcome.code == 0, outcome.text
    assert master.violations == []
    assert master.progress == [step / 16 for step in range(2, 17, 2)]
    assert [c["metadata"] for c in master.checkpoints] == [{"steps_completed": 8}, {"steps_completed": 16}]
    history = {group: comparable(master, group) for group in ("training", "validation")}
    assert [step for step, _ in history["training"]] == list(range(2, 17, 2))
    assert [step for step, _ in history["validation"]] == [4, 8, 12, 16]
    assert master.acks == master.early_exits == []
    return Finished(history, master.checkpoints[-1], storage, outcome.text)


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """An empty working directory; the storage of the trial will be next to it."""
    path = tmp_path / "work"
    path.mkdir()
    return path


@pytest.fixture
def master() -> Iterator[StubMaster]:
    with StubMaster() as master:
        yield master


def kill_rank_1(master: StubMaster, step: int) -> Callable[[], None]:
    """What kills rank 1 once the current run has reported `step`."""

    def during() -> None:
        if any(row.run_id == master.run_id and row.step >= step for row in master.rows):
            for pid in processes(master.allocation_id, RANK="1"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    return during


# ---- Pause, crash, resume, continue, fork ----


def test_a_trials_whole_life(undisturbed: Finished, master: StubMaster, workdir: Path) -> None:
    run = partial(run_trial, master, SCRIPT, workdir, HPARAMS)
    master.delay(*SLOWLY)
    master.preempt_at(2)
    paused = run()
    assert paused.code == 0, paused.text
    assert "preempted at step" in paused.text
    assert f"to be resumed from checkpoint {master.latest_checkpoint()}" in paused.text

    master.new_run()
    crashed = run(during=kill_rank_1(master, 10))
    assert crashed.code != 0
    assert master.checkpoints[-1]["metadata"] == {"steps_completed": 8}

    master.new_run()
    master.preempt_at(10)
    on_one_slot = run(slots=1)
    assert on_one_slot.code == 0, on_one_slot.text
    assert "at step 8; changed since: nothing" in on_one_slot.text

    master.new_run()
    on_three_slots = run(slots=3)
    assert on_three_slots.code == 0, on_three_slots.text

    assert_complete(master, undisturbed)
    assert {run_id for run_id, _, _ in master.history("training")} == {1, 2, 3, 4}
    assert master.acks == [f"{master.task_id}.1", f"{master.task_id}.3"]
    steps = [checkpoint["metadata"]["steps_completed"] for checkpoint in master.checkpoints]
    assert steps == sorted(set(steps)), "each state is saved once"


def test_continuing_a_finished_trial_does_nothing(undisturbed: Finished, workdir: Path) -> None:
    with StubMaster(run_id=2) as master:
        master.checkpoints.append(undisturbed.checkpoint)
        outcome = run_trial(master, SCRIPT, workdir, HPARAMS, storage=undisturbed.storage)
    assert outcome.code == 0, outcome.text
    assert "nothing left to do at step 16 of 16" in outcome.text
    assert master.violations == master.rows == master.progress == master.acks == []
    assert master.checkpoints == [undisturbed.checkpoint]


def test_fork_starts_over_with_the_weights(undisturbed: Finished, workdir: Path) -> None:
    uuid = undisturbed.checkpoint["uuid"]
    hparams = HPARAMS | {"max_steps": 4, "reporting_period": 1}
    with StubMaster(trial_id=8) as master:
        outcome = run_trial(master, SCRIPT, workdir, hparams, storage=undisturbed.storage, latest_checkpoint=uuid)
    assert outcome.code == 0, outcome.text
    assert f"weights from checkpoint {uuid} of trial 7; this is trial 8, so it starts at step 0" in outcome.text
    assert [step for _, step, _ in master.history("training")] == [1, 2, 3, 4]
    first_loss = master.history("training")[0][2]["loss"]
    assert first_loss < math.log(HPARAMS["vocab_size"]) - 1
    assert first_loss == pytest.approx(undisturbed.history["validation"][-1][1]["validation_loss"], abs=0.2)
    assert master.history("training")[0][2]["lr"] == pytest.approx(HPARAMS["lr"] / 3), "the schedule starts over"
    assert [c["metadata"] for c in master.checkpoints] == [{"steps_completed": 4}]
    assert master.violations == []


# ---- Hyperparameter search ----


@pytest.mark.parametrize(
    "sample",
    [
        {"lr": 1, "dropout": 0, "max_grad_norm": 1, "weight_decay": 0, "min_lr_ratio": 1},
        {"lr": 0.012345678901234567, "dropout": 0.1, "d_model": 8, "n_heads": 4, "max_grad_norm": 2},
    ],
)
def test_every_validation_has_what_a_search_needs(sample: Json, workdir: Path) -> None:
    hparams = HPARAMS | {"max_steps": 4, "validation_period": 2} | sample
    with StubMaster(time_metric="batches") as master:
        outcome = run_trial(master, SCRIPT, workdir, hparams)
    assert outcome.code == 0, outcome.text
    assert master.violations == [], "the stub refuses what is no finite number"
    assert [row["batches"] for _, _, row in master.history("validation")] == [2, 4]
    assert [step for _, step, _ in master.history("validation")] == [2, 4]
    lr = sample["lr"] * sample.get("min_lr_ratio", HPARAMS["min_lr_ratio"])
    assert master.history("training")[-1][2]["lr"] == pytest.approx(lr)


def test_what_cannot_work_is_an_invalid_hyperparameter(master: StubMaster, workdir: Path) -> None:
    master.reset("POST .*/early_exit")
    outcome = run_trial(master, SCRIPT, workdir, HPARAMS | {"global_batch_size": 13, "n_heads": 3})
    assert outcome.code == 0, outcome.text
    assert master.early_exits == ["EXITED_REASON_INVALID_HP"] * 2
    assert outcome.text.count("global_batch_size = 13 does not divide by the 2 ranks: use 12 or 14") == 1
    assert outcome.text.count("n_heads = 3 does not divide d_model = 16: use 2 or 4") == 1
    assert master.violations == master.rows == master.checkpoints == []


def test_a_misspelled_hyperparameter_fails_the_trial(master: StubMaster, workdir: Path) -> None:
    outcome = run_trial(master, SCRIPT, workdir, HPARAMS | {"max_step": 5})
    assert outcome.code != 0
    assert outcome.text.count("max_step: no such hyperparameter; did you mean max_steps?") == 1
    assert master.violations == master.early_exits == master.rows == []


# Two ranks whose GPUs differ: enough of torch.cuda for what the script does before it builds a model.
OLD_GPU = f"""
import os, runpy, torch
gpu = [((9, 0), "NVIDIA H100"), ((7, 0), "Tesla V100")][int(os.environ["RANK"])]
torch.cuda.is_available = lambda: True
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_capability = lambda device: gpu[0]
torch.cuda.get_device_name = lambda device: gpu[1]
init = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda backend, **options: init("gloo", **options)
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_bfloat16_on_one_old_gpu_is_an_invalid_hyperparameter(master: StubMaster, workdir: Path) -> None:
    driver = workdir / "old_gpu.py"
    driver.write_text(OLD_GPU)
    env = {"PYTHONPATH": str(ROOT)}
    outcome = run_trial(master, driver, workdir, HPARAMS | {"amp_dtype": "bfloat16"}, env=env)
    assert outcome.code == 0, outcome.text
    assert master.early_exits == ["EXITED_REASON_INVALID_HP"] * 2
    needs = "amp_dtype = bfloat16 needs compute capability 8.0, not Tesla V100, compute capability 7.0"
    assert f"{needs}: use auto or float16" in outcome.text
    assert master.violations == master.rows == []


@pytest.mark.parametrize("name", ["config.yaml", "distributed.yaml"])
def test_the_searchers_metric_is_reported(name: str, undisturbed: Finished) -> None:
    searcher = yaml_safe_load((ROOT / name).read_text())["searcher"]
    assert all(searcher["metric"] in row for _, row in undisturbed.history["validation"])


def test_a_loss_that_is_not_finite_ends_the_retries(master: StubMaster, workdir: Path) -> None:
    outcome = run_trial(master, SCRIPT, workdir, HPARAMS | {"lr": 1e30}, slots=1)
    assert outcome.code != 0
    policies = yaml_safe_load((ROOT / "distributed.yaml").read_text())["log_policies"]
    actions = {
        policy["action"]
        for policy in policies
        for line in outcome.text.splitlines()
        if re.search(policy["pattern"], line)
    }
    assert actions == {"cancel_retries"}
    assert master.violations == master.checkpoints == []


def test_the_banner_is_that_of_a_dry_run(undisturbed: Finished, tmp_path: Path) -> None:
    seed, slots = {"experiment_seed": 1234}, {"slots_per_trial": 2}
    config = {"hyperparameters": HPARAMS, "reproducibility": seed, "resources": slots}
    (tmp_path / "tiny.yaml").write_text(json.dumps(config))
    outcome = run("--config", "tiny.yaml", "--dry-run", ranks=0, cwd=tmp_path)
    assert outcome.code == 0, outcome.text
    assert len(outcome.text.splitlines()) == 10
    assert outcome.text in undisturbed.text


# ---- Profilers ----

# The package samples once a second and reports every ten: longer than this trial.
FAST_PROFILER = f"""
import functools, runpy
from determined import core
core.ProfilerContext.on = functools.partialmethod(core.ProfilerContext.on, sampling_interval=0.1, samples_per_report=1)
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_profilers(master: StubMaster, workdir: Path) -> None:
    driver = workdir / "fast_profiler.py"
    driver.write_text(FAST_PROFILER)
    master.delay(*SLOWLY)
    hparams = HPARAMS | {"max_steps": 8, "core_api_profiler": True, "torch_profiler": True}
    outcome = run_trial(master, driver, workdir, hparams, env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == 0, outcome.text
    assert master.violations == []
    assert master.profiled >= {"cpu", "memory", "disk", "network"}
    synced = workdir.parent / "storage/stub-cluster/tensorboard/experiment/3/trial/7"
    traces = sorted(path.name for path in synced.rglob("*.pt.trace.json"))
    assert [name.split(".")[0] for name in traces] == ["rank0", "rank1"]
    for path in synced.rglob("*.pt.trace.json"):
        names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        assert {name for name in names if "ProfilerStep" in name} == {
            "ProfilerStep#2",
            "ProfilerStep#3",
            "ProfilerStep#4",
        }, "steps 3 to 5"
    assert "None" not in [path.name for path in workdir.rglob("*")]


def test_local_traces_are_in_a_folder_of_their_own(tmp_path: Path) -> None:
    config = ["--config", str(ROOT / "config.yaml")]
    outcome = run(*config, *overrides(max_steps=6, torch_profiler="true"), ranks=0, cwd=tmp_path)
    assert outcome.code == 0, outcome.text
    assert [path.name.split(".")[0] for path in (tmp_path / "traces").iterdir()] == ["rank0"]
    assert {path.name for path in tmp_path.iterdir()} == {"traces", "checkpoints"}


# ---- Cloud storage ----


class Bucket(NamedTuple):
    storage: Json
    objects: Any

    def folders(self) -> dict[str, set[str]]:
        """The file names in each checkpoint."""
        found: dict[str, set[str]] = {}
        for name in (entry.key for entry in self.objects.all()):
            folder, _, file = name.partition("/")
            if re.fullmatch("[0-9a-f-]{36}", folder):
                found.setdefault(folder, set()).add(file)
        return found


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"access_key": "key", "secret_key": "secret"}
    url = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3 = boto3.resource("s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret")
        s3.create_bucket(Bucket="checkpoints")
        storage = {"type": "s3", "bucket": "checkpoints", "endpoint_url": url, **keys}
        yield Bucket(storage, s3.Bucket("checkpoints").objects)
    server.stop()


@pytest.fixture(scope="module")
def paused_in_cloud(bucket: Bucket, tmp_path_factory: pytest.TempPathFactory) -> StubMaster:
    """The master of a trial that was paused on 2 slots of one node."""
    with StubMaster() as master:
        master.delay(*SLOWLY)
        master.preempt_at(2)
        outcome = run_trial(master, SCRIPT, tmp_path_factory.mktemp("cloud"), HPARAMS, storage=bucket.storage)
    assert outcome.code == 0, outcome.text
    own = {"train_state.json", ".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert list(bucket.folders().values()) == [own], "determined uploads no metadata.json of a sharded checkpoint"
    return master


def resume(master: StubMaster, paused: StubMaster) -> None:
    """Let `master` go on with the trial of another one."""
    master.run_id, master.task_id = paused.run_id + 1, paused.task_id
    master.rows, master.checkpoints = copy.deepcopy(paused.rows), list(paused.checkpoints)


def test_cloud_storage(
    undisturbed: Finished, paused_in_cloud: StubMaster, master: StubMaster, workdir: Path, bucket: Bucket
) -> None:
    resume(master, paused_in_cloud)
    outcome = run_trial(master, SCRIPT, workdir, HPARAMS, storage=bucket.storage)
    assert outcome.code == 0, outcome.text
    assert set(bucket.folders()) >= {checkpoint["uuid"] for checkpoint in master.checkpoints}
    assert_complete(master, undisturbed)


# ---- The launch line ----


def unpack_upload(folder: Path) -> None:
    """Put into `folder` what `det experiment create config.yaml .` sends of it."""
    for file in read_v1_context(ROOT):
        if not file.path.endswith("/"):
            (folder / file.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file.path, folder / file.path)


@needs_namespaces
def test_launch_line(master: StubMaster, workdir: Path) -> None:
    unpack_upload(workdir)
    entrypoint = yaml_safe_load((ROOT / "config.yaml").read_text())["entrypoint"]
    (outcome,) = launch_line(master, entrypoint, workdir, HPARAMS | {"amp_dtype": "auto"})
    assert outcome.code == 0, outcome.text
    assert master.violations == []
    assert master.progress[-1] == 1
    assert re.search(r"^\[rank=0\] .* step 16/16 \| checkpoint ", outcome.text, re.MULTILINE)
    assert "precision  bfloat16 (auto: CPU" in outcome.text
    assert [step for _, step, _ in master.history("training")] == list(range(2, 17, 2))


SHARD_GROUPS = """
import runpy
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
build = FSDP.__init__
def build_and_tell(self, *arguments, **options):
    build(self, *arguments, **options)
    print("shard group", dist.get_process_group_ranks(self.process_group), flush=True)
FSDP.__init__ = build_and_tell
runpy.run_path("fsdp_train.py", run_name="__main__")
"""


@needs_namespaces
def test_two_nodes_with_the_settings_of_the_large_run(
    undisturbed: Finished,
    paused_in_cloud: StubMaster,
    master: StubMaster,
    workdir: Path,
    bucket: Bucket,
    tmp_path: Path,
) -> None:
    experiment = yaml_safe_load((ROOT / "distributed.yaml").read_text())
    # With compile: the test after this one.
    kept = ("sharding", "reduce_dtype", "activation_checkpointing", "core_api_profiler")
    # 3 micro-batches of 1 sequence on each of the 4 ranks.
    hparams = HPARAMS | {name: experiment["hyperparameters"][name] for name in kept} | {"micro_batch_size": 1}
    assert (hparams["sharding"], hparams["activation_checkpointing"]) == ("hybrid", True)
    env = dict(line.split("=", 1) for line in experiment["environment"]["environment_variables"])
    unpack_upload(workdir)
    (workdir / "driver.py").write_text(SHARD_GROUPS)
    entrypoint = experiment["entrypoint"].replace("fsdp_train.py", "driver.py")

    # Each container has a /tmp of its own, where its ranks find the files of a checkpoint and leave theirs.
    resume(master, paused_in_cloud)
    outcomes = launch_line(master, entrypoint, workdir, hparams, nodes=2, storage=bucket.storage, env=env)
    text = "\n".join(outcome.text for outcome in outcomes)
    assert [outcome.code for outcome in outcomes] == [0, 0], text
    assert "going on from checkpoint" in text
    assert "ranks      4: 2 node(s) x 2; 2 replica(s) x 2 shard(s)" in text
    for rank, group in enumerate(([0, 1], [0, 1], [2, 3], [2, 3])):
        assert f"[rank={rank}] shard group {group}" in text
    assert_complete(master, undisturbed)

    uuid = master.checkpoints[-1]["uuid"]
    names = {"train_state.json", ".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}
    assert bucket.folders()[uuid] == names
    for entry in bucket.objects.filter(Prefix=uuid):
        (tmp_path / Path(entry.key).name).write_bytes(entry.get()["Body"].read())
    metadata = FileSystemReader(tmp_path).read_metadata()
    held: tuple[set[Any], set[Any]] = (set(), set())  # by position in the shard group
    for index, place in (metadata.storage_data or {}).items():
        if index.offset is not None and index.fqn.startswith("model."):
            held[int(place.relative_path[2]) % 2].add((index.fqn, tuple(index.offset)))
    assert all(held)
    assert not held[0] & held[1], "neighbouring ranks hold different parts"


@needs_namespaces
def test_large_runs_own_entrypoint_and_settings(undisturbed: Finished, master: StubMaster, workdir: Path) -> None:
    experiment = yaml_safe_load((ROOT / "distributed.yaml").read_text())
    settings = {k: v for k, v in experiment["hyperparameters"].items() if k not in (*TINY, "branching")}
    settings |= {"amp_dtype": experiment["hyperparameters"]["amp_dtype"], "micro_batch_size": 1}
    env = dict(line.split("=", 1) for line in experiment["environment"]["environment_variables"])
    unpack_upload(workdir)
    outcomes = launch_line(master, experiment["entrypoint"], workdir, HPARAMS | settings, nodes=2, env=env)
    text = "\n".join(outcome.text for outcome in outcomes)
    assert [outcome.code for outcome in outcomes] == [0, 0], text
    assert "parameters and autocast bfloat16, reduction float32" in text
    assert_complete(master, undisturbed, rel=0.02)


# ---- Faults of the master and of the network ----


@pytest.fixture(scope="module")
def lost_connections(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[tuple[StubMaster, list[Outcome]]]]:
    """A trial that loses each kind of call twice, and once the master for 20 seconds; it runs beside other tests."""
    workdir = tmp_path_factory.mktemp("lost") / "work"
    workdir.mkdir()
    with StubMaster() as master, ThreadPoolExecutor(1) as executor:
        for name, pattern in MASTER_CALLS.items():
            master.reset(pattern)
            if name != "checkpoint":  # the master answers 500 to a checkpoint that it knows: see below
                master.drop(pattern)
        master.away(20, "POST .*/metrics")
        master.delay(*SLOWLY)
        master.preempt_at(8)

        def pause_and_resume() -> tuple[StubMaster, list[Outcome]]:
            paused = run_trial(master, SCRIPT, workdir, HPARAMS)
            master.new_run()
            return master, [paused, run_trial(master, SCRIPT, workdir, HPARAMS)]

        yield executor.submit(pause_and_resume)


def test_errors_of_the_master_end_the_run_and_the_next_one_goes_on(
    undisturbed: Finished, lost_connections: Any, master: StubMaster, workdir: Path
) -> None:
    run = partial(run_trial, master, SCRIPT, workdir, HPARAMS)
    for name in ("start", "metrics", "progress", "checkpoint"):
        master.fail(MASTER_CALLS[name])
        outcome = run()
        assert outcome.code != 0, f"{name}: {outcome.text}"
        assert "fault injected by the test" in outcome.text, name
        assert master.checkpoints == []
        master.new_run()

    master.drop(MASTER_CALLS["checkpoint"])
    outcome = run()
    assert outcome.code != 0, outcome.text
    assert "duplicate key" in outcome.text
    assert [checkpoint["metadata"] for checkpoint in master.checkpoints] == [{"steps_completed": 8}]

    master.new_run()
    master.fail(MASTER_CALLS["acknowledgement"])
    master.delay(*SLOWLY)
    master.preempt_at(10)
    outcome = run()
    assert outcome.code != 0, outcome.text
    assert "fault injected by the test" in outcome.text

    master.new_run()
    master.fail(MASTER_CALLS["poll"], 2)
    outcome = run()
    assert outcome.code == 0, outcome.text
    assert_complete(master, undisturbed)


def test_a_report_refused_just_before_a_checkpoint_is_made_up_for(
    undisturbed: Finished, master: StubMaster, workdir: Path
) -> None:
    """No checkpoint is known to the master before the metrics of its step: the next run would go on after them."""
    master.fail(MASTER_CALLS["metrics"], skip=16 // 2 + 16 // 4 - 1)  # the last validation
    refused = run_trial(master, SCRIPT, workdir, HPARAMS)
    assert refused.code != 0
    assert "fault injected by the test" in refused.text
    master.new_run()
    resumed = run_trial(master, SCRIPT, workdir, HPARAMS)
    assert resumed.code == 0, resumed.text
    assert_complete(master, undisturbed)


def test_lost_connections_lose_nothing(
    undisturbed: Finished, lost_connections: Future[tuple[StubMaster, list[Outcome]]]
) -> None:
    master, outcomes = lost_connections.result()
    assert [outcome.code for outcome in outcomes] == [0, 0], "\n".join(outcome.text for outcome in outcomes)
    assert "preempted at step" in outcomes[0].text
    assert_complete(master, undisturbed)
    assert {request.rpartition("/")[2] for request in master.redelivered} >= {"metrics", "progress", "ack_preemption"}


IMPATIENT = """
import runpy, signal
alarm = signal.alarm
signal.alarm = lambda seconds: alarm(min(seconds, 5))
runpy.run_path("fsdp_train.py", run_name="__main__")
"""


@pytest.mark.parametrize(("call", "slots"), [("start", 2), ("progress", 2), ("checkpoint", 1), ("acknowledgement", 2)])
def test_a_master_that_never_answers_is_not_waited_for_for_ever(
    call: str, slots: int, master: StubMaster, workdir: Path
) -> None:
    unpack_upload(workdir)
    (workdir / "driver.py").write_text(IMPATIENT)
    master.delay(MASTER_CALLS[call], 3600)
    if call == "acknowledgement":
        master.preempt_at(2)
    outcome = run_trial(master, workdir / "driver.py", workdir, HPARAMS, slots=slots)
    assert outcome.code != 0
    assert "ended by SIGALRM after 1:00:00 of waiting: does the master answer?" in outcome.text
    assert master.violations == []


def test_a_local_run_waits_for_no_master(workdir: Path) -> None:
    unpack_upload(workdir)
    (workdir / "driver.py").write_text(
        IMPATIENT.replace("alarm(min(seconds, 5))", "signal.setitimer(0, min(seconds, 0.01))")
    )
    outcome = finish(start([sys.executable, "driver.py", *overrides()], workdir))
    assert outcome.code == 0, outcome.text
