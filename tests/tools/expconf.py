"""What the master of Determined 0.38.1 says to an experiment config, as far as was seen or its schemas tell.

It knows only the keys that this project uses or a verdict names: any other counts as unknown.
"""

import math
from collections.abc import Collection, Iterator
from typing import Any

Json = dict[str, Any]

# By type, where "any" has a check of its own. null is always taken.
TYPES = {
    "string": """
        name entrypoint workspace project environment.image log_policies.name log_policies.pattern
        checkpoint_storage.type searcher.name searcher.metric searcher.time_metric""",
    "integer": """
        max_restarts preemption_timeout scheduling_unit reproducibility.experiment_seed resources.slots_per_trial
        checkpoint_storage.save_experiment_best checkpoint_storage.save_trial_best checkpoint_storage.save_trial_latest
        searcher.source_trial_id searcher.max_trials searcher.max_time""",
    "boolean": "profiling.enabled searcher.smaller_is_better",
    "object": "hyperparameters min_validation_period",
    "any": "environment.environment_variables log_policies.action resources.shm_size searcher.max_length",
}
KEYS = {key: kind for kind, keys in TYPES.items() for key in keys.split()}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}

COMMON = {"name", "metric", "smaller_is_better", "source_trial_id", "max_length"}
SEARCHERS = {
    "single": COMMON,
    "random": COMMON | {"max_trials"},
    "adaptive_asha": COMMON | {"max_trials", "max_time", "time_metric"},
}
# The properties of a hyperparameter that a search draws, by its type.
RANGES = {
    "const": {"val"},
    "categorical": {"vals"},
    "int": {"minval", "maxval"},
    "double": {"minval", "maxval"},
    "log": {"minval", "maxval", "base"},
}


def problems(config: Json, projects: Collection[tuple[str, str]] = (), slots: float = math.inf) -> list[str]:
    """Why the master refuses a config, where these (workspace, project) exist and the pool has so many slots."""
    if found := list(_keys(config, "")):
        return found
    place = config.get("workspace"), config.get("project")
    if not config.get("entrypoint"):
        found.append("managed experiments require entrypoint")
    if (place[0] is None) != (place[1] is None):
        found.append("workspace and project: both must be included if one is provided")
    elif place[0] is not None and place not in projects:
        found.append(f"workspace/project not found: {place}")
    if config["resources"]["slots_per_trial"] > slots:
        found.append("slots requested exceeds cluster capacity")
    return [*found, *_searcher(config["searcher"]), *_hyperparameters(config["hyperparameters"])]


def _type(value: Any) -> str:
    """The type in terms of JSON schema, where 2.0 is an integer."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return {bool: "boolean", int: "integer", str: "string", list: "array"}.get(type(value), "object")


def _keys(section: Json, prefix: str) -> Iterator[str]:
    """Unknown keys, and values of other types."""
    for name, value in section.items():
        key, kind = f"{prefix}{name}", _type(value)
        wanted = "array" if key == "log_policies" else "object" if key in SECTIONS else KEYS.get(key)
        if wanted is None:
            yield f'{prefix or "config"}: additionalProperties "{name}" not allowed'
        elif value is None:
            continue
        elif wanted not in ("any", kind):
            yield f"{key}: expected {wanted} or null, but got {kind}"
        elif key in SECTIONS:
            for part in value if wanted == "array" else [value]:
                yield from _keys(part, f"{key}.")
        elif key == "log_policies.action" and value not in ("cancel_retries", "exclude_node"):
            yield f'{key}: must be one of "cancel_retries" or "exclude_node"'
        elif key == "resources.shm_size" and kind != "integer":
            yield f"cannot unmarshal {kind} into {key} of type int"
        elif key == "environment.environment_variables":
            devices = value if kind == "object" else {"cpu": value}
            lists = all(isinstance(each, list) for each in devices.values())
            if not lists or not devices.keys() <= {"cpu", "cuda", "rocm"}:
                yield f"{key}: neither a list of strings nor a map of cpu, cuda, or rocm to lists of strings"


def _searcher(searcher: Json) -> Iterator[str]:
    name = searcher.get("name")
    if name not in SEARCHERS:
        yield f"searcher.name: {name!r} is not one of {list(SEARCHERS)}"
        return
    for key in {"metric", "max_trials"} & SEARCHERS[name]:
        if searcher.get(key) is None:
            yield f"searcher: {key} is a required property"
    for key in searcher.keys() - SEARCHERS[name]:
        yield f'searcher: additionalProperties "{key}" not allowed'
    if name == "adaptive_asha" and None in (searcher.get("max_time"), searcher.get("time_metric")):
        yield "searcher: adaptive_asha requires max_time and time_metric to be set"


def _hyperparameters(hparams: Json) -> Iterator[str]:
    for name, value in hparams.items():
        if not isinstance(value, dict):
            continue
        properties = RANGES.get(value.get("type", ""))
        if properties is None:
            yield f"hyperparameters.{name}: type is not one of {list(RANGES)}"
        elif missing := properties - value.keys():
            yield f"hyperparameters.{name}: missing properties: " + ", ".join(f'"{key}"' for key in missing)
        elif unknown := value.keys() - properties - {"type"}:
            yield f"hyperparameters.{name}: additionalProperties {unknown} not allowed"
        elif "minval" in value and not value["minval"] < value["maxval"]:
            yield f"hyperparameters.{name}: minval must be less than maxval"
