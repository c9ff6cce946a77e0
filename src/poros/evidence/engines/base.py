"""What a method is to the harness: its name, what it changes, and the request that it gets. Imports nothing heavy.

An engine is a module of this package with two names in it: ``ENGINE``, an :class:`Engine`, and one of

- ``build(request, recorder) -> model``: a model in training mode, adapters in fp32 and the rest frozen, which the
  common loop steps;
- ``run(request, recorder)``: for a method that brings a loop of its own; it calls the recorder's ``begin_step`` and
  ``end_step`` around each optimizer step.

It imports torch and the libraries inside these functions only: whoever plans a run reads ``ENGINE`` without them.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

_ROOM = "poros.evidence.engines"

# method -> the module that defines it
METHODS: dict[str, str] = {
    "poros": f"{_ROOM}.poros",
    "poros-trainer": f"{_ROOM}.poros_trainer",
    "resident": f"{_ROOM}.resident",
    "resident-checkpointed": f"{_ROOM}.resident_checkpointed",
    "accelerate-offload": f"{_ROOM}.accelerate_offload",
    "poros-train": f"{_ROOM}.poros_train",
    "unsloth": f"{_ROOM}.unsloth",
    "stream-loop": f"{_ROOM}.stream_loop",
}

SIZES = ("block_size", "slots", "resident_blocks")  # of the window; which of them a method takes, its engine says

Status = Literal["ok", "out_of_memory", "missing_package", "unsupported", "timeout", "diverged", "crashed"]


Launch = Literal["eager", "replay"]  # from Python one by one, or recorded as a graph


@dataclass(frozen=True)
class Engine:
    """What is known of a method before it runs.

    Attributes:
        name: The method, as specs and rows call it.
        title: What tables call it.
        changes: What it changes against plain resident QLoRA, in the words of the report.
        packages: Whose versions its rows name besides the usual ones.
        environment: Variables that its process is started with.
        dropout: The only dropout of the adapters that it takes; None for any.
        settings: Which of :data:`SIZES` it takes, and ``replay`` if it can do without.
        launches: How its kernels may be launched, for methods whose weights stream.
        folder: Whether it needs a folder of packages of its own, first on its process's path.
    """

    name: str
    title: str
    changes: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    dropout: float | None = None
    settings: tuple[str, ...] = ()
    launches: tuple[Launch, ...] = ()
    folder: bool = False


@dataclass(frozen=True)
class Lora:
    """The adapters: ``targets`` as :func:`poros.model.adapter.add_lora` takes them."""

    rank: int
    alpha: float
    dropout: float
    targets: str | list[str]


@dataclass(frozen=True)
class CellRequest:
    """One pass of one method on one model: everything that its process has to know.

    Attributes:
        module: Import path of an engine that stands in for the method's; None for the method's own.
        source: Shape, folder or hub id; ``model`` is what rows call it.
        folder: Packages of the method's own, put first on the path.
        cache: Folder for files that are made once for many passes.
        record: File that the outcome is written to.
        started: Unix time at which the process was started.
    """

    run_id: str
    cell: str
    number: int  # of the pass, from 1
    method: str
    module: str | None
    model: str
    source: str
    weights: Literal["random", "real"]
    quantization: Literal["nf4"] | None
    double_quant: bool
    dtype: str
    seq_len: int
    batch_size: int
    accumulation: int
    steps: int
    warmup_steps: int
    lora: Lora
    path: Literal["fast", "strict", "math"]
    dataset: str | None
    seed: int
    learning_rate: float
    max_grad_norm: float
    device: Literal["auto", "cpu", "cuda"]
    attention: str | None
    block_size: int | None
    slots: int | None
    resident_blocks: int | None
    replay: bool | None
    options: dict[str, Any]
    folder: str | None
    cache: str
    record: str
    started: float = 0.0

    @property
    def total_steps(self) -> int:
        """Optimizer steps, warm-up included."""
        return self.warmup_steps + self.steps

    def to_json(self) -> str:
        """The request as text, for :meth:`parse` in another process."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def parse(cls, text: str) -> "CellRequest":
        """The request in a text of :meth:`to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "lora": Lora(**fields["lora"])})


def dataset_of(request: CellRequest) -> dict[str, Any]:
    """What a row says of the request's data, but for their hash."""
    synthetic = request.dataset is None
    return {
        "name": "synthetic" if synthetic else "rows",
        "seed": request.seed if synthetic else None,
        "path": request.dataset,
    }


def load_engine(method: str, module: str | None = None) -> ModuleType:
    """The module of ``method``, or an engine of the user's own; KeyError or ImportError if there is none."""
    return import_module(module or METHODS[method])


def describe(method: str, module: str | None = None) -> Engine:
    """The :class:`Engine` of a method; KeyError or ImportError if there is none."""
    engine: Engine = load_engine(method, module).ENGINE
    return engine


def slug(text: str) -> str:
    """``text`` as a part of a cell's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def label_fault(label: str, method: str, sizes: dict[str, int | None]) -> str | None:
    """What is wrong with a name in tables for a row of ``method``; None if nothing is.

    Args:
        sizes: the row's :data:`SIZES`.
    """
    if not label.isascii() or not label.isprintable() or label != label.strip() or not label:
        return f"is {label!r}; it should be printable ASCII without blanks around it"
    for other in METHODS:
        if other != method and label.casefold() in (other, describe(other).title.casefold()):
            return f"is {label!r}, which is the method {other}; this is {method}"
    patterns = {
        "block_size": r"block size (\d+)",
        "slots": r"(\d+) slots?\b",
        "resident_blocks": r"(\d+) resident blocks?\b",
    }
    for key, pattern in patterns.items():
        said = re.search(pattern, label)
        if said and said[1] != str(sizes[key]):
            return f"is {label!r}, but {key} is {sizes[key]}"
    return None
