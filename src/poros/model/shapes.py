"""Configurations of real models, shipped with the package: for planning and benchmarks without a download."""

import json
from importlib.resources import files
from typing import Any

from poros.errors import ConfigError

_FOLDER = files("poros.model") / "shapes"


def shape_names() -> list[str]:
    """Names of the shipped configurations, such as ``"qwen2.5-72b"``."""
    return sorted(file.name.removesuffix(".json") for file in _FOLDER.iterdir() if file.name.endswith(".json"))


def read_shape(name: str) -> dict[str, Any]:
    """The shipped configuration called ``name``, as ``config.json`` would hold it.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in shape_names():
        raise ConfigError(f"there is no shape {name!r}; there are {', '.join(shape_names())}")
    shape: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text())
    return shape
