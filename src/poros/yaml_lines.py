"""Reads a YAML file into plain values, remembering the line of each key for error messages."""

import re
from pathlib import Path
from typing import Any

import yaml

from poros.errors import ConfigError

# The keys and list positions that lead to a value, such as ("data", "train", 0)
KeyPath = tuple[str | int, ...]
# path -> line, counted from 1
Lines = dict[KeyPath, int]


class _Loader(yaml.SafeLoader):
    """The safe loader, reading ``2e-4`` as the number that it is in YAML 1.2 (and PyYAML reads as text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+\Z"), list("-+.0123456789")
)


def read_mapping(path: Path) -> tuple[dict[str, Any], Lines]:
    """The file's values, and the line of every key.

    Raises:
        ConfigError: no such file, no text, no YAML (with line and column), a key given twice, or no mapping at the top.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Give the path of a YAML file of settings.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}). Save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: Lines = {}
        _index(node, (), lines, path)
        values = loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_place(error)}: not valid YAML: {_reason(error)}.") from None
    finally:
        loader.dispose()
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {'nothing' if values is None else type(values).__name__}, not settings.")
    return values, lines


def _index(node: yaml.Node | None, path: KeyPath, lines: Lines, file: Path) -> None:
    """Note the line of every key and list item below ``node``, and refuse a key given twice: PyYAML keeps the last."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = (*path, str(key.value))
            line = key.start_mark.line + 1
            if below in lines:
                name = ".".join(map(str, below))
                raise ConfigError(f"{file}:{line}: {name} is given twice, first on line {lines[below]}. Keep one.")
            lines[below] = line
            _index(value, below, lines, file)
    elif isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            lines[(*path, position)] = item.start_mark.line + 1
            _index(item, (*path, position), lines, file)


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""


def _reason(error: yaml.YAMLError) -> str:
    problem, context = getattr(error, "problem", None), getattr(error, "context", None)
    return f"{problem} {context or ''}".strip() if problem else str(error).splitlines()[0]
