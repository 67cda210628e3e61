"""The script as a trial on a cluster: the real package, against a stub of the master that checks every request."""

import copy
import json
import math
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import boto3  # type: ignore[import-untyped]
import pytest
from determined.common.context import read_v1_context
from determined.common.util import yaml_safe_load
from moto.server import ThreadedMotoServer
from torch.distributed.checkpoint import FileSystemReader

from cluster import can_unshare, launch_line, run_trial
from launch import ROOT, SCRIPT, Job, run
from processes import whole_checkpoints
from stub_master import Json, StubMaster, shape
from tiny import TINY, overrides, tiny

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # inside determined

HPARAMS = {k: v for k, v in tiny(max_steps=16, lr=0.03).items() if k not in ("seed", "slots_per_trial")}
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


def kill_rank_1(master: StubMaster, step: int) -> Callable[[Job], None]:
    """What kills rank 1 once the current run has reported `step`."""

    def during(job: Job) -> None:
        if any(row.run_id == master.run_id and row.step >= step for row in master.rows):
            job.signal(signal.SIGKILL, 1)

    return during


# ---- Pause, crash, resume, continue, fork ----


def test_a_trials_whole_life(undisturbed: Finished, master: StubMaster, workdir: Path) -> None:
    run = partial(run_trial, master, SCRIPT, workdir, HPARAMS)
    master.delay(*SLOWLY)
    master.preempt_at(2)
    paused = run()
    assert paused.code == 0, paused.text
    assert "preempted at step" in paused.text
    assert f"  checkpoint {master.latest_checkpoint()}" in paused.text

    master.new_run()
    crashed = run(during=kill_rank_1(master, 10))
    assert crashed.code != 0
    assert master.checkpoints[-1]["metadata"] == {"steps_completed": 8}

    master.new_run()
    master.preempt_at(10)
    on_one_slot = run(slots=1)
    assert on_one_slot.code == 0, on_one_slot.text
    assert "at step 8 of checkpoint" in on_one_slot.text

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
    assert "nothing left to do at step 16" in outcome.text
    assert master.violations == master.rows == master.progress == master.acks == []
    assert master.checkpoints == [undisturbed.checkpoint]


def test_fork_starts_over_with_the_weights(undisturbed: Finished, workdir: Path) -> None:
    uuid = undisturbed.checkpoint["uuid"]
    hparams = HPARAMS | {"max_steps": 4, "reporting_period": 1}
    with StubMaster(trial_id=8) as master:
        outcome = run_trial(master, SCRIPT, workdir, hparams, storage=undisturbed.storage, latest_checkpoint=uuid)
    assert outcome.code == 0, outcome.text
    assert f"weights of trial 7, from step 0: {uuid}" in outcome.text
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
    assert outcome.text.count("global_batch_size = 13 does not divide by the 2 ranks: use 12") == 1
    assert outcome.text.count("n_heads = 3 does not divide d_model = 16: use 2") == 1
    assert master.violations == master.rows == master.checkpoints == []


def test_a_misspelled_hyperparameter_fails_the_trial(master: StubMaster, workdir: Path) -> None:
    outcome = run_trial(master, SCRIPT, workdir, HPARAMS | {"max_step": 5})
    assert outcome.code != 0
    assert outcome.text.count("max_step: no such hyperparameter") == 1
    assert master.violations == master.early_exits == master.rows == []


# Two ranks whose GPUs differ: enough of torch.cuda for what the script does before it builds a model.
OLD_GPU = """
import os, torch
gpu = [((9, 0), "NVIDIA H100"), ((7, 0), "Tesla V100")][int(os.environ["RANK"])]
torch.cuda.device_count = lambda: 2
torch.cuda.set_device = lambda device: None
torch.cuda.get_device_capability = lambda device: gpu[0]
torch.cuda.get_device_name = lambda device: gpu[1]
init = torch.distributed.init_process_group
torch.distributed.init_process_group = lambda backend, **options: init("gloo", **options)
"""


