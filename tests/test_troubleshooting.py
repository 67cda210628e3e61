"""The README's troubleshooting: what it says one sees is what one sees."""

import math
import re
import socket
import sys
from pathlib import Path

from launch import ROOT, SCRIPT, Outcome, finish, run, start
from tiny import overrides

SYMPTOMS = re.findall(
    r"^\| (.+?) \| ", (ROOT / "README.md").read_text().split("## Troubleshooting")[1].split("|---|---|")[1], re.M
)
CONFIG = ("--config", str(ROOT / "config.yaml"))
# Rank 0 of two, which does not wait 10 minutes for the other.
ALONE = """
import datetime
import fsdp_train
fsdp_train.TIMEOUT = datetime.timedelta(seconds=2)
fsdp_train.main()
"""


def assert_named(words: str, outcome: Outcome) -> None:
    """The table has a symptom with `words`, which are in the output of a job that failed."""
    assert sum(f"`{words}" in symptom for symptom in SYMPTOMS) == 1, SYMPTOMS
    assert outcome.code != 0 and words.lower() in outcome.text.lower(), outcome.text


def test_words_of_the_script() -> None:
    for words in ("training is not finite", "skipped_steps"):
        assert sum(f"`{words}`" in symptom for symptom in SYMPTOMS) == 1
        assert words in SCRIPT.read_text()


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    env = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT"), "0")
    env |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    env |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ALONE, *CONFIG, *overrides()]
    outcome = finish(start(command, tmp_path, env), 60)
    assert_named("Timed out", outcome)
    assert "1/2 clients joined" in outcome.text
    assert "this run:" not in outcome.text


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """With --standalone it is not: test_two_jobs_on_one_host."""
    with socket.create_server(("", 0)) as server:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--master-port", str(server.getsockname()[1]), str(SCRIPT), *CONFIG, *overrides()]
        outcome = finish(start(command, tmp_path), 60)
    assert_named("address already in use", outcome)
    assert "this run:" not in outcome.text


def test_weights_that_do_not_fit_fail_before_the_first_step(tmp_path: Path) -> None:
    arguments = overrides(d_model=1024, n_layers=8)  # 1.6 GB with gradients and Adam state
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_DATA, 2 * (3 << 29,)); del sys.argv[0]; "
    command = [sys.executable, "-c", limit + "runpy.run_path(sys.argv[0], run_name='__main__')", str(SCRIPT), *CONFIG]
    outcome = finish(start([*command, *arguments], tmp_path, {"PYTHONPATH": str(ROOT)}), 60)
    assert_named("can't allocate memory", outcome)
    assert "memory     1.6" in outcome.text
    assert "in build_state" in outcome.text and list(tmp_path.iterdir()) == []


def test_repeating_data_are_memorised(tmp_path: Path) -> None:
    """To below their entropy, at the cost of the validation loss; with more of them they are not: test_learns."""
    assert "training loss below the floor" in SYMPTOMS
    periods = dict.fromkeys(("max_steps", "reporting_period", "validation_period", "checkpoint_period"), 60)
    outcome = run(*CONFIG, *overrides(simulated_size_in_batches=1, d_model=32, **periods), ranks=0, cwd=tmp_path)
    assert outcome.code == 0, outcome.text
    floor = math.log(4)
    training, validation = map(float, re.findall(r"step 60/60 \| (?:validation_)?loss ([\d.]+)", outcome.text))
    assert training < floor < validation, outcome.text
