"""Launches that people get wrong: each kind ends in one message that says what to write instead, and none hangs."""

import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster import can_unshare
from launch import ROOT, SCRIPT, Outcome, free_port, launch, run, start
from tiny import overrides

CONFIG = ("--config", str(ROOT / "config.yaml"))
FEW = overrides(max_steps=2, validation_period=2, warmup_steps=1)
GOOD = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
GOOD |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
# The second of two nodes, of one rank each, when the first does not come.
SECOND = {"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
# Where the script says ten minutes, two seconds.
HASTE = "import datetime\ntime = datetime.timedelta\n"
HASTE += "datetime.timedelta = lambda minutes=0, seconds=0: time(seconds=seconds + minutes / 5)"


def train(cwd: Path, *arguments: str, ranks: int = 0, **options: Any) -> Outcome:
    return run(*CONFIG, *FEW, *arguments, ranks=ranks, cwd=cwd, **options)


def place(**changes: Any) -> dict[str, str]:
    """What a launcher tells the only rank, with changes; None takes a variable away."""
    given = GOOD | {"MASTER_PORT": str(free_port())} | changes
    return {name: value for name, value in given.items() if value is not None}


def assert_refused(outcome: Outcome, *words: str, name: Any = "", times: int = 1) -> None:
    assert set(outcome.codes) == {1}, f"{name}: {outcome.codes} {outcome.text}"
    assert outcome.text.count("fsdp_train.py: ") == times, f"{name}: {outcome.text}"
    assert "Traceback" not in outcome.text, f"{name}: {outcome.text}"
    assert all(word in outcome.text for word in words), f"{name}: {words} in {outcome.text}"
    assert "first step" not in outcome.text, f"{name}: {outcome.text}"


def assert_trained(outcome: Outcome, name: Any = "") -> None:
    assert set(outcome.codes) == {0} and "done: " in outcome.text, f"{name}: {outcome.codes} {outcome.text}"


# ---- Launch ----


def test_launcher_variables(tmp_path: Path) -> None:
    """None is guessed: an incomplete, empty or impossible set is refused, with the command to use."""
    names = [*GOOD, "MASTER_PORT"]
    names.remove("MASTER_ADDR")
    cases: list[tuple[dict[str, Any], str]] = [({name: ""}, f"'{name}': ''") for name in names]
    cases += [({"LOCAL_RANK": None}, "'LOCAL_RANK': ''"), ({"GROUP_RANK": None}, "'GROUP_RANK': ''")]
    for name, value in (
        *[("RANK", value) for value in ("x", "1", "-1", "0.0", " 0", "²", "99999999999999999999")],
        *[("WORLD_SIZE", value) for value in ("0", "2", "99999999999999")],
        *[("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "4"), ("GROUP_WORLD_SIZE", "4"), ("MASTER_PORT", "http")],
    ):
        cases.append(({name: value}, f"'{name}': '{value}'"))
    for changes, words in cases:
        outcome = train(tmp_path, env=place(**changes), timeout=60)
        assert_refused(outcome, words, "torchrun --nnodes", name=changes)
    # Kubeflow's, Ray's or mpirun's wrappers; what is left in a shell.
    some: list[dict[str, str]] = [{"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}]
    some += [{"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, {"LOCAL_RANK": "0"}, {"WORLD_SIZE": "8"}]
    for env in some:
        assert_refused(train(tmp_path, env=env), "'RANK': '", "torchrun --nnodes", name=env)
    # Nodes of 2 and 1 ranks, which would build other meshes, and wait for each other.
    uneven = "import os\nrank = int(os.environ['RANK'])\nos.environ |= {'GROUP_WORLD_SIZE': '2', 'GROUP_RANK': "
    uneven += "str(rank // 2), 'LOCAL_RANK': str(rank % 2), 'LOCAL_WORLD_SIZE': '21'[rank // 2]}"
    outcome = train(tmp_path, "sharding=hybrid", ranks=3, before=uneven, timeout=60)
    assert_refused(outcome, "'LOCAL_WORLD_SIZE': '1'", times=3, name="uneven nodes")


def test_tasks_of_srun_and_mpirun_without_ranks(tmp_path: Path) -> None:
    """They would train the same run N times; one task, or a batch script's SLURM_NTASKS, proves nothing."""
    known = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    for name in known:
        others = dict.fromkeys(known, "1")
        assert_refused(train(tmp_path, env=others | {name: "2"}), "no RANK", "torchrun --nnodes", name=name)
        assert_refused(train(tmp_path, env={name: "2"}), "2", "no RANK", "torchrun --nnodes", name=name)
    assert_trained(train(tmp_path, env=dict.fromkeys(known, "1") | {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8"}))
    assert_trained(train(tmp_path, env=place(SLURM_STEP_NUM_TASKS="2")), "torchrun under srun")


def test_master_address(tmp_path: Path) -> None:
    """Refused at once where it is none that can be reached, with address and port."""
    addresses = ["::1", "[::1]", "fe80::1", "no-such-host.invalid", "127.0.0.1:29500", "127.0.0.1 ", "a" * 80, "", None]
    for address in addresses:
        env = place(MASTER_ADDR=address)
        outcome = train(tmp_path, env=env)
        named = f"MASTER_ADDR = {'nothing' if address is None else address}, port {env['MASTER_PORT']}"
        assert_refused(outcome, named, "no process group", name=address)
    for port in ("70000", "99999999999999999999"):
        assert_refused(train(tmp_path, env=place(MASTER_PORT=port)), f"port {port}", name=port)
    with socket.create_server(("127.0.0.1", 0)) as other_program:
        port = str(other_program.getsockname()[1])
        assert_refused(train(tmp_path, env=place(MASTER_PORT=port)), f"port {port}", "address already in use")
    for address in ("localhost", "127.0.0.1", "0.0.0.0"):
        assert_trained(train(tmp_path, env=place(MASTER_ADDR=address)), address)


def test_no_wait_of_the_start_is_without_a_limit(tmp_path: Path) -> None:
    """For a rank that does not come, another program's port, a closed or taken port of the Core API."""
    with socket.create_server(("127.0.0.1", 0)) as deaf, socket.create_server(("", 0)) as taken:
        cases = {
            "only the first": place(WORLD_SIZE="2", GROUP_WORLD_SIZE="2"),
            "only the second": place(**SECOND),
            "an address that does not answer": place(**SECOND, MASTER_ADDR="192.0.2.1"),
            "a program that does not answer": place(**SECOND, MASTER_PORT=str(deaf.getsockname()[1])),
        }
        for name, env in cases.items():
            outcome = train(tmp_path, env=env, before=HASTE, timeout=120)
            words = f"MASTER_ADDR = {env['MASTER_ADDR']}, port {env['MASTER_PORT']}: no process group"
            assert outcome.codes == [1] and words in outcome.text, f"{name}: {outcome.text}"
        blocked = f"{HASTE}\nfrom determined import core\n"
        blocked += "core.DistributedContext.__init__.__kwdefaults__.update(pub_port={}, pull_port={})"
        other = blocked.format("9 + int(os.environ['RANK'])", "11 + int(os.environ['RANK'])").replace(
            "\n", "\nimport os\n", 1
        )
        used = blocked.format(taken.getsockname()[1], free_port())
        for name, before in {"closed": other, "taken": used}.items():
            outcome = train(tmp_path, ranks=2, nodes=2, before=before, timeout=120, grace=60)
            assert outcome.codes == [1, 1] and "Traceback" not in outcome.text, f"{name}: {outcome.text}"
            assert outcome.text.count("MASTER_ADDR = 127.0.0.1, port ") == 2, f"{name}: {outcome.text}"


# What makes the second of two nodes another, before the script runs there.
SECOND_NODE = "import os, sys\nif os.environ['GROUP_RANK'] == '1':\n    {}"


def test_a_fault_or_difference_of_one_node(tmp_path: Path) -> None:
    """It is said once on each node, and no rank waits for those that are gone."""
    text = (ROOT / "config.yaml").read_text()
    (tmp_path / "other.yaml").write_text(text.replace("experiment_seed: 1", "experiment_seed: 2"))
    for name, data in {"bad": b"a: [", "list": b"- a", "binary": b"\xff\0", "blocked": b""}.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "elsewhere").mkdir()
    project = tmp_path / "project"
    project.mkdir()
    for name in ("fsdp_train.py", "model.py", "data.py"):
        shutil.copy(ROOT / name, project)
    (project / "data.py").write_text((ROOT / "data.py").read_text() + "\n# changed\n")
    script = "import pathlib; glob = pathlib.Path.glob; pathlib.Path.glob = "
    script += f"lambda self, p: glob(pathlib.Path({str(project)!r}) if p.endswith('*.py') else self, p)"
    cases: dict[str, list[str]] = {
        **{f"sys.argv[2] = {file!r}": [f"--config {file}"] for file in ("absent", "bad", "list", "binary", ".")},
        "sys.argv += ['--nothing']": ["'--nothing'"],
        "sys.argv += ['--c', 'x']": ["'--c'"],
        "sys.argv += ['--config']": ["--config", "expected one argument"],
        "sys.argv += ['lr=fast']": ["lr = fast"],
        "sys.argv += ['n_heads=3']": ["n_heads = 3", "d_model = 16"],
        "sys.argv += ['--checkpoint-dir', 'blocked']": [str(tmp_path / "blocked"), "cannot be used"],
        "sys.argv += ['--checkpoint-dir', 'elsewhere']": ["rank 0 has", "/checkpoints'", "rank 1 has", "/elsewhere'"],
        f"sys.argv[2] = {CONFIG[1]!r}; os.chdir('elsewhere')": ["rank 0 has", "rank 1 has", "elsewhere/checkpoints'"],
        "sys.argv += ['--resume', 'latest']": ["--resume latest"],
        "sys.argv[2] = 'other.yaml'": ["rank 0 has seed=1", "rank 1 has seed=2"],
        "sys.argv += ['lr=0.5']": ["rank 0 has lr=0.01", "rank 1 has lr=0.5"],
        "sys.argv += ['max_steps=9']": ["rank 0 has max_steps=2", "rank 1 has max_steps=9"],
        "sys.argv += ['compile=true']": ["rank 0 has compile=False", "rank 1 has compile=True"],
        script: ["rank 0 has 'scripts'", "rank 1 has 'scripts'"],
        "import torch; torch.__version__ = '2.3.0'": ["rank 0 has 'scripts'", "on torch 2.3.0"],
    }
    for source, words in cases.items():
        outcome = train(tmp_path, ranks=2, nodes=2, before=SECOND_NODE.format(source), timeout=60)
        alike = any("rank 0 has" in word for word in words) or "n_heads" in source
        assert_refused(outcome, *words, "" if alike else "(rank 1)", times=2, name=source)
    outcome = train(tmp_path, ranks=4, nodes=2, before=SECOND_NODE.format("sys.argv += ['lr=fast']"), timeout=60)
    assert_refused(outcome, "lr = fast", "(rank 2)", times=2)
    assert [text.count("fsdp_train.py: ") for text in outcome.texts] == [1, 0, 1, 0], outcome.text


@pytest.mark.skipif(not can_unshare(), reason="hides a folder from one node with a mount, which takes root")
def test_a_folder_that_the_nodes_do_not_share(tmp_path: Path) -> None:
    """Half a checkpoint on each is none: the first save says so, where the last resume would have."""
    (tmp_path / "checkpoints").mkdir()
    mounts = "import ctypes; libc = ctypes.CDLL(None); assert libc.unshare(0x20000) == 0; "
    mounts += "assert libc.mount(b'none', b'/', None, 0x44000, None) == 0; "
    mounts += f"assert libc.mount(b'tmpfs', {bytes(tmp_path / 'checkpoints')!r}, b'tmpfs', 0, None) == 0"
    outcome = train(tmp_path, ranks=2, nodes=2, before=SECOND_NODE.format(mounts), timeout=60)
    assert outcome.codes == [1, 1] and "cannot be saved to" in outcome.text, outcome.text
    assert "No such file" in outcome.text and "(rank 1)" in outcome.text, outcome.text
    assert list((tmp_path / "checkpoints").iterdir()) == [], "nothing half written is left"


# ---- Streams and tools ----


def test_streams_that_are_closed_or_end(tmp_path: Path) -> None:
    """Training goes on to its end, or a message that nobody can read does not become a traceback."""
    good = ["TRAIN >&-", "TRAIN 2>&-", "TRAIN >&- 2>&- <&-", "TRAIN | head -1", "TRAIN 2>&1 | head -3"]
    cases = [(command, 0) for command in [*good, "TRAIN >/dev/full 2>&1"]]
    cases += [
        (f"TRAIN {end}", 0) for end in ("--dry-run | head -1", "--dry-run | true", "--dry-run >&-", "--help | true")
    ]
    cases += [("TRAIN lr=fast 2>&-", 1), ("TRAIN lr=fast 2>&1 | true", 1)]
    words = " ".join([sys.executable, str(SCRIPT), *CONFIG, *FEW])
    for index in range(0, len(cases), 3):
        some = cases[index : index + 3]
        commands = [["bash", "-c", f"set -o pipefail; {command.replace('TRAIN', words)}"] for command, _ in some]
        outcome = launch(commands, tmp_path).finish(grace=300)
        for (command, code), ended, text in zip(some, outcome.codes, outcome.texts, strict=True):
            assert ended == code, f"{command}: {ended} {text}"
            assert not any(word in text for word in ("Traceback", "Broken", "Exception")), f"{command}: {text}"
    whole = list((tmp_path / "checkpoints").glob("*/train_state.json"))
    assert len(whole) == len(good) + 1, "training went on to its end"


def test_tools_around_the_script(tmp_path: Path) -> None:
    """The interpreter ends normally, so that they can write what they found."""
    tools = [["-m", "cProfile", "-o", "prof.out"], ["-m", "trace", "--count", "-C", "counts"]]
    tools += [["-m", "pdb", "-c", "continue", "-c", "quit"], ["-X", "dev", "-O"]]
    for index in (0, 2):
        commands = [[sys.executable, *tool, str(SCRIPT), *CONFIG, *FEW] for tool in tools[index : index + 2]]
        outcome = launch(commands, tmp_path).finish(grace=300)
        for tool, code, text in zip(tools[index : index + 2], outcome.codes, outcome.texts, strict=True):
            assert code == 0 and "done: " in text, f"{tool}: {code} {text}"
    assert (tmp_path / "prof.out").stat().st_size > 10_000
    counts = (tmp_path / "counts" / "fsdp_train.cover").read_text()
    assert "    1: " in counts and "train(core_context, run)" in counts
    hook = "import atexit; atexit.register(lambda: print('hook ran'))"
    for arguments, code in (([], 0), (["lr=fast"], 1), (["--dry-run"], 0)):
        outcome = train(tmp_path, *arguments, before=hook)
        assert outcome.code == code and "hook ran" in outcome.text, outcome.text
    outcome = train(tmp_path, ranks=2, before=hook)
    assert outcome.codes == [0, 0] and outcome.text.count("hook ran") == 2, outcome.text


# ---- Directories ----


def test_directory_names(tmp_path: Path) -> None:
    """A local directory is a path, whatever is in its name."""
    names = ["exp:lr", "runs/lr=3e-3#2", "a;b", "what?", "with space", "-", "ü", "\udcff", "%20", "%s", "{x}", "file:x"]
    names += ["s3:/x", "a, b", "it's", '"', "\\", "C:\\x", "*", "[a]", "~", "$HOME", "new\nline", "../up", "a" * 255]
    for number, name in enumerate(names):
        cwd = tmp_path / str(number) / "here"
        cwd.mkdir(parents=True)
        assert_trained(train(cwd, f"--checkpoint-dir={name}"), name)
        (saved,) = (cwd / name).iterdir()
        assert {path.name for path in cwd.iterdir()} <= {name.split("/")[0]}, f"{name}: saved somewhere else"
        if number % 3 == 0:
            again = train(cwd, f"--checkpoint-dir={name}", "--resume", "latest")
            assert again.code == 0 and "nothing left to do at step 2" in again.text, f"{name}: {again.text}"
            assert list((cwd / name).iterdir()) == [saved]
    # An unset variable of the shell is none, and not the current folder.
    for name in ("s3://bucket/a", "gs://bucket", "azure://x", "https://host/x", "file:///tmp/x", ""):
        outcome = train(tmp_path, f"--checkpoint-dir={name}")
        assert_refused(outcome, name, "checkpoint_storage", name=name)


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    """Found before the first step."""
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    (tmp_path / "loop").symlink_to("loop")
    names = ["file", "file/below", "dangling", "loop", "/proc/checkpoints", "/dev/null", "/dev/null/below", "a" * 256]
    if os.geteuid():
        (tmp_path / "read-only").mkdir(mode=0o500)
        names.append("read-only")
    for name in names:
        outcome = train(tmp_path, "--checkpoint-dir", name)
        assert_refused(outcome, "--checkpoint-dir", name, "cannot be used", name=name)
    full = "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free=90_000)"
    assert_refused(train(tmp_path, ranks=2, before=full), "checkpoints", "cannot be used", "90,048 bytes", name="full")
    (tmp_path / "traces").touch()
    outcome = train(tmp_path, "torch_profiler=true", "max_steps=8", ranks=2)
    assert_refused(outcome, "traces", name="a file in the place of the profiler's folder")


@pytest.mark.skipif(not can_unshare(), reason="mounts file systems, which takes root")
def test_file_systems_that_are_full_or_read_only(tmp_path: Path) -> None:
    words = f"{sys.executable} {SCRIPT} {' '.join([*CONFIG, *FEW])}"
    for options in ("size=64k", "ro"):
        command = f"mount -t tmpfs -o {options} tmpfs {tmp_path}; cd {tmp_path}; {words}"
        outcome = launch([["unshare", "-m", "bash", "-c", command]], tmp_path).finish()
        assert_refused(outcome, str(tmp_path / "checkpoints"), "cannot be used", name=options)


def test_files_of_an_editor_beside_the_script(tmp_path: Path) -> None:
    """Emacs's lock is a link to nowhere; neither it nor what is no Python file says that nodes disagree."""
    for name in ("fsdp_train.py", "model.py", "data.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".#model.py").symlink_to("user@host.123:456")
    (tmp_path / "model.py~").touch()
    assert_trained(train(tmp_path, script=tmp_path / "fsdp_train.py"))


# ---- Numbers and options ----


def test_a_warm_up_that_never_ends_is_said(tmp_path: Path) -> None:
    for warmup, warned in ((2, True), (3, True), (1_000_000_000, True), (1, False), (0, False)):
        outcome = train(tmp_path, f"warmup_steps={warmup}")
        assert_trained(outcome, warmup)
        assert outcome.text.count("rate never reaches lr") == warned, outcome.text


def test_the_greatest_numbers(tmp_path: Path) -> None:
    """Of a run that ends in years the first reports come; what is too large is refused in no time."""
    job = start(*CONFIG, *FEW, "max_steps=1000000000", "reporting_period=1", cwd=tmp_path)
    job.wait_for("step 3/1000000000")
    job.signal(signal.SIGTERM)
    outcome = job.finish()
    assert outcome.code == -signal.SIGTERM and "days" in outcome.text, outcome.text
    for setting in ("max_steps=9223372036854775807", "n_layers=1000000", "lr=1e400", "lr=.nan", "seed=4294967296"):
        key = setting.split("=")[0]
        assert_refused(train(tmp_path, setting, timeout=60), f"{key} = ", "use ", name=setting)
    wide = train(tmp_path, "d_model=1000000", "vocab_size=1000000", "max_seq_len=1000000", timeout=60)
    assert_refused(wide, "checkpoints", "cannot be used", "bytes for a checkpoint", name="a model of 27 trillion")


def test_options_are_written_whole(tmp_path: Path) -> None:
    """`--dry` would be an abbreviation that trains."""
    for option in ("--dry", "--res", "--c", "--no", "-v"):
        assert_refused(train(tmp_path, option), f"'{option}'", "key=value", name=option)
    for words in (["--config"], ["--dry-run=1"], ["--res=latest"], ["lr"], ["=5"], ["lr="], ["lr=[1"], ["max_step=5"]):
        assert_refused(train(tmp_path, *words), words[0].split("=")[0], name=words)
