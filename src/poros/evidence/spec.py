"""What a benchmark compares: models, methods and settings, as a YAML file says them.

The docstring under each field is its only description; ``poros bench matrix --settings`` is made from it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic_core import PydanticUndefined

from poros.config import RunConfig
from poros.config_file import read_settings
from poros.evidence.engines.base import METHODS, SIZES, Engine, Lora, describe, label_fault, slug
from poros.evidence.limits import MAX_BATCH, MAX_LAYERS, MAX_RANK, MAX_SEED, MAX_SEQ_LEN, MAX_STEPS
from poros.model.shapes import shape_names

_NOT_COMPARED = ("environments", "cache", "time_limit_s")  # no figure depends on them
_MAX_FILE_NAME = 120  # file systems take 255 bytes, endings included


class _Group(BaseModel):
    """A group of settings, as strict as those of a training run."""

    model_config = RunConfig.model_config


class ModelSpec(_Group):
    """A model; a name alone will do."""

    name: str = Field(min_length=1)
    """What the rows call it; unless `shape` is given, also the shape's name, the hub id, or the folder."""
    shape: str | None = Field(default=None, min_length=1)
    """Shape, hub id or folder to take, if `name` is another name for it."""
    weights: Literal["random", "real"] | None = None
    """`random` or `real`; left out: random for a shape and for a folder without weights, else real."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _no_real_shape(self) -> Self:
        if self.weights == "real" and self.source in shape_names():
            raise ValueError(f"weights is 'real', but {self.source} is a shape: there are no weights to it")
        if self.name in shape_names() and not self.are_random:
            raise ValueError(f"name is {self.name!r}, a shape's, but the weights are real: give it another name")
        return self

    @property
    def source(self) -> str:
        """Shape, hub id or folder."""
        return self.shape or self.name

    @property
    def are_random(self) -> bool:
        """Whether the weights are random."""
        folder = Path(self.source)
        bare = folder.is_dir() and not any(folder.glob("*.safetensors"))
        return self.weights == "random" or (self.weights is None and (self.source in shape_names() or bare))


class MethodSpec(_Group):
    """A method with its settings; a name alone will do."""

    method: str
    """Name of the method."""
    block_size: int | None = Field(default=None, ge=1, le=MAX_LAYERS)
    """Layers a block, for methods that stream."""
    slots: int | None = Field(default=None, ge=1, le=MAX_LAYERS)
    """Blocks in the window, for methods that stream."""
    resident_blocks: int | None = Field(default=None, ge=0, le=MAX_LAYERS)
    """Blocks that stay on the device, for methods that stream."""
    replay: bool | None = None
    """Record visits as CUDA graphs and replay them, on a GPU, for methods that can do either; on if left out."""
    label: str | None = Field(default=None, min_length=1)
    """What tables call it; made from the settings if left out."""
    options: dict[str, Any] = {}
    """Settings that only this method knows."""
    module: str | None = None
    """Import path of an engine of your own that stands in for the method's; the rows name it."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"method": value} if isinstance(value, str) else value

    @field_validator("options")
    @classmethod
    def _can_be_written(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"options cannot be written into a row: {error}; quote what is meant as text") from None
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.method not in METHODS:
            raise ValueError(f"there is no method {self.method!r}; there are {', '.join(METHODS)}")
        try:
            engine = self.engine
        except (ImportError, AttributeError) as error:
            raise ValueError(f"module {self.module!r} is not an engine: {error}") from None
        for name in (*SIZES, "replay"):
            if getattr(self, name) is not None and name not in engine.settings:
                takers = [method for method in METHODS if name in describe(method).settings]
                raise ValueError(f"{self.method} has no {name}; {', '.join(takers)} have one")
        if self.label is not None:
            fault = label_fault(self.label, self.method, {name: getattr(self, name) for name in SIZES})
            if fault is not None:
                raise ValueError(f"label {fault}")
        return self

    @property
    def engine(self) -> Engine:
        """What is known of the method."""
        return describe(self.method, self.module)

    @property
    def shown(self) -> str:
        """What tables call it."""
        parts = [self.engine.title]
        parts += [f"block size {self.block_size}"] if self.block_size is not None else []
        parts += [f"{self.slots} slot{'s' * (self.slots > 1)}"] if self.slots is not None else []
        parts += [f"{self.resident_blocks} resident blocks"] if self.resident_blocks is not None else []
        parts += [] if self.replay is None else ["replayed" if self.replay else "eager"]
        parts += [f"{name} {value}" for name, value in self.options.items()]
        return self.label or ", ".join(parts)

    @property
    def key(self) -> str:
        """The method's part of a cell's name."""
        if self.label is not None:
            return slug(self.label) or self.method
        parts = [self.method]
        parts += [f"bs{self.block_size}"] if self.block_size is not None else []
        parts += [f"s{self.slots}"] if self.slots is not None else []
        parts += [f"r{self.resident_blocks}"] if self.resident_blocks is not None else []
        parts += [] if self.replay is None else ["replay" if self.replay else "eager"]
        parts += [slug(f"{name}-{value}") for name, value in self.options.items()]
        return "-".join(parts)


