"""The script as a trial on a cluster: the real package, against a stub of the master that checks every request."""

import json
import math
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from determined.common.context import read_v1_context
from determined.common.util import yaml_safe_load
from moto.server import ThreadedMotoServer

from cluster import can_unshare, launch_line, run_trial
from launch import ROOT, Job
from processes import whole_checkpoints
from stub_master import RECORDED, Json, StubMaster, shape
from tiny import TINY, overrides, tiny

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # inside determined

CONFIG, LARGE = (yaml_safe_load((ROOT / name).read_text()) for name in ("config.yaml", "distributed.yaml"))
HPARAMS = {k: v for k, v in tiny(max_steps=16, lr=0.03).items() if k not in ("seed", "slots_per_trial")}
MASTER_CALLS = {
    "start": "POST .*/runs/start",
    "poll": "GET .*/signals/preemption",
    "metrics": "POST .*/metrics",
    "progress": "POST .*/progress",
    "checkpoint": "POST .*/checkpoints",
    "acknowledgement": "POST .*/ack_preemption",
}
QUESTION = r"GET .*/trials/\d+$"  # whether the search goes on
# A report that takes long enough for signals and kills to arrive a few reports later at most.
SLOWLY = ("delay", MASTER_CALLS["progress"], math.inf, 0.25)
# Each call is tried twice.
IMPATIENT = {"DET_RETRY_CONFIG": '{"total": 1, "allowed_methods": false, "status_forcelist": [500]}'}


def finish(master: StubMaster, workdir: Path, hparams: Json = HPARAMS, **options: Any) -> str:
    """The output of the trial's current run, which ends well."""
    outcome = run_trial(master, workdir, hparams, **options)
    assert outcome.code == 0, outcome.text
    assert master.violations == []
    return outcome.text


def pause(master: StubMaster, workdir: Path, step: int) -> str:
    """The output of a run that is paused after `step`."""
    master.inject(*SLOWLY)
    master.preempt_step = step
    text = finish(master, workdir)
    assert "preempted at step" in text
    master.new_run()
    return text


def comparable(master: StubMaster, group: str) -> list[tuple[int, Json]]:
    """The history of a group without what no two runs share."""
    measured = ("tokens_per_second", "peak_memory_gib")
    return [(step, {k: v for k, v in row.items() if k not in measured}) for _, step, row in master.history(group)]


def saved_steps(master: StubMaster) -> list[int]:
    return [checkpoint["metadata"]["steps_completed"] for checkpoint in master.checkpoints]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> StubMaster:
    """The master of a finished trial on 2 slots."""
    with StubMaster() as master:
        finish(master, tmp_path_factory.mktemp("undisturbed"))
    assert master.progress == [step / 16 for step in range(2, 17, 2)]
    assert saved_steps(master) == [8, 16]
    assert [step for _, step, _ in master.history("training")] == list(range(2, 17, 2))
    assert [step for _, step, _ in master.history("validation")] == [4, 8, 12, 16]
    assert master.acks == master.early_exits == []
    return master


def assert_complete(master: StubMaster, undisturbed: StubMaster) -> None:
    """The trial finished, and the cluster has of it what it has of an undisturbed one."""
    assert master.violations == []
    for group in ("training", "validation"):
        rows = comparable(undisturbed, group)
        assert comparable(master, group) == [(step, pytest.approx(row, rel=1e-4)) for step, row in rows]
    assert master.progress[-1] == 1
    steps = saved_steps(master)
    assert steps == sorted(set(steps)) and steps[-1] == 16, "each state is saved once"


@pytest.fixture
def master() -> Iterator[StubMaster]:
    with StubMaster() as master:
        yield master


# ---- Pause, crash, resume, continue, fork ----


