"""Reads a file of settings, and says what is wrong with one in terms of its lines and settings."""

import re
from collections import defaultdict
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from poros.config import RunConfig
from poros.errors import ConfigError
from poros.yaml_lines import KeyPath, Lines, read_mapping

_MAX_PROBLEMS = 8  # an error message has to fit one screen


Settings = TypeVar("Settings", bound=BaseModel)


def load_config(path: str | Path) -> RunConfig:
    """Read a YAML file of a training run's settings.

    Raises:
        ConfigError: as :func:`read_settings`.
    """
    return read_settings(path, RunConfig, "'poros train --settings' lists every setting.")


def read_settings(path: str | Path, kind: type[Settings], hint: str) -> Settings:
    """Read a YAML file of settings.

    Args:
        kind: what they are the settings of.
        hint: last line of an error: where every setting is listed.

    Raises:
        ConfigError: the file cannot be read or is no YAML, or a setting is unknown, of the wrong type or outside its
            limits. The message names the file, the line and the setting's path.
    """
    values, lines = read_mapping(Path(path))
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        details = error.errors()
    problems: dict[KeyPath, list[ErrorDetails]] = defaultdict(list)
    for detail in details:
        problems[_setting_path(detail["loc"], kind)].append(detail)
    # A list with a wrong item is also a wrong value for the setting: the item says more.
    innermost = [name for name in problems if not any(o != name and o[: len(name)] == name for o in problems)]
    shown = [f"{_where(name, str(path), lines)}: {_explain(name, problems[name], kind)}" for name in innermost]
    if len(shown) > _MAX_PROBLEMS:
        shown[_MAX_PROBLEMS:] = [f"... and {len(shown) - _MAX_PROBLEMS} more"]
    raise ConfigError("\n".join([*shown, hint]))


def _where(name: KeyPath, file: str, lines: Lines) -> str:
    """The file and, where the setting or its group is written there, the line."""
    for end in range(len(name), 0, -1):
        if name[:end] in lines:
            return f"{file}:{lines[name[:end]]}"
    return file


def _explain(path: KeyPath, details: list[ErrorDetails], kind: type[BaseModel]) -> str:
    """What is wrong with one setting; several details when it may have one of several types."""
    name, first = ".".join(map(str, path)), details[0]
    match first["type"]:
        case "extra_forbidden":
            return f"{name} is not a setting.{_suggest(path, kind)}"
        case "missing":
            return f"{name} is missing; it has no default."
        case "value_error":
            return f"{name}: {first['ctx']['error']}." if path else f"{first['ctx']['error']}."
        case "model_type" | "model_attributes_type":
            return f"{name} is {_shown(first['input'])}; it should be a group of settings, indented below it."
    wishes = [re.sub(r"^(Input|Value|String|List) should (be |have )?", "", detail["msg"]) for detail in details]
    return f"{name} is {_shown(first['input'])}; expected {' or '.join(dict.fromkeys(wishes))}."


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _setting_path(location: KeyPath, kind: type[BaseModel]) -> KeyPath:
    """pydantic's location without the names that it adds for the members of a union."""
    section: Any = kind
    for depth, part in enumerate(location):
        if isinstance(part, int):  # a position in a list of groups
            continue
        fields = getattr(section, "model_fields", None)
        if fields is None:  # below a setting, only positions in a list are the user's own
            return location[:depth] + tuple(step for step in location[depth:] if isinstance(step, int))
        if part not in fields:
            return location[: depth + 1]
        section = _group(fields[part].annotation) or fields[part].annotation
    return location


def _suggest(path: KeyPath, kind: type[BaseModel]) -> str:
    """The setting that an unknown one was probably meant to be, one of the same group before others."""
    group = _without_positions(path[:-1])
    names = sorted(_setting_names(kind), key=lambda name: name.rpartition(".")[0] == group)
    known = {name.rpartition(".")[2]: name for name in names} | {name: name for name in kind.model_fields}
    close = get_close_matches(str(path[-1]), known, n=1, cutoff=0.65)
    return f" Did you mean {known[close[0]]}?" if close else ""


def _setting_names(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The path of every setting that is not a group."""
    for name, field in kind.model_fields.items():
        inner = _group(field.annotation)
        if inner is None:
            yield prefix + name
        else:
            yield from _setting_names(inner, f"{prefix}{name}.")


def _group(annotation: Any) -> type[BaseModel] | None:
    """The group of settings that a field holds, or a list of which it holds."""
    if getattr(annotation, "__origin__", None) is list:
        annotation = annotation.__args__[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _without_positions(path: KeyPath) -> str:
    return ".".join(part for part in path if isinstance(part, str))
