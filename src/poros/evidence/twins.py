"""The three models of a parity check, and which of their frozen weights are not the same."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import poros
from poros.errors import CheckpointError, ConfigError, PorosError
from poros.evidence.bits import describe_difference
from poros.evidence.failures import first_line, is_memory_full
from poros.evidence.limits import MAX_SEED
from poros.evidence.lockstep import twin_of
from poros.families import MULTIMODAL
from poros.model.adapter import ALL_LINEAR, add_lora
from poros.model.build import from_shape, load
from poros.model.shapes import shape_names
from poros.residency.attachment import attachment_of, compute_device
from poros.residency.discover import find_decoder
from poros.residency.layer import frozen_tensors

_LORA_B_STD = 0.01  # PEFT starts it at zero, which would make every gradient of lora_A zero too
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")


@dataclass(frozen=True)
class ParitySettings:
    """What is compared, and for how long.

    Attributes:
        model: Name of a shape, folder, or hub id.
        name: What rows call the model; ``model`` if left out.
        steps: Optimizer steps.
        path: ``"strict"`` or ``"math"``: see :func:`poros.evidence.lockstep.reproducible`.
        dropout: Of the adapters.
        accumulation: Batches a step.
        seq_len, batch_size: Tokens a row, rows a batch.
        block_size, slots, resident_blocks, replay: As for :func:`poros.prepare`.
        rank: Of the adapters; alpha is twice as much.
        seed: Of data, adapters and dropout.
        device: Where to compute; by default CUDA if there is one.
        quantization, double_quant: As for :func:`poros.load`.
        dtype: Of what is not quantised; by default float32 on a CPU, where other types take a hundred times as long,
            and bfloat16 on a GPU.
        poison: Overwrite slots before they are refilled.
        control_steps: For how many steps the resident run is repeated; None for all.
        random_weights: Also where there are real ones.

    Raises:
        ConfigError: a setting is out of its limits.
    """

    model: str
    steps: int = 5
    path: str = "strict"
    dropout: float = 0.05
    accumulation: int = 1
    seq_len: int = 128
    batch_size: int = 1
    block_size: int = 1
    slots: int | None = None
    resident_blocks: int = 0
    replay: bool = True
    rank: int = 16
    seed: int = 1
    device: str | None = None
    quantization: Literal["nf4"] | None = "nf4"
    double_quant: bool = True
    dtype: str | None = None
    poison: bool = False
    control_steps: int | None = None
    random_weights: bool = False
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0
    name: str | None = None

    @property
    def row_name(self) -> str:
        """What rows call the model."""
        return self.model if self.name is None else self.name

    def __post_init__(self) -> None:
        if self.name == "":
            raise ConfigError("name is empty; give the name by which a report knows the model, or leave it out")
        if self.row_name in shape_names() and weights_of(self) == "real":
            raise ConfigError(f"name is {self.name!r}, a shape's, but the weights are real; give another name")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed is {self.seed}; it must be at least 0 and at most {MAX_SEED}")
        least = {"steps": 1, "accumulation": 1, "seq_len": 2, "batch_size": 1, "block_size": 1, "slots": 1, "rank": 1}
        least["resident_blocks"] = 0
        for name, limit in (least | {"control_steps": 1}).items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise ConfigError(f"{name} is {value}; it must be at least {limit}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout is {self.dropout}; it must be at least 0 and less than 1")
        if self.path not in ("strict", "math"):
            raise ConfigError(
                f"path is {self.path!r}; it must be 'strict' or 'math' (on the fast path not even two resident runs "
                "need agree)"
            )


@dataclass(frozen=True)
class Twins:
    """Three models with the same frozen values, and what they are made of.

    Attributes:
        resident: Everything on the device.
        control: The resident model again: adapters of its own over the same frozen tensors.
        streamed: Its frozen layers in host memory.
        weights: Where the values come from.
        targets: Which linears have adapters, in words.
    """

    resident: Any
    control: Any
    streamed: Any
    device: torch.device
    dtype: str
    family: str
    weights: Literal["random", "real"]
    targets: str


def build_twins(settings: ParitySettings) -> Twins:
    """Build the models of a check; the frozen base is on the device once, and once in host memory.

    Raises:
        UnsupportedModelError, CheckpointError, ConfigError: as :func:`poros.load`.
        PorosError: memory is full.
    """
    try:
        device = compute_device(settings.device)
    except RuntimeError:  # torch knows no such kind
        raise ConfigError(f"device is {settings.device!r}; it must be 'cuda' or 'cpu'") from None
    if device.type == "cuda":
        # Read when cuBLAS is first used; without it its products are not reproducible.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    dtype = settings.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    with explained(settings):
        resident = _adapted(settings, device, dtype, stream=False)
        generator = torch.Generator(device).manual_seed(settings.seed)
        for name, parameter in resident.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0.0, _LORA_B_STD, generator=generator)
        streamed = _adapted(settings, device, dtype, stream=True)
    family = resident.get_base_model().config.model_type
    targets = f"{ALL_LINEAR} of the decoder layers" if family in MULTIMODAL else ALL_LINEAR
    return Twins(resident, twin_of(resident), streamed, device, dtype, family, weights_of(settings), targets)


def weights_of(settings: ParitySettings) -> Literal["random", "real"]:
    """Random for a shape, for a folder without weights, and if asked for."""
    folder = Path(settings.model).expanduser()
    bare = folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES)
    return "random" if settings.random_weights or settings.model in shape_names() or bare else "real"


def differing_weight(resident: nn.Module, streamed: nn.Module) -> str | None:
    """The first layer and tensor whose host master is not what the resident model has, in words; None if all are."""
    attachment = attachment_of(streamed)
    assert attachment is not None
    originals = find_decoder(resident).layers
    for layer in attachment.layers:
        # The masters have the names of the time before there were adapters.
        tensors = {_bare(name): tensor for name, tensor in frozen_tensors(originals[layer.index][1]).items()}
        for name, master in zip(layer.names, layer.masters, strict=True):
            expected = tensors.get(_bare(name))
            detail = describe_difference(None if expected is None else expected.data, master)
            if detail is not None:
                return f"in host block {layer.block}, layer {layer.name}, {name}: {detail}"
    return None


@contextmanager
def explained(settings: ParitySettings) -> Iterator[None]:
    """Say what to do where the device or the path is the limit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise PorosError(
            f"the GPU's memory is full: {first_line(error)} The resident twin has to fit: lower seq_len or "
            "batch_size, or take a smaller model."
        ) from error
    except (RuntimeError, MemoryError) as error:
        said = first_line(error)
        if is_memory_full(error):
            raise PorosError(
                f"memory is full{f' ({said})' if said else ''}. Three models have to fit: lower seq_len, batch_size or "
                "rank, or take a smaller model."
            ) from error
        if "deterministic" not in said and "No available kernel" not in said:
            raise
        other = {"strict": "math", "math": "strict"}[settings.path]
        raise PorosError(
            f"the resident model has no reproducible run on the path {settings.path!r}: {said} Try the path {other!r}."
        ) from error


def _bare(name: str) -> str:
    """A tensor's name without what PEFT's wrappers, one around another at times, put into it."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _adapted(settings: ParitySettings, device: torch.device, dtype: str, *, stream: bool) -> Any:
    make: Any = from_shape if weights_of(settings) == "random" else load
    window = {name: getattr(settings, name) for name in ("block_size", "slots", "resident_blocks", "replay", "poison")}
    try:
        base = make(
            settings.model,
            quantization=settings.quantization,
            double_quant=settings.double_quant,
            dtype=dtype,
            device=device,
            stream=stream,
            **(window if stream else {}),
        )
    except CheckpointError as error:
        if Path(settings.model).expanduser().is_dir() or "/" in settings.model:
            raise
        raise CheckpointError(f"{error}\nShapes with random weights: {', '.join(shape_names())}.") from error
    base.config.use_cache = False
    model = add_lora(base, rank=settings.rank, alpha=2 * settings.rank, dropout=settings.dropout, seed=settings.seed)
    return poros.prepare(model) if stream else model