def test_a_trials_whole_life(undisturbed: StubMaster, master: StubMaster, tmp_path: Path) -> None:
    paused = pause(master, tmp_path, 2)
    assert f"  checkpoint {master.latest_checkpoint()}" in paused

    def kill_rank_1(job: Job) -> None:
        if master.rows[-1].step >= 10:
            job.signal(signal.SIGKILL, 1)

    crashed = run_trial(master, tmp_path, HPARAMS, during=kill_rank_1)
    assert crashed.code == -signal.SIGKILL
    assert saved_steps(master)[-1] == 8

    master.new_run()
    master.preempt_step = 10
    assert "at step 8 of checkpoint" in finish(master, tmp_path, slots=1)

    master.new_run()
    master.preempt_step = 16  # too late: an acknowledgement would have the finished trial queued again
    finish(master, tmp_path, slots=3)
    assert_complete(master, undisturbed)
    assert {run_id for run_id, _, _ in master.history("training")} == {1, 2, 3, 4}
    assert master.acks == [f"{master.task_id}.1", f"{master.task_id}.3"]


def test_continue_and_fork_of_a_finished_trial(undisturbed: StubMaster, tmp_path: Path) -> None:
    checkpoint, storage = undisturbed.checkpoints[-1], undisturbed.storage
    with StubMaster(run_id=2, storage=storage) as master:
        master.checkpoints.append(checkpoint)
        assert "nothing left to do at step 16" in finish(master, tmp_path)
    assert master.rows == master.progress == master.acks == []
    assert master.checkpoints == [checkpoint]

    hparams = HPARAMS | {"max_steps": 4, "reporting_period": 1}
    with StubMaster(trial_id=8, storage=storage) as master:
        text = finish(master, tmp_path, hparams, env={"DET_LATEST_CHECKPOINT": checkpoint["uuid"]})
    assert f"weights of trial 7, from step 0: {checkpoint['uuid']}" in text
    assert [step for _, step, _ in master.history("training")] == [1, 2, 3, 4]
    first = master.history("training")[0][2]
    assert first["loss"] < math.log(HPARAMS["vocab_size"]) - 1
    assert first["loss"] == pytest.approx(undisturbed.rows[-1].values["validation_loss"], abs=0.2)
    assert first["lr"] == pytest.approx(HPARAMS["lr"] / 3), "the schedule starts over"
    assert saved_steps(master) == [4]


# ---- What is sent, refused, and stopped by a search ----


def test_what_is_sent_has_the_shape_of_what_was_recorded(undisturbed: StubMaster) -> None:
    exchanges = [json.loads(line) for line in RECORDED.read_text().splitlines() if line]
    recorded = [(f"{exchange['method']} {exchange['path']}", exchange["request"]) for exchange in exchanges]

    def sent(requests: list[tuple[str, Any]], path: str, group: str | None) -> Any:
        """Keys and types, less what is that of another kind of storage, and the files' names."""
        body = next(b for r, b in requests if re.fullmatch(f"POST .*/{path}", r) and b.get("group") == group)
        return {key: shape(value) for key, value in body.items() if key not in ("checkpointStorage", "resources")}

    calls = [(path, None) for path in ("runs/start", "progress", "checkpoints")]
    for path, group in [*calls, ("metrics", "training"), ("metrics", "validation")]:
        assert sent(undisturbed.requests, path, group) == sent(recorded, path, group), (path, group)


def test_every_validation_has_what_a_search_needs(master: StubMaster, tmp_path: Path) -> None:
    """The stub refuses one without the metric, and what is no finite number."""
    assert CONFIG["searcher"]["metric"] == LARGE["searcher"]["metric"] == master.searcher_metric
    # As the master sends them: whole numbers are int.
    sample = {"lr": 1, "dropout": 0, "max_grad_norm": 1, "weight_decay": 0, "min_lr_ratio": 1, "d_model": 8}
    finish(master, tmp_path, HPARAMS | {"max_steps": 4, "validation_period": 2} | sample)
    assert [(step, row["batches"]) for _, step, row in master.history("validation")] == [(2, 2), (4, 4)]
    assert master.history("training")[-1][2]["lr"] == 1


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
NO_LAUNCHER = """
import os
[os.environ.pop(name) for name in [*os.environ] if name.endswith(("RANK", "WORLD_SIZE", "MASTER_PORT"))]
"""
NO_TENSORBOARD = """
import sys, torch
vars(torch.utils).pop("tensorboard", None)
for name in list(sys.modules):
    if name.startswith(("tensorboard", "torch.utils.tensorboard", "determined.tensorboard.metric_writers")):
        del sys.modules[name]
sys.modules["tensorboard"] = None
"""