class PrecisionSpec(_Group):
    """In how many bits the base is."""

    quantization: Literal["nf4", "none"] = "nf4"
    """`nf4` (4 bits) or `none` (as `dtype`)."""
    double_quant: bool = True
    """Quantise the NF4 scales too."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Of everything that is not quantised, and of the computation. CPUs are fast with float32 only."""


class LoraSpec(_Group):
    """The adapters; always in fp32."""

    rank: int = Field(default=16, ge=1, le=MAX_RANK)
    """Rank of the two adapter matrices."""
    alpha: float = Field(default=32, gt=0, le=1e6)
    """The adapter's output is multiplied by alpha / rank."""
    dropout: float = Field(default=0.05, ge=0, lt=1)
    """Probability that an input of the adapter is dropped. A method that takes none says so in its row."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get an adapter: `all-linear`, or a list of names."""


class DatasetSpec(_Group):
    """What is learnt from: `synthetic`, or a file."""

    path: str | None = Field(default=None, min_length=1)
    """JSONL file of rows as `poros train` reads them, put one behind another and cut to `seq_len` tokens."""

    @model_validator(mode="before")
    @classmethod
    def _synthetic(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "synthetic":
            raise ValueError(f"dataset is {value!r}; write synthetic, or {{path: FILE.jsonl}}")
        return {} if value == "synthetic" else value


class BenchSpec(_Group):
    """The settings of one benchmark. Relative paths start at the current folder."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run, of letters, digits, dots, dashes and underscores."""
    models: list[ModelSpec] = Field(min_length=1)
    """Models: names of shapes, hub ids, folders, or mappings."""
    methods: list[MethodSpec] = Field(min_length=1)
    """Methods: names, or mappings with settings. They take turns: the first pass of each, then the second."""
    precision: PrecisionSpec = PrecisionSpec()
    seq_len: int = Field(default=512, ge=2, le=MAX_SEQ_LEN)
    """Tokens of every row."""
    batch_size: int = Field(default=1, ge=1, le=MAX_BATCH)
    """Rows in one forward and backward."""
    accumulation: int = Field(default=1, ge=1, le=MAX_BATCH)
    """Batches whose gradients are added up before the optimizer steps."""
    steps: int = Field(default=15, ge=1, le=MAX_STEPS)
    """Optimizer steps of a pass that count."""
    warmup_steps: int = Field(default=3, ge=0, le=MAX_STEPS)
    """Optimizer steps of a pass before those."""
    passes: int = Field(default=3, ge=1, le=1000)
    """Passes of each method, each in a process of its own."""
    lora: LoraSpec = LoraSpec()
    path: Literal["fast", "strict", "math"] = "fast"
    """Attention kernels: any (`fast`), deterministic ones (`strict`), or only the plain one (`math`)."""
    dataset: DatasetSpec = DatasetSpec()
    seed: int = Field(default=1, ge=0, le=MAX_SEED)
    """Of the tokens, the adapters' first values, and dropout."""
    learning_rate: float = Field(default=2e-5, gt=0, le=1000)
    """Of AdamW, constant."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 leaves them as they are."""
    time_limit_s: float = Field(default=600, gt=0, le=1e7)
    """Seconds that one pass of one method may take, building included. A resumed run may have another limit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; `auto` is the GPU if there is one."""
    attention: str | None = "sdpa"
    """Attention of transformers; null for the model's own default."""
    environments: dict[str, str] = {}
    """Method -> folder with packages of its own (`pip install --target`); POROS_BENCH_UNSLOTH and the like also do."""
    cache: str | None = None
    """Folder for checkpoints that a method needs on disk; the user's cache folder if left out."""

    @field_validator("environments")
    @classmethod
    def _of_methods(cls, value: dict[str, str]) -> dict[str, str]:
        takers = [method for method in METHODS if describe(method).folder]
        if unknown := [method for method in value if method not in takers]:
            raise ValueError(f"{unknown[0]} takes no folder of packages; {', '.join(takers)} do")
        return value

    @model_validator(mode="after")
    def _rows_need_a_tokenizer(self) -> Self:
        if self.dataset.path is not None and (
            bare := next((model.source for model in self.models if model.source in shape_names()), None)
        ):
            raise ValueError(
                f"dataset.path is a file, but {bare} is a shape, which has no tokenizer: give a model's folder, or "
                "write dataset: synthetic"
            )
        return self

    @model_validator(mode="after")
    def _distinct_cells(self) -> Self:
        names = [cell_name(model, method) for model in self.models for method in self.methods]
        files = [file_name(name) for name in names]
        if twice := [name for name, file in zip(names, files, strict=True) if files.count(file) > 1]:
            raise ValueError(f"{twice[0]} is there twice: give each of these methods a label of its own")
        return self

    def lora_of(self, method: MethodSpec) -> Lora:
        """The adapters as ``method`` takes them."""
        dropout = self.lora.dropout if method.engine.dropout is None else method.engine.dropout
        return Lora(self.lora.rank, self.lora.alpha, dropout, self.lora.targets)

    def folder_of(self, method: str) -> str | None:
        """The folder with packages of the method's own."""
        if not describe(method).folder:
            return None
        folder = self.environments.get(method) or os.environ.get(f"POROS_BENCH_{method.upper().replace('-', '_')}")
        return None if folder is None else str(Path(folder).absolute())

    def cache_folder(self) -> str:
        """The folder for files that are made once for many passes."""
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return str(Path(self.cache or Path(home) / "poros" / "bench").absolute())


def load_spec(path: str | Path) -> BenchSpec:
    """Read a YAML file of a benchmark's settings.

    Raises:
        ConfigError: the file cannot be read or is no YAML, or a setting is unknown, of the wrong type or outside its
            limits. The message names the file, the line and the setting's path.
    """
    return read_settings(path, BenchSpec, "'poros bench matrix --settings' lists every setting.")


def first_difference(one: BenchSpec, other: BenchSpec) -> str | None:
    """What tells two specs apart: the first setting that is not the same, with both values; None if there is none."""
    left, right = (spec.model_dump(exclude=set(_NOT_COMPARED)) for spec in (one, other))
    return _first_difference(left, right, "")


def cell_name(model: ModelSpec, method: MethodSpec) -> str:
    """What the rows of one method on one model are called in every run of a spec."""
    return f"{model.name}/{method.key}"


def file_name(cell: str) -> str:
    """``cell`` as a part of a file's name: not hidden, and not too long."""
    name = slug(cell.replace("/", "__")).lstrip(".-")
    if len(name) <= _MAX_FILE_NAME:
        return name
    return f"{name[:_MAX_FILE_NAME]}-{sha256(cell.encode()).hexdigest()[:8]}"


def describe_spec() -> Iterator[tuple[str, str, str]]:
    """Every setting as (path, default, description), in the order of a file."""
    yield from _describe(BenchSpec, "")


def _describe(group: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in group.model_fields.items():
        inner = next((kind for kind in _kinds(field.annotation) if issubclass(kind, _Group)), None)
        is_list = getattr(field.annotation, "__origin__", None) is list
        if inner is None or is_list:
            default = "required" if field.default is PydanticUndefined else _short(field.default)
            yield f"{prefix}{name}", default, field.description or ""
        if inner is not None:
            yield from _describe(inner, f"{prefix}{name}{'[]' if is_list else ''}.")


def _kinds(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and not getattr(annotation, "__args__", ()):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _kinds(argument)


def _short(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]


def _first_difference(left: Any, right: Any, path: str) -> str | None:
    if isinstance(left, Mapping) and isinstance(right, Mapping) and left.keys() == right.keys():
        inner = (_first_difference(left[key], right[key], f"{path}.{key}".lstrip(".")) for key in left)
        return next((found for found in inner if found is not None), None)
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        inner = (_first_difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(left, right, strict=True)))
        return next((found for found in inner if found is not None), None)
    return None if left == right else f"{path} is {right!r}, and was {left!r}"
