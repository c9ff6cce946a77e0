"""From files, or from a shape, to a model that streams: a skeleton, filled and packed one layer at a time."""

import copy
import gc
import logging
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from poros.errors import CheckpointError, ConfigError
from poros.families import text_family
from poros.model import quantize, upstream
from poros.model.checkpoint import Checkpoint
from poros.model.gguf import LoadedWeights, read_gguf_config
from poros.model.hub import ModelFiles, locate
from poros.model.options import Place, Precision
from poros.model.shapes import read_shape, shape_names
from poros.model.synthetic import RandomWeights
from poros.model.weights import CheckpointWeights
from poros.residency.attachment import compute_device
from poros.residency.discover import find_decoder

log = logging.getLogger("poros")


class Weights(Protocol):
    """Where a skeleton's values come from."""

    def fill_layer(self, name: str, layer: nn.Module) -> None:
        """Give every tensor of one decoder layer its value."""

    def fill_rest(self) -> None:
        """Give every other tensor its value, and tie what is tied."""


def load(
    model: str | Path,
    *,
    quantization: Literal["nf4"] | None = "nf4",
    double_quant: bool = True,
    dtype: str | torch.dtype = torch.bfloat16,
    compute_dtype: str | torch.dtype | None = None,
    block_size: int = 1,
    slots: int | None = None,
    resident_blocks: int = 0,
    micro_batch_size: int | None = None,
    replay: bool = True,
    device: str | torch.device | None = None,
    stream: bool = True,
    attn_implementation: str | None = None,
    revision: str | None = None,
    gguf_file: str | None = None,
    poison: bool = False,
    checksum: bool = False,
) -> PreTrainedModel:
    """Load a causal language model whose decoder layers stream, without ever holding more than it and two blocks.

    The model is the one that ``from_pretrained`` gives (same class, names, bytes of every weight on the same device,
    evaluation mode), prepared as by :func:`poros.prepare`, and frozen: add adapters with PEFT to train it. Each layer
    is read, quantised on ``device`` and moved to host memory before the next one is read, so a model that fits in
    neither GPU nor host memory in 16 bits loads if its 4-bit form fits in host memory. A GGUF file is the exception:
    it is unpacked as a whole in host memory first.

    Args:
        model: a folder, or a hub id. A multimodal checkpoint (Gemma 3, Gemma 4, Qwen3.5) gives its multimodal class.
        quantization: ``"nf4"``, or ``None`` to keep ``dtype``. A checkpoint that is in 4 bits already stays as it is.
        double_quant: quantise the scales as well (0.516 instead of 0.5625 bytes a weight).
        dtype: of everything that is not quantised: ``"bfloat16"``, ``"float16"``, ``"float32"`` or a torch dtype.
        compute_dtype: of the products with 4-bit weights; by default ``dtype``, or what a 4-bit checkpoint says.
        block_size: layers a block, the unit of transfer.
        slots: blocks in the window.
        resident_blocks: blocks that stay on ``device``.
        micro_batch_size: rows of a batch that a visit computes at a time, as for :func:`poros.prepare`.
        replay: record each layer's visits as CUDA graphs and replay them, as for :func:`poros.prepare`.
        device: where to compute; by default CUDA if there is one, else the CPU.
        stream: ``False`` gives the resident twin by the same way: everything on ``device``.
        attn_implementation: as for ``from_pretrained``.
        revision: branch, tag or commit of a hub repository.
        gguf_file: name of a GGUF file in ``model``.
        poison: overwrite slots before they are refilled (debugging).
        checksum: compare each layer's recomputed output with its forward's (debugging).

    Raises:
        UnsupportedModelError: the family, or the way in which the checkpoint is quantised, is not supported.
        CheckpointError: a file is missing or corrupt, or the tensors are not those that the configuration asks for.
        ConfigError: a setting is out of its limits, or host memory does not suffice.
    """
    precision = Precision.of(quantization, double_quant, dtype, compute_dtype)
    place = Place(
        compute_device(device), stream, block_size, slots, resident_blocks, micro_batch_size, replay, poison, checksum
    )
    files = locate(model, revision)
    config = read_gguf_config(files, gguf_file) if gguf_file else _read_config(files)
    text_family(config.model_type)
    quantizer = precision.quantizer(config, place.device)
    skeleton = _skeleton(config, files.name, precision.dtype, quantizer, place, attn_implementation)
    weights: Weights
    if gguf_file is not None:
        unpacked = skeleton.num_parameters() * precision.dtype.itemsize
        place.require_memory(skeleton, f"loading {gguf_file}", extra_bytes=unpacked)
        weights = LoadedWeights.from_gguf(skeleton, files, gguf_file, precision.dtype, place.device)
    else:
        place.require_memory(skeleton, f"loading {files.name}")  # before anything is downloaded
        files.fetch_weights()
        weights = CheckpointWeights(
            skeleton, Checkpoint(files.folder), quantizer=quantizer, dtype=precision.dtype, device=place.device
        )
        place.require_memory(skeleton, f"loading {files.name}")  # a 4-bit checkpoint may be so in part only
    return _assemble(skeleton, weights, quantizer, place, None if gguf_file else files.folder)


