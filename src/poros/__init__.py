"""Train QLoRA adapters on models far larger than the card, bit for bit as if the model were resident.

Importing this package is cheap: torch and the libraries around it are imported by the first call that needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from poros.errors import (
    CheckpointError,
    ChecksumError,
    ConfigError,
    DataError,
    PorosError,
    ResidencyError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from poros import nn as nn
    from poros.model.build import load as load
    from poros.residency.attach import prepare as prepare
    from poros.residency.attach import report as report
    from poros.residency.attach import unprepare as unprepare

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ChecksumError",
    "ConfigError",
    "DataError",
    "PorosError",
    "ResidencyError",
    "UnsupportedModelError",
    "__version__",
    "load",
    "nn",
    "plan",
    "prepare",
    "report",
    "unprepare",
]

# name -> the module that defines it
_LAZY = {
    "load": "poros.model.build",
    "plan": "poros.evidence.plan",
    "prepare": "poros.residency.attach",
    "report": "poros.residency.attach",
    "unprepare": "poros.residency.attach",
}


def __getattr__(name: str) -> Any:
    if name == "nn":
        return import_module("poros.nn")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'poros' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