def test_bfloat16_on_one_old_gpu_is_an_invalid_hyperparameter(master: StubMaster, workdir: Path) -> None:
    outcome = run_trial(master, SCRIPT, workdir, HPARAMS | {"amp_dtype": "bfloat16"}, before=OLD_GPU)
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


# ---- Profilers ----

# The package samples once a second and reports every ten: longer than this trial.
FAST_PROFILER = """
import functools
from determined import core
core.ProfilerContext.on = functools.partialmethod(core.ProfilerContext.on, sampling_interval=0.1, samples_per_report=1)
"""


def test_profilers(master: StubMaster, workdir: Path) -> None:
    master.delay(*SLOWLY)
    hparams = HPARAMS | {"max_steps": 8, "core_api_profiler": True, "torch_profiler": True}
    outcome = run_trial(master, SCRIPT, workdir, hparams, before=FAST_PROFILER)
    assert outcome.code == 0, outcome.text
    assert master.violations == []
    assert master.profiled >= {"cpu", "memory", "disk", "network"}
    synced = workdir.parent / "storage/stub-cluster/tensorboard/experiment/3/trial/7"
    traces = sorted(path.name for path in synced.rglob("*.pt.trace.json"))
    assert len(traces) == 2, traces
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
    assert len(list((tmp_path / "traces").iterdir())) == 1
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
    outcome = launch_line(master, entrypoint, workdir, HPARAMS | {"amp_dtype": "auto"})
    assert outcome.code == 0, outcome.text
    assert master.violations == []
    assert master.progress[-1] == 1
    assert re.search(r"^\[rank=0\] .*step 16/16  checkpoint ", outcome.text, re.MULTILINE)
    assert "(auto: CPU" in outcome.text
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
    outcome = launch_line(master, entrypoint, workdir, hparams, nodes=2, storage=bucket.storage, env=env)
    text = outcome.text
    assert outcome.codes == [0, 0], text
    assert " of checkpoint " in text
    assert "2 node(s) x 2" in text and "2 replica(s) x 2 shard(s)" in text
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
    outcome = launch_line(master, experiment["entrypoint"], workdir, HPARAMS | settings, nodes=2, env=env)
    assert outcome.codes == [0, 0], outcome.text
    assert "reduction   float32" in outcome.text
    assert_complete(master, undisturbed, rel=0.02)


# ---- Faults of the master and of the network ----


IMPATIENT = '{"total": 1, "backoff_factor": 0.1, "allowed_methods": false, "status_forcelist": [500]}'


def test_errors_of_the_master_that_last_end_the_run_and_the_next_one_goes_on(
    undisturbed: Finished, master: StubMaster, workdir: Path
) -> None:
    """One line names the call and the answer."""
    impatient = partial(run_trial, master, SCRIPT, workdir, HPARAMS, env={"DET_RETRY_CONFIG": IMPATIENT})
    for name in ("start", "metrics", "progress", "checkpoint"):
        master.fail(MASTER_CALLS[name], None)
        outcome = impatient()
        master._faults.clear()
        assert outcome.code != 0, f"{name}: {outcome.text}"
        says = [line for line in outcome.text.splitlines() if line.startswith("fsdp_train.py: ")]
        assert len(says) == 1 and "too many 500 error responses" in says[0] and "/api/v1/" in says[0], outcome.text
        # The rank that is left sees the other one leave.
        assert "Traceback" not in outcome.texts[0] or name == "start", outcome.text
        assert master.checkpoints == [] or name != "start"
        master.new_run()
    outcome = run_trial(master, SCRIPT, workdir, HPARAMS)
    assert outcome.code == 0, outcome.text
    assert master.violations == []
    assert comparable(master, "validation")[-1][0] == 16