def test_what_cannot_work_is_an_invalid_hyperparameter(master: StubMaster, tmp_path: Path) -> None:
    """Of which the master hears from all ranks, and the trial ends well."""
    master.inject("reset", "POST .*/early_exit")
    text = finish(master, tmp_path, HPARAMS | {"global_batch_size": 13, "n_heads": 3})
    assert master.early_exits == ["EXITED_REASON_INVALID_HP"] * 2
    assert text.count("global_batch_size = 13 does not divide by the 2 ranks: use 12") == 1
    assert text.count("n_heads = 3 does not divide d_model = 16: use 2") == 1

    text = finish(master, tmp_path, HPARAMS | {"amp_dtype": "bfloat16"}, before=OLD_GPU)
    assert master.early_exits == ["EXITED_REASON_INVALID_HP"] * 4
    needs = "amp_dtype = bfloat16 needs compute capability 8.0, not Tesla V100, compute capability 7.0"
    assert f"{needs}: use auto or float16" in text
    assert master.rows == master.checkpoints == []


def test_wrong_starts_of_a_trial(master: StubMaster, tmp_path: Path) -> None:
    """Each with one message, no traceback, and exit code 1."""
    alone = "2 slots, but 1 rank(s): entrypoint: python3 -m determined.launch.torch_distributed python3 fsdp_train.py"
    cases: list[tuple[Json, list[str], str, str]] = [
        ({"max_step": 5}, [], "", "max_step: no such hyperparameter"),
        ({}, ["max_steps=4"], "", "arguments ['max_steps=4']: in a trial, write them as hyperparameters"),
        ({}, [], NO_LAUNCHER, alone),
        ({}, [], NO_TENSORBOARD, "fsdp_train.py: import of tensorboard"),
    ]
    for hparams, arguments, before, says in cases:
        outcome = run_trial(master, tmp_path, HPARAMS | hparams, *arguments, before=before)
        assert outcome.code == 1 and says in outcome.texts[0], (says, outcome.text)
        assert "Traceback" not in outcome.text, outcome.text
        assert before == NO_LAUNCHER or outcome.text.count("fsdp_train.py: ") == 1, outcome.text  # each is alone
        assert master.violations == master.early_exits == master.rows == []
        master.new_run()


def test_a_loss_that_is_not_finite_ends_the_retries(master: StubMaster, tmp_path: Path) -> None:
    outcome = run_trial(master, tmp_path, HPARAMS | {"lr": 1e30}, slots=1)
    assert outcome.code == 1
    lines = outcome.text.splitlines()
    matching = [policy for policy in LARGE["log_policies"] if any(re.search(policy["pattern"], line) for line in lines)]
    assert {policy["action"] for policy in matching} == {"cancel_retries"}
    assert master.violations == master.checkpoints == []


# The package samples once a second and reports every ten: longer than this trial.
FAST_PROFILER = """
import functools
from determined import core
core.ProfilerContext.on = functools.partialmethod(core.ProfilerContext.on, sampling_interval=0.1, samples_per_report=1)
"""


def test_profilers(master: StubMaster, tmp_path: Path) -> None:
    master.inject(*SLOWLY)
    hparams = HPARAMS | {"max_steps": 8, "core_api_profiler": True, "torch_profiler": True}
    finish(master, tmp_path, hparams, before=FAST_PROFILER)
    assert master.profiled >= {"cpu", "memory", "disk", "network"}
    synced = Path(master.storage["container_path"], "stub-cluster/tensorboard/experiment/3/trial/7")
    traces = [json.loads(path.read_text())["traceEvents"] for path in synced.rglob("*.pt.trace.json")]
    assert len(traces) == 2
    for events in traces:
        steps = {event["name"] for event in events if "ProfilerStep" in event["name"]}
        assert steps == {f"ProfilerStep#{index}" for index in (2, 3, 4)}, "steps 3 to 5"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("task_type", "slots"), [("SHELL", 2), ("COMMAND", 0), ("NOTEBOOK", 0)])
