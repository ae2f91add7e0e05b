"""SageMaker's environment variables, arguments and configuration files for a job's script.

Hyperparameters keep their types: SageMaker stores them as JSON. The estimator passes them like SageMaker's training toolkit:
arguments are `str(value)`, sorted by name; variables hold JSON, or unchanged text. The trainer passes them like the drivers of
the SDK's version 3: JSON in both, and text that is valid JSON becomes its value. SMP's configuration is the hyperparameter
`mp_parameters`; it becomes an argument only for a script that declares it, since others would refuse it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.compat.sagemaker.distribution import Layout
from octavo.errors import InputError
from octavo.job_ranks import VARIABLES

HOST = "algo-1"
"""The one host of a job, by SageMaker's name."""
OF_RANKS = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_ERROR_FILE", *VARIABLES,
)  # fmt: skip
"""Variables of a launcher that has started the estimator's process; its job does not inherit them."""


def check_hyperparameters(
    values: Mapping[str, Any] | None, arguments: Callable[[Mapping[str, Any]], list[str]] | None = None
) -> dict[str, Any]:
    """Hyperparameters after a round trip through JSON. arguments: converts them to arguments; default `arguments_of`.

    Raises:
        InputError: a name that is not a string, or a value that JSON cannot represent.
    """
    checked: dict[str, Any] = {}
    if values is not None and not isinstance(values, Mapping):
        raise InputError(f"hyperparameters = {values!r} is not a dictionary of names and values.")
    for name, value in (values or {}).items():
        plain = isinstance(name, str) and _is_text(name) and not name.startswith("-") and not re.search(r"[\s=]", name)
        if not name or not plain:
            way = f" Write {name.lstrip('-')!r}." if isinstance(name, str) and name.startswith("-") else ""
            raise InputError(f"hyperparameters: {name!r} is not a name: it becomes an argument --name of the script.{way}")
        try:
            checked[name] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"hyperparameters[{name!r}] = {value!r} cannot be passed on: {error}. Give text, numbers, true or false."
            ) from None
        if not _is_text("".join((arguments or arguments_of)({name: checked[name]}))):
            raise InputError(f"hyperparameters[{name!r}] = {value!r} has a character that no argument can contain.")
    return checked


def check_variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of a script, as text.

    Raises:
        InputError: a name or a value that an environment cannot contain.
    """
    for name, value in values.items():
        if value is None:
            raise InputError(f'environment[{name!r}] = None is not a string: leave it out, or give "".')
    variables = {str(name): str(value) for name, value in values.items()}
    for name, value in variables.items():
        if not name or "=" in name or not _is_text(name):
            raise InputError(f"environment: {name!r} is not a name of a variable.")
        if not _is_text(value):
            raise InputError(f"environment[{name!r}] = {value!r} has a character that no variable can contain.")
    return variables


def _is_text(value: str) -> bool:
    """True for text that arguments and variables can contain: no null characters, no unpaired surrogates."""
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def arguments_of(hyperparameters: Mapping[str, Any]) -> list[str]:
    """A script's arguments, sorted by name."""
    arguments: list[str] = []
    for name in sorted(hyperparameters):
        value = hyperparameters[name]
        if isinstance(value, Mapping):
            text = ",".join(f"{key}={value[key]}" for key in sorted(value))
        else:
            text = "" if value is None else str(value)
        arguments += [f"--{name}" if len(name) > 1 else f"-{name}", text]
    return arguments


def arguments_in_json(hyperparameters: Mapping[str, Any]) -> list[str]:
    """A script's arguments as JSON, in the order of `hyperparameters`: the trainer's form."""
    return [part for name, value in hyperparameters.items() for part in (f"--{name}", _in_json(_value_of(_value_of(value))))]


