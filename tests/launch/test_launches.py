"""Launches that people get wrong: each kind ends in one message that says what to write instead, and none hangs."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from launch import ROOT, SCRIPT, Outcome, free_port, launch, run
from tiny import overrides

CONFIG = ("--config", str(ROOT / "config.yaml"))
FEW = overrides(max_steps=2, validation_period=2, warmup_steps=1)
GOOD = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
GOOD |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def assert_refused(outcome: Outcome, *words: str, name: Any = "") -> None:
    assert outcome.code == 1, f"{name}: {outcome.codes} {outcome.text}"
    assert outcome.text.count("fsdp_train.py: ") == 1, f"{name}: {outcome.text}"
    assert "Traceback" not in outcome.text, f"{name}: {outcome.text}"
    assert all(word in outcome.text for word in words), f"{name}: {outcome.text}"
    assert "first step" not in outcome.text


def test_launcher_variables(tmp_path: Path) -> None:
    """None is guessed: an incomplete, empty or impossible set is refused, with the command to use."""
    cases: list[tuple[dict[str, str], str]] = [({name: ""}, f"'{name}': ''") for name in GOOD if name != "MASTER_ADDR"]
    cases += [({"RANK": "x"}, "'RANK': 'x'"), ({"RANK": "1"}, "'RANK': '1'"), ({"RANK": "-1"}, "'RANK': '-1'")]
    cases += [({"LOCAL_RANK": "3"}, "'LOCAL_RANK': '3'"), ({"WORLD_SIZE": "0"}, "'WORLD_SIZE': '0'")]
    cases += [({"MASTER_PORT": "http"}, "'MASTER_PORT': 'http'"), ({"MASTER_PORT": ""}, "'MASTER_PORT': ''")]
    for changes, words in cases:
        env = GOOD | {"MASTER_PORT": str(free_port())} | changes
        outcome = run(*CONFIG, *FEW, ranks=0, cwd=tmp_path, env=env)
        assert_refused(outcome, words, "torchrun --nnodes", name=changes)
    outcome = run(
        *CONFIG, *FEW, ranks=0, cwd=tmp_path, env={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    )
    assert_refused(outcome, "'LOCAL_RANK': ''", "torchrun --nnodes", name="as mpirun wrappers set them")
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        outcome = run(*CONFIG, *FEW, ranks=0, cwd=tmp_path, env={variable: "2"})
        assert_refused(outcome, "2 tasks, but no RANK", "torchrun --nnodes", name=variable)
        alone = run(*CONFIG, *FEW, ranks=0, cwd=tmp_path, env={variable: "1", "SLURM_NTASKS": "8"})
        assert alone.code == 0, f"{variable} of a batch script: {alone.text}"


def test_master_address(tmp_path: Path) -> None:
    """Refused at once where it cannot be reached; no wait is without a limit."""
    for address in ("::1", "no-such-host.invalid", ""):
        env = GOOD | {"MASTER_ADDR": address or "nothing", "MASTER_PORT": str(free_port())}
        if not address:
            del env["MASTER_ADDR"]
        outcome = run(*CONFIG, *FEW, ranks=0, cwd=tmp_path, env=env)
        assert_refused(outcome, f"MASTER_ADDR = {address or 'nothing'}", "no process group", name=address)
    port = free_port()
    env = GOOD | {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    short = "import datetime, torch.distributed as d; f = d.init_process_group\n"
    short += "d.init_process_group = lambda b, timeout: f(b, timeout=datetime.timedelta(seconds=2))"
    for rank in ("0", "1"):  # the other does not come
        place = env | {"RANK": rank, "GROUP_RANK": rank}
        outcome = run(*CONFIG, *FEW, ranks=0, cwd=tmp_path, env=place, before=short)
        assert_refused(outcome, "MASTER_ADDR = 127.0.0.1", str(port), name=f"only rank {rank}")
    for address in ("localhost", "127.0.0.1"):
        env = GOOD | {"MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
        assert run(*CONFIG, *FEW, ranks=0, cwd=tmp_path, env=env).code == 0, address


# What makes the second of two nodes another, before the script runs there.
SECOND_NODE = "import os, sys\nif os.environ['GROUP_RANK'] == '1':\n    {}"


def test_a_fault_or_difference_of_one_node(tmp_path: Path) -> None:
    """It is said once on each node, and no rank waits for those that are gone."""
    text = (ROOT / "config.yaml").read_text()
    (tmp_path / "other.yaml").write_text(text.replace("experiment_seed: 1", "experiment_seed: 2"))
    (tmp_path / "bad.yaml").write_text("a: [")
    project = tmp_path / "project"
    project.mkdir()
    for name in ("fsdp_train.py", "model.py", "data.py"):
        shutil.copy(ROOT / name, project)
    (project / "data.py").write_text((ROOT / "data.py").read_text() + "\n# changed\n")
    blocked = tmp_path / "blocked"
    blocked.touch()
    cases = {
        "no config": ("sys.argv[2] = 'absent.yaml'", ["--config absent.yaml", "(rank 2)"]),
        "bad config": ("sys.argv[2] = 'bad.yaml'", ["--config bad.yaml", "(rank 2)"]),
        "bad option": ("sys.argv += ['--nothing']", ["'--nothing'", "(rank 2)"]),
        "bad value": ("sys.argv += ['lr=fast']", ["lr = fast", "(rank 2)"]),
        "no folder": (f"sys.argv += ['--checkpoint-dir', '{blocked}']", [str(blocked), "(rank 2)"]),
        "nothing to resume": ("sys.argv += ['--resume', 'latest']", ["--resume latest", "(rank 2)"]),
        "other seed": ("sys.argv[2] = 'other.yaml'", ["rank 0 has seed=1", "rank 2 has seed=2"]),
        "other lr": ("sys.argv += ['lr=0.5']", ["rank 0 has lr=0.01", "rank 2 has lr=0.5"]),
        "other max_steps": ("sys.argv += ['max_steps=9']", ["rank 0 has max_steps=2", "rank 2 has max_steps=9"]),
        "other script": (
            f"import pathlib; f = pathlib.Path.glob; p = {str(project)!r}; "
            "pathlib.Path.glob = lambda s, g: f(pathlib.Path(p) if g == '*.py' else s, g)",
            ["rank 0 has 'scripts'", "rank 2 has 'scripts'"],
        ),
    }
    for name, (source, words) in cases.items():
        arguments = ("--config", str(ROOT / "config.yaml"), *FEW)
        outcome = run(*arguments, ranks=4, nodes=2, cwd=tmp_path, before=SECOND_NODE.format(source))
        assert set(outcome.codes) == {1}, f"{name}: {outcome.codes} {outcome.text}"
        assert [text.count("fsdp_train.py: ") for text in outcome.texts] == [1, 0, 1, 0], f"{name}: {outcome.text}"
        assert "Traceback" not in outcome.text and all(word in outcome.text for word in words), (
            f"{name}: {outcome.text}"
        )


def shell(command: str, cwd: Path) -> Outcome:
    words = " ".join([sys.executable, str(SCRIPT), *CONFIG, *FEW])
    return launch([["bash", "-c", command.replace("TRAIN", words)]], cwd).finish()


def test_streams_that_are_closed_or_end(tmp_path: Path) -> None:
    for command in (
        "TRAIN >&-",
        "TRAIN 2>&-",
        "TRAIN >&- 2>&- <&-",
        "set -o pipefail; TRAIN 2>&1 | head -3",
        "set -o pipefail; TRAIN --dry-run | head -1",
        "set -o pipefail; TRAIN --dry-run | true",
    ):
        outcome = shell(command, tmp_path)
        assert outcome.code == 0, f"{command}: {outcome.text}"
        assert "Traceback" not in outcome.text and "Broken" not in outcome.text, f"{command}: {outcome.text}"
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4, "training went on to its end"


def test_tools_around_the_script(tmp_path: Path) -> None:
    """The interpreter ends normally, so that they can write what they found."""
    words = [str(SCRIPT), *CONFIG, *FEW]
    profile = launch([[sys.executable, "-m", "cProfile", "-o", "prof.out", *words]], tmp_path).finish()
    assert profile.code == 0 and (tmp_path / "prof.out").stat().st_size > 10_000, profile.text
    hook = "import atexit; atexit.register(lambda: print('hook ran'))"
    for arguments, code in ((FEW, 0), (["lr=fast"], 1)):
        outcome = run(*CONFIG, *arguments, ranks=0, cwd=tmp_path, before=hook)
        assert outcome.code == code and "hook ran" in outcome.text, outcome.text
    debugger = launch([[sys.executable, "-m", "pdb", "-c", "continue", "-c", "quit", *words]], tmp_path).finish()
    assert debugger.code == 0 and "done: " in debugger.text, debugger.text


def test_directory_names(tmp_path: Path) -> None:
    """A local directory is a path, whatever is in its name."""
    for name in ("exp:lr", "runs/lr=3e-3#2", "a;b", "what?", "with space", "-", "ü", "%20", "file:x"):
        outcome = run(*CONFIG, *FEW, f"--checkpoint-dir={name}", ranks=0, cwd=tmp_path)
        assert outcome.code == 0, f"{name}: {outcome.text}"
        (saved,) = (tmp_path / name).iterdir()
        again = run(*CONFIG, *FEW, f"--checkpoint-dir={name}", "--resume", "latest", ranks=0, cwd=tmp_path)
        assert again.code == 0 and "nothing left to do at step 2" in again.text, f"{name}: {again.text}"
        assert list((tmp_path / name).iterdir()) == [saved]
    for name in ("s3://bucket/a", "gs://bucket", "azure://x", "https://host/x"):
        outcome = run(*CONFIG, *FEW, "--checkpoint-dir", name, ranks=0, cwd=tmp_path)
        assert_refused(outcome, name, "checkpoint_storage", name=name)


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    """Found before the first step."""
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    names = ["file", "file/below", "dangling", "/proc/checkpoints"]
    if os.geteuid():
        (tmp_path / "read-only").mkdir(mode=0o500)
        names.append("read-only")
    for name in names:
        outcome = run(*CONFIG, *FEW, "--checkpoint-dir", name, ranks=2, cwd=tmp_path)
        assert_refused(outcome, "--checkpoint-dir", name, "cannot be used", name=name)


def test_a_warm_up_that_never_ends_is_said(tmp_path: Path) -> None:
    for warmup, warned in ((2, True), (3, True), (1, False)):
        outcome = run(*CONFIG, *FEW, f"warmup_steps={warmup}", ranks=0, cwd=tmp_path)
        assert outcome.code == 0
        assert outcome.text.count("rate never reaches lr") == warned, outcome.text
