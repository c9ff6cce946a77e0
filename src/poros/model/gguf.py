"""Weights from a GGUF file, which transformers can only read as a whole."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from poros.errors import CheckpointError
from poros.model import quantize, upstream
from poros.model.hub import ModelFiles


def read_gguf_config(files: ModelFiles, gguf_file: str) -> PreTrainedConfig:
    """The configuration that the header of ``gguf_file`` describes.

    Raises:
        CheckpointError: the file is missing, or transformers cannot read it.
    """
    files.fetch([gguf_file])
    if not (files.folder / gguf_file).is_file():
        found = ", ".join(sorted(path.name for path in files.folder.glob("*.gguf"))) or "none"
        raise CheckpointError(f"{files.name!r} has no file {gguf_file!r} (GGUF files there: {found})")
    try:
        return AutoConfig.from_pretrained(files.folder, gguf_file=gguf_file)
    except ImportError as error:
        raise CheckpointError(f"reading {gguf_file} needs the gguf package: pip install 'poros[gguf]'") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{files.folder / gguf_file} cannot be read as a GGUF model: {error}") from error


class LoadedWeights:
    """Fills a skeleton from tensors in host memory, each of which is dropped as soon as it has been taken."""

    def __init__(self, model: PreTrainedModel, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        """Prepare to fill ``model``, a skeleton on the meta device, from ``tensors`` of the same names."""
        self._model = model
        self._tensors = tensors
        self._device = device

    @classmethod
    def from_gguf(
        cls, model: PreTrainedModel, files: ModelFiles, gguf_file: str, dtype: torch.dtype, device: torch.device
    ) -> "LoadedWeights":
        """Read ``gguf_file`` into host memory, in ``dtype``: as much of it as the unquantised model takes."""
        loaded = AutoModelForCausalLM.from_pretrained(
            files.folder, gguf_file=gguf_file, dtype=dtype, device_map={"": "cpu"}
        )
        return cls(model, {name: tensor.detach() for name, tensor in loaded.state_dict().items()}, device)

    def fill_layer(self, name: str, layer: nn.Module) -> None:
        """Give every parameter and persistent buffer of the layer called ``name`` its value."""
        for path, module in layer.named_modules(prefix=name):
            self._fill_module(path, module)

    def fill_rest(self) -> None:
        """Give everything that is still empty its value, and tie what is tied."""
        for path, module in self._model.named_modules():
            self._fill_module(path, module)
        upstream.tie(self._model, set())

    def _fill_module(self, path: str, module: nn.Module) -> None:
        for leaf, empty in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if not empty.is_meta:
                continue
            value = self._tensors.pop(f"{path}.{leaf}").to(self._device)
            if leaf == "weight" and quantize.is_4bit(module):
                quantize.quantize_weight(module, value)
            elif leaf in module._buffers:
                module._buffers[leaf] = value
            else:
                setattr(module, leaf, nn.Parameter(value, requires_grad=False))