def test_the_masters_database_is_away_for_a_while(undisturbed: Finished, master: StubMaster, workdir: Path) -> None:
    """500 at each kind of call: nothing is lost or doubled."""
    for pattern in MASTER_CALLS.values():
        master.fail_for(pattern, 1.5)
    master.delay(*SLOWLY)
    master.preempt_at(6)
    paused = run_trial(master, SCRIPT, workdir, HPARAMS)
    assert paused.code == 0 and "preempted at step" in paused.text, paused.text
    master.new_run()
    resumed = run_trial(master, SCRIPT, workdir, HPARAMS)
    assert resumed.code == 0, resumed.text
    assert_complete(master, undisturbed)


def test_lost_connections_lose_nothing(undisturbed: Finished, master: StubMaster, workdir: Path) -> None:
    """Each kind of call loses its connection before and after, and once the master is away for some seconds."""
    for name, pattern in MASTER_CALLS.items():
        master.reset(pattern)
        if name != "checkpoint":  # the master answers 500 to a checkpoint that it knows, for ever
            master.drop(pattern)
    master.away(5, "POST .*/metrics")
    master.delay(*SLOWLY)
    master.preempt_at(8)
    outcome = run_trial(master, SCRIPT, workdir, HPARAMS)
    assert outcome.code == 0 and "preempted at step" in outcome.text, outcome.text
    master.new_run()
    outcome = run_trial(master, SCRIPT, workdir, HPARAMS)
    assert outcome.code == 0, outcome.text
    assert_complete(master, undisturbed)
    assert {request.rpartition("/")[2] for request in master.redelivered} >= {"metrics", "progress", "ack_preemption"}


SHORT_PATIENCE = """
import faulthandler
later = faulthandler.dump_traceback_later
faulthandler.dump_traceback_later = lambda seconds, **options: later(min(seconds, 6), **options)
"""


@pytest.mark.parametrize("call", ["start", "progress", "checkpoint"])
def test_a_master_that_never_answers_is_not_waited_for_for_ever(call: str, master: StubMaster, workdir: Path) -> None:
    """And it shows where each rank stands."""
    master.delay(MASTER_CALLS[call], 3600)
    outcome = run_trial(master, SCRIPT, workdir, HPARAMS, before=SHORT_PATIENCE)
    assert outcome.code != 0
    assert "Timeout (0:00:06)!" in outcome.text and "in start" in outcome.text, outcome.text
    assert master.violations == []


# ---- What is no trial, and what is started wrongly ----


@pytest.mark.parametrize("task_type", ["SHELL", "COMMAND", "NOTEBOOK"])
def test_a_task_that_is_no_trial_is_as_good_as_a_laptop(task_type: str, master: StubMaster, workdir: Path) -> None:
    arguments = ("--config", str(ROOT / "config.yaml"), *overrides(max_steps=8))
    dry = run_trial(master, SCRIPT, workdir, {}, *arguments, "--dry-run", task_type=task_type, slots=0)
    assert dry.code == 0 and "7,504 parameters" in dry.text, dry.text
    for slots, more in ((2 if task_type == "SHELL" else 0, ()), (0, ("--resume", "latest", "max_steps=12"))):
        outcome = run_trial(master, SCRIPT, workdir, {}, *arguments, *more, task_type=task_type, slots=slots)
        assert outcome.code == 0, outcome.text
        assert "done: " in outcome.text and ("at step 8 of" in outcome.text) is bool(more)
    assert sorted(whole_checkpoints(workdir / "checkpoints")) == [8, 12]
    assert master.rows == master.checkpoints == master.violations == []


NO_TENSORBOARD = """
import sys, torch
vars(torch.utils).pop("tensorboard", None)
for name in list(sys.modules):
    if name.startswith(("tensorboard", "torch.utils.tensorboard", "determined.tensorboard.metric_writers")):
        del sys.modules[name]
sys.modules["tensorboard"] = None
"""