def _value_of(value: Any) -> Any:
    """The value of text that is JSON; other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _in_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Encoding:
    """Conversions of hyperparameters to text.

    Attributes:
        arguments: all → arguments of the script.
        variable: a value → the text of its variable.
        stored: a value → its text in hyperparameters.json.
        name: a name → the end of SM_HP_…, before it is converted to capitals.
        value: a value → its value in SM_HPS.
    """

    arguments: Callable[[Mapping[str, Any]], list[str]]
    variable: Callable[[Any], str]
    stored: Callable[[Any], str]
    name: Callable[[str], str]
    value: Callable[[Any], Any]


def variables_of(
    layout: Layout,
    hyperparameters: Mapping[str, Any],
    channels: Mapping[str, str],
    folder: Path,
    *,
    script: str,
    instance_type: str,
    arguments: list[str],
    encoding: Encoding | None = None,
) -> dict[str, str]:
    """SageMaker's variables of a job in `folder`; channels: name → its folder; encoding: `TOOLKIT` by default."""
    encoding = encoding or TOOLKIT
    hyperparameters = {name: encoding.value(value) for name, value in hyperparameters.items()}
    handed = dict(hyperparameters)
    if layout.parameters is not None:
        handed["mp_parameters"] = layout.parameters
    framework: dict[str, Any] = {"sagemaker_instance_type": instance_type}
    if layout.ranks is not None:
        framework["sagemaker_torch_distributed_enabled"] = True
    resources = resources_of(instance_type)
    group = {"instance_group_name": "homogeneousCluster", "instance_type": instance_type, "hosts": [HOST]}
    variables: dict[str, Any] = {
        "hosts": [HOST],
        "current_host": HOST,
        "current_instance_type": instance_type,
        "current_instance_group": "homogeneousCluster",
        "current_instance_group_hosts": [HOST],
        "instance_groups": ["homogeneousCluster"],
        "instance_groups_dict": {"homogeneousCluster": group},
        "distribution_instance_groups": [],
        "is_hetero": False,
        "network_interface_name": "lo",
        "num_gpus": layout.gpus,
        "num_cpus": len(os.sched_getaffinity(0)),
        "num_neurons": 0,
        "log_level": 20,
        "hps": handed,
        "user_args": arguments,
        "user_entry_point": script,
        "framework_module": "",
        "framework_params": framework,
        "resource_config": resources,
        "input_data_config": input_config(channels),
        "channels": sorted(channels),
        "module_name": script.removesuffix(".py"),
        "module_dir": str(folder / "code"),
        "model_dir": str(folder / "model"),
        "input_dir": str(folder / "input"),
        "input_config_dir": str(folder / "input" / "config"),
        "output_dir": str(folder / "output"),
        "output_data_dir": str(folder / "output" / "data"),
        "output_intermediate_dir": str(folder / "output" / "intermediate"),
        "output_failure": str(folder / "output" / "failure"),
        "input_data_dir": str(folder / "input" / "data"),
        "source_dir": str(folder / "code"),
        "entry_script": script,
        "host_count": 1,
        "current_host_rank": 0,
    }
    variables["training_env"] = dict(
        variables, job_name=folder.name, is_master=True, master_hostname=HOST, hyperparameters=handed
    )
    variables |= {f"channel_{name}": path for name, path in channels.items()}
    exported = {f"SM_{name.upper()}": _text(value) for name, value in variables.items()} | {"TRAINING_JOB_NAME": folder.name}
    return exported | {f"SM_HP_{encoding.name(name).upper()}": encoding.variable(value) for name, value in handed.items()}


def shared_variables(hyperparameters: Mapping[str, Any], encoding: Encoding) -> Iterator[str]:
    """A sentence for each variable SM_HP_… that hyperparameters share, such as `lr` and `LR`: it has the last one's value."""
    by_variable: dict[str, list[str]] = {}
    for name in hyperparameters:
        by_variable.setdefault(f"SM_HP_{encoding.name(name).upper()}", []).append(name)
    for variable, names in by_variable.items():
        if len(names) > 1:
            yield f"hyperparameters {', '.join(map(repr, names))} share {variable}, which has the value of {names[-1]!r}."


def resources_of(instance_type: str) -> dict[str, Any]:
    """Content of resourceconfig.json."""
    return {
        "current_host": HOST,
        "current_instance_type": instance_type,
        "current_group_name": "homogeneousCluster",
        "hosts": [HOST],
        "instance_groups": [{"instance_group_name": "homogeneousCluster", "instance_type": instance_type, "hosts": [HOST]}],
        "network_interface_name": "lo",
    }


def input_config(channels: Mapping[str, str]) -> dict[str, Any]:
    """Content of inputdataconfig.json."""
    one = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
    return dict.fromkeys(sorted(channels), one)


def inherited() -> dict[str, str]:
    """This process's environment, adapted for a job, which has another working directory and other ranks."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    paths = [str(Path(path).absolute()) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = str(Path(__file__).absolute().parents[3])  # Octavo's source, where it is not installed
    # Only the script needs the folder with the shims: in other processes of the job it would change uncaught errors.
    site = Path(root, "octavo", "compat", "site").resolve()
    paths = [path for path in paths if Path(path).resolve() != site]
    there = root in paths or Path(root).name in ("site-packages", "dist-packages")
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *([] if there else [root])])
    environment["OCTAVO_COMPAT_LINES"] = "1"  # line-buffered: the log is current, and ranks do not split each other's lines
    return environment


def joined(variables: Mapping[str, str], of_script: Mapping[str, str]) -> dict[str, str]:
    """A job's variables with those for its script; the script's PYTHONPATH has precedence."""
    environment = {**variables, **of_script}
    if "PYTHONPATH" in of_script:
        environment["PYTHONPATH"] = os.pathsep.join(
            part for part in (of_script["PYTHONPATH"], variables.get("PYTHONPATH")) if part
        )
    return environment


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


TOOLKIT = Encoding(arguments_of, _text, json.dumps, str, lambda value: value)
"""The estimator's."""
DRIVERS = Encoding(arguments_in_json, _in_json, _in_json, lambda name: name.replace("-", "_"), _value_of)
"""The trainer's."""
