"""What is sent to a cluster and what is said before: the two YAML files, the upload, and --dry-run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from determined.common.context import read_v1_context
from determined.common.util import yaml_safe_load
from launch import ROOT, SCRIPT, Outcome, finish, start

import fsdp_train

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # inside determined

FILES = ("config.yaml", "distributed.yaml")
UPLOAD = {
    "README.md",
    "config.yaml",
    "data.py",
    "distributed.yaml",
    "fsdp_train.py",
    "model.py",
    "requirements.txt",
}

# The keys that the master of Determined 0.38.1 knows, less those that it ignores or calls deprecated and those that do
# nothing for a Core API script, which decides itself when to validate, to save and to profile.
ALLOWED: dict[str, set[str] | None] = {  # None: what is in it is no matter of the master's
    "name": None,
    "description": None,
    "labels": None,
    "entrypoint": None,
    "max_restarts": None,
    "preemption_timeout": None,
    "hyperparameters": None,
    "data": None,
    "workspace": None,
    "project": None,
    "environment": {"image", "environment_variables", "force_pull_image", "pod_spec", "registry_auth"},
    "resources": {
        "slots_per_trial",
        "max_slots",
        "resource_pool",
        "priority",
        "weight",
        "shm_size",
        "is_single_node",
        "devices",
    },
    "searcher": {"name", "metric", "smaller_is_better", "source_trial_id", "source_checkpoint_uuid"},  # of `single`
    "reproducibility": {"experiment_seed"},
    "checkpoint_storage": {
        "save_experiment_best",
        "save_trial_best",
        "save_trial_latest",
    },  # the place is the cluster's
    "log_policies": {"name", "pattern", "action"},
    "retention_policy": {"log_retention_days"},
}


def experiment(name: str) -> dict[str, Any]:
    return yaml_safe_load((ROOT / name).read_text())


# ---- The YAML files ----


@pytest.mark.parametrize("name", FILES)
def test_every_key_means_something_to_the_master(name: str) -> None:
    config = experiment(name)
    assert config.keys() <= ALLOWED.keys()
    assert config.keys() >= {"name", "entrypoint", "searcher", "hyperparameters", "resources", "environment"}
    for section, keys in ALLOWED.items():
        content = config.get(section, {}) if keys else {}
        for part in content if isinstance(content, list) else [content]:
            assert part.keys() <= (keys or set()), section
    assert config["searcher"]["name"] == "single"
    assert (config["searcher"]["metric"], config["searcher"]["smaller_is_better"]) == ("validation_loss", True)


@pytest.mark.parametrize("name", FILES)
def test_hyperparameters_survive_the_master(name: str) -> None:
    """It parses YAML 1.1, where yes and on are booleans, and takes a dict for a search range."""
    hparams = experiment(name)["hyperparameters"]
    assert all(value is None or isinstance(value, (bool, int, float, str)) for value in hparams.values())
    booleans = {"y", "n", "yes", "no", "on", "off", "true", "false"}
    assert not booleans & {str(word).lower() for pair in hparams.items() for word in pair if isinstance(word, str)}


@pytest.mark.parametrize(("name", "slots", "restarts"), [("config.yaml", 2, 1), ("distributed.yaml", 16, 5)])
def test_where_it_runs(name: str, slots: int, restarts: int) -> None:
    config = experiment(name)
    assert config["environment"]["image"] == "determinedai/pytorch-ngc:0.38.1"
    assert config["resources"]["slots_per_trial"] == slots
    assert config["max_restarts"] == restarts
    launcher, script = re.fullmatch(r"(python3 -m \S+) python3 (\S+)", config["entrypoint"].strip()).groups()  # type: ignore[union-attr]
    assert launcher == "python3 -m determined.launch.torch_distributed"
    assert script in UPLOAD
    assert (ROOT / script).is_file()
    for variable in config["environment"].get("environment_variables", []):
        assert re.fullmatch(r"[A-Z][A-Z0-9_]*=\S+", variable)


def test_the_large_run_has_what_a_real_run_needs() -> None:
    config = experiment("distributed.yaml")
    assert config["resources"]["shm_size"] == "16G"
    assert config["checkpoint_storage"] == {"save_experiment_best": 0, "save_trial_best": 1, "save_trial_latest": 2}
    variables = dict(line.split("=", 1) for line in config["environment"]["environment_variables"])
    assert int(variables["TORCH_NCCL_TRACE_BUFFER_SIZE"]) > 0
    assert variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert variables["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    assert int(variables["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > fsdp_train.TIMEOUT.total_seconds()
    hparams = config["hyperparameters"]
    assert (hparams["sharding"], hparams["activation_checkpointing"]) == ("hybrid", True)


@pytest.mark.parametrize(
    ("line", "action"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has", "cancel_retries"),
        ("fsdp_train.py: hyperparameters:", "cancel_retries"),
        ("fsdp_train.py: checkpoint 3f0c9f7a: __0_0.distcp was changed after it was written", "cancel_retries"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "exclude_node"),
        ("INFO: [7] fsdp_train: step 20/54000 | loss 10.8 | grad_norm 1.2 | ETA 3 days, 1:02:03", None),
        ("torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error", None),
    ],
)
def test_log_policies(line: str, action: str | None) -> None:
    policies = experiment("distributed.yaml")["log_policies"]
    assert {policy["action"] for policy in policies} == {"cancel_retries", "exclude_node"}
    assert len({policy["name"] for policy in policies}) == len(policies)
    matching = [policy["action"] for policy in policies if re.search(policy["pattern"], f"[rank=3] {line}")]
    assert matching == ([action] if action else [])


# ---- The upload ----


def test_upload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    left_behind = ["checkpoints/uuid/__0_0.distcp", "traces/rank0.1.pt.trace.json", "__pycache__/model.cpython-310.pyc"]
    left_behind += [
        "weights.pt",
        "tokens.bin",
        ".venv/bin/python",
        ".git/HEAD",
        ".mypy_cache/x.json",
        ".pytest_cache/README.md",
    ]
    left_behind += [".ruff_cache/x"]
    for name in {*listed, *left_behind}:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    shutil.copy(ROOT / ".detignore", tmp_path)
    sent = {file.path for file in read_v1_context(tmp_path)}
    assert sent == UPLOAD
    assert sent == {name for name in listed if not name.startswith((".", "tests/"))}


# ---- --dry-run ----

# Less memory than the weights of the large model need; no GPU, no other process, no network.
ALONE = """
import resource, runpy, socket, sys
import torch