def test_wrong_starts_of_a_trial(master: StubMaster, workdir: Path) -> None:
    """Each with one line, no traceback, and exit code 1."""
    alone = "import os; [os.environ.pop(n, 0) for n in list(os.environ) if n.endswith(('RANK', 'WORLD_SIZE'))]"
    alone += "; os.environ.pop('MASTER_PORT', 0)"
    cases: list[tuple[str, tuple[str, ...], list[str]]] = [
        (alone, (), ["2 slots, but 1 rank(s)", "python3 -m determined.launch.torch_distributed"]),
        ("", ("max_steps=4",), ["max_steps=4", "write them as hyperparameters"]),
        (NO_TENSORBOARD, (), ["fsdp_train.py: import of tensorboard"]),
    ]
    for before, arguments, says in cases:
        outcome = run_trial(master, SCRIPT, workdir, HPARAMS, *arguments, before=before)
        assert outcome.code == 1, (says, outcome.codes, outcome.text)
        assert "Traceback" not in outcome.texts[0] and all(word in outcome.text for word in says), outcome.text
        assert master.rows == []
        master.new_run()


# ---- A search that stops the trial ----


def test_a_trial_that_the_search_stops_saves_and_ends(master: StubMaster, workdir: Path) -> None:
    master.stop_at(4)
    master.delay(*SLOWLY)
    long = HPARAMS | {"max_steps": 400, "validation_period": 200, "checkpoint_period": 200, "reporting_period": 1}
    master.delay("POST .*/progress", 0.1)
    outcome = run_trial(
        master, SCRIPT, workdir, long | {"validation_period": 4, "checkpoint_period": 400}, searcher="adaptive_asha"
    )
    assert outcome.code == 0, outcome.text
    found = re.findall(r"stopped by the search at step (\d+)", outcome.text)
    assert len(found) == 1 and int(found[0]) < 100, outcome.text
    assert master.checkpoints[-1]["metadata"] == {"steps_completed": int(found[0])}
    assert master.violations == master.acks == []


@pytest.mark.parametrize("fault", ["fails", "never answers", "single"])
def test_a_master_that_does_not_say_delays_and_ends_nothing(fault: str, master: StubMaster, workdir: Path) -> None:
    question = r"GET .*/trials/\d+$"
    if fault == "fails":
        master.fail(question, None, 404)
    elif fault == "never answers":
        master.delay(question, 3600)
    master.delay(*SLOWLY)
    searcher = "single" if fault == "single" else "adaptive_asha"
    outcome = run_trial(master, SCRIPT, workdir, HPARAMS | {"reporting_period": 1}, searcher=searcher)
    assert outcome.code == 0, outcome.text
    assert master.progress[-1] == 1
    assert outcome.text.count("does the search go on?") == (fault == "fails"), "once"
    asked = [request for request, _ in master.requests if re.search(question, request)]
    assert bool(asked) is (fault != "single")


def test_what_is_sent_has_the_shape_of_what_was_recorded(undisturbed: Finished, workdir: Path) -> None:
    recorded = [json.loads(line) for line in (ROOT / "tests/cluster/recorded.jsonl").read_text().splitlines() if line]
    with StubMaster() as master:
        assert run_trial(master, SCRIPT, workdir, HPARAMS | {"max_steps": 4}).code == 0
    for path in ("runs/start", "progress", "checkpoints"):
        old = next(shape(r["request"]) for r in recorded if r["path"].endswith(path) and r["method"] == "POST")
        new = next(shape(body) for request, body in master.requests if request.endswith(path))
        for key in ("resources", "checkpointStorage"):  # the files' names, and another kind of storage
            old.pop(key, None), new.pop(key, None)
        assert new == old, path
    for group in ("training", "validation"):
        old, new = (
            next(shape(body) for body in bodies if body.get("group") == group)
            for bodies in (
                [r["request"] for r in recorded if r["path"].endswith("metrics")],
                [body for request, body in master.requests if request.endswith("metrics")],
            )
        )
        assert new == old, group