def test_a_task_that_is_no_trial(task_type: str, slots: int, master: StubMaster, tmp_path: Path) -> None:
    """Such a machine is as good as a laptop."""
    config = ("--config", str(ROOT / "config.yaml"), *overrides(max_steps=8, torch_profiler="true"))
    dry = run_trial(master, tmp_path, {}, *config, "--dry-run", task_type=task_type, slots=0)
    assert dry.code == 0 and "7,504 parameters" in dry.text, dry.text
    first = run_trial(master, tmp_path, {}, *config, task_type=task_type, slots=slots)
    assert first.code == 0 and "done: " in first.text, first.text
    assert len(list((tmp_path / "traces").iterdir())) == (slots or 1)
    resume = ("--resume", "latest", "max_steps=12")
    second = run_trial(master, tmp_path, {}, *config, *resume, task_type=task_type, slots=0)
    assert second.code == 0 and "at step 8 of" in second.text, second.text
    assert {path.name for path in tmp_path.iterdir()} == {"traces", "checkpoints"}
    assert sorted(whole_checkpoints(tmp_path / "checkpoints")) == [8, 12]
    assert master.rows == master.checkpoints == master.violations == []


# The script waits 2 seconds between questions.
CURIOUS = """
import threading
wait = threading.Event.wait
threading.Event.wait = lambda self, timeout=None: wait(self, 0.2 if timeout == 2 else timeout)
"""


def test_a_trial_that_the_search_stops_saves_and_ends(master: StubMaster, tmp_path: Path) -> None:
    master.searcher, master.stop_step = "adaptive_asha", 4
    master.inject("delay", MASTER_CALLS["progress"], math.inf, 1)  # 4 seconds between validations
    text = finish(master, tmp_path, HPARAMS | {"reporting_period": 1}, before=CURIOUS)
    (step,) = re.findall(r"stopped by the search at step (\d+)", text)
    assert saved_steps(master)[-1] == int(step)
    assert [step for _, step, _ in master.history("validation")] == [4], "none after the stop"
    assert master.acks == []


@pytest.mark.parametrize("fault", ["fails", "never answers", "single"])
def test_a_master_that_does_not_say_delays_and_ends_nothing(fault: str, master: StubMaster, tmp_path: Path) -> None:
    if fault == "fails":
        master.inject("fail", QUESTION, math.inf)
    elif fault == "never answers":
        master.inject("delay", QUESTION, 1, 3600)
    master.inject(*SLOWLY)
    master.searcher = "single" if fault == "single" else "adaptive_asha"
    text = finish(master, tmp_path, env=IMPATIENT, before=CURIOUS)
    assert master.progress[-1] == 1
    assert text.count("does the search go on?") == (fault == "fails"), "once"
    asked = sum(re.search(QUESTION, request) is not None for request, _ in master.requests)
    assert (asked > 3, asked > 0) == (fault == "fails", fault != "single"), asked


# ---- Cloud storage and containers ----


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "key"), ("DEFAULT_REGION", "us-east-1")):
            patch.setenv(f"AWS_{name}", value)
        bucket = boto3.resource("s3", endpoint_url=f"http://{host}:{port}").Bucket("checkpoints")
        bucket.create()
        yield bucket
    server.stop()


def storage_in(bucket: Any) -> Json:
    return {"type": "s3", "bucket": bucket.name, "endpoint_url": bucket.meta.client.meta.endpoint_url}


def assert_all_in_cloud(master: StubMaster, bucket: Any, ranks: int) -> None:
    """Of the last checkpoint. Determined uploads no metadata.json of a sharded one."""
    names = {"train_state.json", ".metadata", *(f"__{rank}_0.distcp" for rank in range(ranks))}
    files = [entry.key for entry in bucket.objects.filter(Prefix=master.checkpoints[-1]["uuid"])]
    assert {name.partition("/")[2] for name in files} == names