def refuse(*_, **__):
    raise RuntimeError("not in a dry run")

torch.distributed.init_process_group = torch.cuda.is_available = torch.cuda._lazy_init = refuse
socket.socket.bind = socket.socket.connect = refuse
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def dry_run(cwd: Path, *arguments: str) -> Outcome:
    command = [sys.executable, "-c", ALONE, str(SCRIPT), "--dry-run", *arguments]
    return finish(start(command, cwd, {"PYTHONPATH": str(ROOT)}))


def test_dry_run_says_what_the_large_run_will_do_and_cost(tmp_path: Path) -> None:
    outcome = dry_run(tmp_path, "--config", str(ROOT / "distributed.yaml"))
    assert outcome.code == 0, outcome.text
    banner = {line.split()[0]: line.split(maxsplit=1)[1] for line in outcome.text.splitlines()}
    # Computed by hand. V = 50304, T = 2048, C = 2048, 24 blocks of 12 C^2 + 2 C; and V C, T C, C, V C:
    assert "1,418,299,392 parameters" in banner["model"]
    assert banner["ranks"] == "16: 2 node(s) x 8; 2 replica(s) x 8 shard(s)"
    assert banner["precision"].startswith("bfloat16 (auto")
    assert "reduction float32" in banner["precision"]
    # 256 * 2048, 256 / 16 / 8. FLOPs: for each token 6 of each weight of a matrix that is multiplied, and 12 T C in
    # each block for the attention.
    assert "= 524,288 tokens; each rank 2 micro-batch(es) of 8 sequences; 4.76e+15 FLOPs" in banner["step"]
    assert "54,000 steps, 28,311,552,000 tokens" in banner["run"]
    # 4 bytes * n / 8, twice that for Adam; a checkpoint is 12 bytes * n.
    assert "2.837 GB a rank: weights 709.1 MB, gradients 709.1 MB, Adam 1.418 GB" in banner["memory"]
    assert "17.02 GB" in banner["checkpoint"]
    # Two micro-batches, each 7/8 of 2 + 2 + 4 bytes * n in the node, and half of twice 4 bytes * n / 8 between nodes.
    assert "21.27 GB" in banner["traffic"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("slots", "ranks"),
    [("", "2: 1 node(s) x 2; 1 replica(s) x 2 shard(s)"), ("slots_per_trial=16", "16: 2 node(s) x 8; 1 replica(s)")],
)
def test_dry_run_takes_the_ranks_from_the_slots(slots: str, ranks: str, tmp_path: Path) -> None:
    outcome = dry_run(tmp_path, "--config", str(ROOT / "config.yaml"), *slots.split())
    assert outcome.code == 0, outcome.text
    assert f"ranks      {ranks}" in outcome.text


def test_dry_run_shows_all_errors_first(tmp_path: Path) -> None:
    wrong = ("lr=-1", "lrr=1", "sharding=half", "global_batch_size=15", "n_heads=3", "branching=9999")
    outcome = dry_run(tmp_path, "--config", str(ROOT / "config.yaml"), *wrong)
    assert outcome.code == 1
    for part in (
        "lr = -1:",
        "lrr: no such",
        "sharding = 'half':",
        "15 does not divide",
        "n_heads = 3",
        "branching = 9999",
    ):
        assert outcome.text.count(part) == 1, part
    assert "Traceback" not in outcome.text
    assert "parameters" not in outcome.text.replace("hyperparameters", "")
