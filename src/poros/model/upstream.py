"""The calls into transformers' loading internals, all of them, because they move between releases.

Poros loads one decoder layer at a time, which ``from_pretrained`` cannot do, but through the same steps: the same
skeleton, the same renaming and merging of checkpoint keys, the same quantiser. Written against 5.5, 5.17 and 5.24.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.auto_factory import _get_model_class
from transformers.quantizers.auto import get_hf_quantizer
from transformers.utils import logging as transformers_logging

from poros.errors import CheckpointError
from poros.families import MULTIMODAL


def quantizer_for(config: PreTrainedConfig, requested: Any, device: torch.device) -> Any:
    """The ``HfQuantizer`` of a model: what ``config`` says of a quantised checkpoint, else ``requested``, else None."""
    quantizer, _, _ = get_hf_quantizer(config, requested, {"": device}, True, {})
    return quantizer


def new_skeleton(config: PreTrainedConfig, name: str, dtype: torch.dtype, quantizer: Any) -> PreTrainedModel:
    """The model on the meta device, of the class that users load, with 4-bit linears where ``quantizer`` wants them.

    Weights are not tied yet: a checkpoint may hold either side of a tie.
    """
    auto = AutoModelForImageTextToText if config.model_type in MULTIMODAL else AutoModelForCausalLM
    model_class = _get_model_class(config, auto._model_mapping)
    config.name_or_path = name
    config.dtype = dtype
    for key in config.sub_configs:
        if (part := getattr(config, key)) is not None:
            part.dtype = dtype
    with ExitStack() as contexts:
        for context in model_class.get_init_context(dtype, quantizer is not None, False, False):
            contexts.enter_context(context)
        model = model_class(config)
        if quantizer is not None:
            quantizer.preprocess_model(
                model=model, dtype=dtype, device_map=None, checkpoint_files=None, use_kernels=False
            )
    return model


def compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give the buffers that no checkpoint holds (rotary frequencies, embedding scales) their values, on ``device``.

    They are computed by the model's own initialisation, which is held off everything else.
    """
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.empty_like(buffer, device=device)
    for tensor in (*model.parameters(), *(model.get_buffer(name) for name in _persistent_buffers(model))):
        mark_initialized(tensor)
    model.initialize_weights()


def _persistent_buffers(model: PreTrainedModel) -> set[str]:
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    return {name for name, _ in model.named_buffers()} - computed


@dataclass(frozen=True)
class Target:
    """Where a checkpoint's tensor ends up."""

    names: tuple[str, ...]  # parameters or buffers of the model; several if the tensor is split
    converted: bool  # it is merged, split or permuted on the way: its shape is not the parameter's


class Loader:
    """Moves tensors of a checkpoint into a model, under the names and in the form that this model wants."""

    def __init__(self, model: PreTrainedModel, quantizer: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        self._names = model.state_dict()
        transforms = get_model_conversion_mapping(model, None, quantizer)
        self._renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self._converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self._config = LoadStateDictConfig(
            pretrained_model_name_or_path=model.config.name_or_path,
            device_map={"": device},
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            hf_quantizer=quantizer,
            weight_mapping=transforms,
        )

    def target(self, key: str) -> Target:
        """Where the tensor called ``key`` in the checkpoint goes; its names need not exist in the model."""
        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._names)
        if name not in self._names and key in self._names:
            name, pattern = rename_source_key(key, [], [], prefix, self._names)
        if pattern is None:
            return Target((name,), converted=False)
        converter = next(converter for converter in self._converters if pattern in converter.source_patterns)
        names = tuple(name.replace(converter.target_patterns[0], target) for target in converter.target_patterns)
        # The pattern "weight" is how a bitsandbytes checkpoint is read: it leaves a lone weight as it is.
        return Target(names, converted=converter.target_patterns != ["weight"])

    def load(self, tensors: Mapping[str, Any]) -> None:
        """Put ``tensors`` (checkpoint name -> tensor, or slice of one) into the model.

        Raises:
            CheckpointError: a tensor cannot be converted or does not have the parameter's shape.
        """
        extra = {"tp_plan": None} if "tp_plan" in signature(convert_and_load_state_dict_in_model).parameters else {}
        with _no_progress_bars():
            info, _ = convert_and_load_state_dict_in_model(self._model, dict(tensors), self._config, **extra)
        for name, error in info.conversion_errors.items():
            reason = error.strip().splitlines()
            raise CheckpointError(f"the tensors of {name!r} cannot be loaded: {' '.join(reason[-2:])}")
        for name, found, wanted in info.mismatched_keys:
            raise mismatch(name, found, wanted)


def is_ignored(model: PreTrainedModel, name: str) -> bool:
    """Whether a checkpoint may hold a tensor of this name although ``model`` has no use for it."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, name) for pattern in (*patterns, r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"))


def mismatch(name: str, found: Any, wanted: Any) -> CheckpointError:
    """The error for a tensor whose shape is not the one that config.json asks for."""
    return CheckpointError(
        f"tensor {name!r} has shape {tuple(found)} in the checkpoint, but config.json asks for {tuple(wanted)}. "
        "Configuration and weights are not of the same model."
    )


def tie(model: PreTrainedModel, missing: set[str]) -> None:
    """Tie what the configuration ties; ``missing`` names the parameters that the checkpoint did not hold."""
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)


def postprocess(model: PreTrainedModel, quantizer: Any) -> None:
    """Mark the model as a 4-bit one, as ``from_pretrained`` does, so that PEFT and the Trainer treat it as such."""
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


def read_generation_config(folder: Path) -> GenerationConfig:
    """How the model in ``folder`` generates; without a file that says so, by the defaults of its configuration."""
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:
        return GenerationConfig.from_pretrained(folder, config_file_name="config.json", _from_model_config=True)


def initialize(model: PreTrainedModel, name: str, module: nn.Module) -> None:
    """Run the model's own initialisation on the module called ``name``, except on tensors marked as initialised."""
    owner = model
    while name:
        name = name.rpartition(".")[0]
        if isinstance(inner := model.get_submodule(name), PreTrainedModel):
            owner = inner  # a nested model knows its modules best
            break
    owner._init_weights(module)


def mark_initialized(tensor: torch.Tensor) -> None:
    """Keep transformers' initialisation off ``tensor``."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Silence transformers' bar, which would be drawn once for every layer."""
    previous = transformers_logging.set_tqdm_hook(lambda _, args, kwargs: transformers_logging.EmptyTqdm(*args))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
