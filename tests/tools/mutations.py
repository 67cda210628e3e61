"""Break the project in ways that matter, one at a time, and see whether the tests notice.

    python tests/tools/mutations.py [NUMBER ...]

Each time the test files that should notice run in a copy of the project, until one test fails. The number of a mutation
is its place in the table.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    name: str
    text: str  # occurs once in the file
    broken: str
    tests: str  # files in tests/ that should catch it
    file: str = "fsdp_train.py"


CHECKPOINT, CLUSTER, FAULTS = "launch/test_checkpoint.py", "cluster/test_cluster.py", "launch/test_faults.py"
LAUNCHES, TRAINING = "launch/test_launches.py", "launch/test_training.py"
UNSCALE = "state.scaler.unscale_(state.optimizer)"
CLIP = "clip_grad_norm(state.model, run.config.max_grad_norm)"
SEEDS = 'f"{config.seed}, {step}, {rank}"'

MUTATIONS = [
    # The step.
    Mutation("gradients are not unscaled", UNSCALE, "pass", TRAINING),
    Mutation("clipped before unscaled", UNSCALE, f"{CLIP}\n    {UNSCALE}", TRAINING),
    Mutation("norm of one rank's shards", "dist.all_reduce(total)", "str(total)", TRAINING),
    Mutation("norm adds up the replicas", "(total / replicas).sqrt()", "total.sqrt()", TRAINING),
    Mutation("each micro-batch counts whole", "yield loss * (len(micro_batch) / len(tokens))", "yield loss", TRAINING),
    Mutation("gradients are never zeroed", "    state.optimizer.zero_grad()", "    pass", TRAINING),
    Mutation("the rate is that of the step before", "learning_rate(step, ", "learning_rate(step - 1, ", TRAINING),
    Mutation("vectors decay", "whole.ndim >= 2", "whole.ndim >= 1", "unit/test_model.py", "model.py"),
    Mutation("Adam counts its step of zeros", 'state["step"].zero_()', "pass", TRAINING),
    Mutation("blocks are not recomputed", "config.activation_checkpointing", "False", "unit/test_model.py", "model.py"),
    Mutation("attention sees what comes", "is_causal=True", "is_causal=False", "unit/test_model.py", "model.py"),
    # Precision.
    Mutation("no MixedPrecision", "mixed_precision(run.config, run.amp_dtype)", "None", TRAINING),
    Mutation("no autocast", "enabled=amp_dtype is not None", "enabled=False", TRAINING),
    Mutation("reduce_dtype is ignored", "torch.float32 if config.reduce_dtype else amp_dtype", "amp_dtype", TRAINING),
    Mutation("the strongest GPU decides", "min(everywhere(", "max(everywhere(", CLUSTER),
    Mutation("every CPU multiplies bfloat16", 'if known.get("avx512_bf16") or', "if True or", "unit/test_precision.py"),
    # Metrics.
    Mutation("means of one rank", "dist.all_reduce(sums)", "sums.mul_(dist.get_world_size())", TRAINING),
    Mutation("validation adds up the ranks", "batches / dist.get_world_size()", "batches", TRAINING),
    Mutation("validation with dropout", "model.eval()", "model.train()", f"{CHECKPOINT} {TRAINING}"),
    Mutation("no dropout after a validation", "    model.train()", "    pass", CHECKPOINT),
    Mutation("skipped steps are not counted", "state.step - reported_step - round(applied)", "0", TRAINING),
    Mutation("means include skipped steps", ".masked_fill(skipped, 0)", "", TRAINING),
    Mutation("what is not finite goes on", "if not math.isfinite(value) or", "if False or", TRAINING),
    # Going on.
    Mutation("one dropout for all ranks", SEEDS, 'f"{config.seed}, {step}"', f"{CHECKPOINT} {TRAINING}"),
    Mutation("dropout by steps since the start", SEEDS, 'f"{config.seed}, {step - first_step}, {rank}"', CHECKPOINT),
    Mutation("reseeded a batch late", "size_in_batches == 0", "size_in_batches == 1", "unit/test_data.py", "data.py"),
    Mutation("the scaler starts anew", 'state.scaler.load_state_dict(saved["scaler"])', "pass", CHECKPOINT),
    Mutation("data start anew", 'state.data.load_state_dict(saved["data"])', "None", CHECKPOINT),
    Mutation("a fork is a resume", 'run.trial_id not in (None, saved["trial_id"])', "False", f"{CHECKPOINT} {CLUSTER}"),
    Mutation("a changed shard is loaded", "checksum(path / name) != crc", "not (path / name).exists()", CHECKPOINT),
    Mutation("a checkpoint without validation", "validation_due = checkpoint_due or ", "validation_due = ", CHECKPOINT),
    Mutation("preempted on the last step", "leave = not is_last and (", "leave = (", CHECKPOINT),
    # Start and end.
    Mutation("only rank 0 can fail", "in enumerate(outcomes):", "in [(0, outcomes[0])]:", f"{FAULTS} {LAUNCHES}"),
    Mutation("nodes may differ", "if here != there:", "if False:", LAUNCHES),
    Mutation("no look at the free space", "disk_usage(folder).free < ", "disk_usage(folder).free < 0 * ", LAUNCHES),
    Mutation("a rank beyond its size", "for i in (0, 2, 4)", "for i in (4,)", LAUNCHES),
    Mutation("the hybrid mesh is transposed", "device.type, mesh)", "device.type, mesh[::-1])", TRAINING),
    Mutation("errors of the master are final", 'os.environ.setdefault("DET_RETRY_CONFIG", RETRY)', "pass", CLUSTER),
    Mutation("a search's stop is ignored", "run.stopped.set()", "pass", CLUSTER),
]


def try_one(mutation: Mutation) -> str:
    """The test that failed; empty if none did."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        project = Path(folder, "project")
        shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".git", ".venv", "*cache*", "checkpoints"))
        file = project / mutation.file
        file.write_text(file.read_text().replace(mutation.text, mutation.broken))
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *mutation.tests.split()]
        ended = subprocess.run(command, cwd=project / "tests", capture_output=True, text=True)
    if ended.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.M)
    assert failed and ended.returncode == 1, ended.stdout + ended.stderr
    return failed[1]


if __name__ == "__main__":
    missed = 0
    for number in map(int, sys.argv[1:] or range(1, len(MUTATIONS) + 1)):
        test = try_one(MUTATIONS[number - 1])
        print(f"{number:2} {MUTATIONS[number - 1].name:36} {'caught by ' + test if test else 'MISSED'}", flush=True)
        missed += not test
    sys.exit(missed > 0)