def from_shape(
    shape: str | Path | PreTrainedConfig,
    *,
    quantization: Literal["nf4"] | None = "nf4",
    double_quant: bool = True,
    dtype: str | torch.dtype = torch.bfloat16,
    compute_dtype: str | torch.dtype | None = None,
    block_size: int = 1,
    slots: int | None = None,
    resident_blocks: int = 0,
    micro_batch_size: int | None = None,
    replay: bool = True,
    device: str | torch.device | None = None,
    stream: bool = True,
    attn_implementation: str | None = None,
    poison: bool = False,
    checksum: bool = False,
    seed: int = 0,
) -> PreTrainedModel:
    """Build a model of a real shape with random weights, streamed or resident: for benchmarks and parity checks.

    Weights are made and quantised on ``device``, one layer at a time. They depend on ``seed``, the tensor's name and
    the device alone, so the streamed model and its resident twin hold the same bytes.

    Args:
        shape: a name from :func:`poros.model.shapes.shape_names`, a folder or hub id with a ``config.json``, or a
            configuration.
        seed: of the weights.

    The other arguments, and the errors, are those of :func:`load`.
    """
    precision = Precision.of(quantization, double_quant, dtype, compute_dtype)
    place = Place(
        compute_device(device), stream, block_size, slots, resident_blocks, micro_batch_size, replay, poison, checksum
    )
    if isinstance(shape, PreTrainedConfig):
        config = copy.deepcopy(shape)
    elif str(shape) in shape_names():
        config = AutoConfig.for_model(**read_shape(str(shape)))
    else:
        config = _read_config(locate(shape))
    text_family(config.model_type)
    quantizer = precision.quantizer(config, place.device)
    skeleton = _skeleton(config, "", precision.dtype, quantizer, place, attn_implementation)
    place.require_memory(skeleton, f"building {shape if isinstance(shape, str | Path) else config.model_type}")
    weights = RandomWeights(skeleton, seed=seed, device=place.device)
    return _assemble(skeleton, weights, quantizer, place, None)


def _read_config(files: ModelFiles) -> PreTrainedConfig:
    """The parsed configuration; its family is refused by name before transformers, which may not know it, sees it."""
    model_type = files.config()["model_type"]
    text_family(model_type)
    try:
        return AutoConfig.from_pretrained(files.folder)
    except Exception as error:  # transformers has no common base for what a bad configuration raises
        raise CheckpointError(
            f"the config.json of {files.name!r} cannot be read as that of a {model_type} model: {error}"
        ) from error


def _skeleton(
    config: PreTrainedConfig, name: str, dtype: torch.dtype, quantizer: Any, place: Place, attention: str | None
) -> PreTrainedModel:
    """The model without its weights: parameters on the meta device, computed buffers in place."""
    if attention is not None:
        config._attn_implementation = attention
    try:
        skeleton = upstream.new_skeleton(config, name, dtype, quantizer)
    except (ValueError, ImportError) as error:
        if attention is None:
            raise
        raise ConfigError(f"attn_implementation {attention!r} cannot be used: {error}") from error
    upstream.compute_buffers(skeleton, place.device)
    return skeleton


def _assemble(
    model: PreTrainedModel, weights: Weights, quantizer: Any, place: Place, folder: Path | None
) -> PreTrainedModel:
    """Fill a skeleton, its blocks first, each of which leaves for the host store before the next one is filled."""
    attachment = place.attach(model) if place.stream else None
    quantize.keep_weights_as_packed(model)
    if attachment is None:
        for name, layer in find_decoder(model).layers:
            weights.fill_layer(name, layer)
    else:
        for block in range(attachment.num_blocks):
            for name, layer in attachment.layers_of(block):
                weights.fill_layer(name, layer)
                layer.requires_grad_(False)
            attachment.pack(block)
    weights.fill_rest()
    model.requires_grad_(False)
    model.eval()
    if folder is not None and model.can_generate():
        model.generation_config = upstream.read_generation_config(folder)
    if quantizer is not None:
        upstream.postprocess(model, quantizer)
    if attachment is not None:
        attachment.finish()
        log.info("%s", attachment.report())
    gc.collect()
    return model