@pytest.mark.skipif(not can_unshare(), reason="containers need root and `unshare -m`")
def test_large_run_on_two_nodes(undisturbed: StubMaster, master: StubMaster, tmp_path: Path, bucket: Any) -> None:
    """Each container has a /tmp of its own, where its ranks find the files of a checkpoint and leave theirs."""
    master.storage = storage_in(bucket)
    pause(master, tmp_path, 2)
    assert_all_in_cloud(master, bucket, 2)
    settings = {k: v for k, v in LARGE["hyperparameters"].items() if k not in (*TINY, "branching")}
    # 3 micro-batches on each rank. The launch tests compile such a model; here it would take a minute.
    settings |= {"micro_batch_size": 1, "compile": False}
    assert settings["sharding"] == "hybrid" and settings["activation_checkpointing"] and settings["reduce_dtype"]
    env = dict(line.split("=", 1) for line in LARGE["environment"]["environment_variables"])
    for file in read_v1_context(ROOT):  # what `det experiment create distributed.yaml .` sends
        if not file.path.endswith("/"):
            (tmp_path / file.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file.path, tmp_path / file.path)
    assert CONFIG["entrypoint"] == LARGE["entrypoint"]
    outcome = launch_line(master, LARGE["entrypoint"], tmp_path, HPARAMS | settings, env)
    assert outcome.codes == [0, 0], outcome.text
    assert all(words in outcome.text for words in (" of checkpoint ", "2 node(s) x 2", "2 replica(s) x 2 shard(s)"))
    assert re.search(r"^\[rank=0\] .*step 16/16  checkpoint ", outcome.text, re.MULTILINE)
    assert_complete(master, undisturbed)
    assert_all_in_cloud(master, bucket, 4)


# ---- Faults of the master and of the network ----


def test_errors_of_the_master_that_last_end_the_run(
    undisturbed: StubMaster, master: StubMaster, tmp_path: Path
) -> None:
    """One line names the call and the answer; only for the signal to pause the package asks for ever."""
    for name in ("start", "metrics", "progress", "checkpoint", "acknowledgement"):
        master.inject("fail", MASTER_CALLS[name], math.inf)
        master.preempt_step = 6
        outcome = run_trial(master, tmp_path, HPARAMS, env=IMPATIENT)
        says = re.findall(r"^fsdp_train.py: (.*)$", outcome.text, re.MULTILINE)
        assert outcome.code == 1 and len(says) == 1, f"{name}: {outcome.text}"
        assert "too many 500 error responses" in says[0] and re.search(MASTER_CALLS[name].split()[1], says[0]), name
        assert "Traceback" not in outcome.texts[0], outcome.text
        master.faults.clear()
        master.new_run()
    master.inject("fail", MASTER_CALLS["poll"], math.inf)
    finish(master, tmp_path, env=IMPATIENT)
    assert_complete(master, undisturbed)


def test_a_master_that_comes_back_loses_nothing(
    undisturbed: StubMaster, master: StubMaster, tmp_path: Path, bucket: Any
) -> None:
    """Each kind of call has an error 500, as without a database, and loses its connection before it and after.

    The checkpoints are in cloud storage, which `test_large_run_on_two_nodes` has only where there are containers.
    """
    master.storage = storage_in(bucket)
    for name, pattern in MASTER_CALLS.items():
        master.inject("fail", pattern)
        master.inject("reset", pattern)
        if name != "checkpoint":  # the master answers 500 to a checkpoint that it knows, for ever
            master.inject("drop", pattern)
    master.inject("reset", "POST .*/metrics", seconds=5)
    master.inject("delay", MASTER_CALLS["progress"], math.inf, 0.6)  # a lost signal is asked for again after 2 seconds
    pause(master, tmp_path, 6)
    finish(master, tmp_path)
    assert_complete(master, undisturbed)
    assert_all_in_cloud(master, bucket, 2)
    assert {request.rpartition("/")[2] for request in master.redelivered} >= {"metrics", "progress", "ack_preemption"}


# Where the script says an hour, for its start and for each step.
IMPATIENCE = """
import faulthandler
later = faulthandler.dump_traceback_later
faulthandler.dump_traceback_later = lambda seconds, exit: later(seconds // 600, exit=exit)
"""


@pytest.mark.parametrize("call", ["start", "progress", "checkpoint"])
def test_a_master_that_never_answers_is_not_waited_for_for_ever(call: str, master: StubMaster, tmp_path: Path) -> None:
    """And rank 0 shows where it stands, as do others that it does not take with it first."""
    master.inject("delay", MASTER_CALLS[call], math.inf, 3600)
    outcome = run_trial(master, tmp_path, HPARAMS, before=IMPATIENCE)
    assert outcome.code == 1
    assert "Timeout (0:00:06)!" in outcome.texts[0] and "in start" in outcome.texts[0], outcome.text
    assert master.violations == []
