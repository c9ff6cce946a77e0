"""Random weights of a real shape: what speed, memory and parity are measured on when the real ones are not at hand."""

from collections.abc import Collection
from zlib import crc32

import torch
from torch import nn
from transformers import PreTrainedModel

from poros.model import quantize, upstream


class RandomWeights:
    """Fills a skeleton with values that depend on the seed, the tensor's name and the device only.

    Matrices are normal with the configuration's ``initializer_range``. Vectors (norms, biases, gates) start at what the
    model's own initialisation gives them, plus noise, so that no two layers are alike and a tensor of the wrong layer
    shows.
    """

    def __init__(self, model: PreTrainedModel, *, seed: int, device: torch.device) -> None:
        """Prepare to fill ``model``, a skeleton on the meta device, with tensors on ``device``."""
        self._model = model
        self._seed = seed
        self._device = device
        self._generator = torch.Generator(device)
        self._std = float(getattr(model.config.get_text_config(), "initializer_range", None) or 0.02)

    def fill_layer(self, name: str, layer: nn.Module) -> None:
        """Give every parameter and persistent buffer of the layer called ``name`` its value."""
        for path, module in layer.named_modules(prefix=name):
            self._fill_module(path, module)

    def fill_rest(self) -> None:
        """Give everything that is still empty its value, and tie what is tied."""
        tied = set(self._model.all_tied_weights_keys)
        for path, module in self._model.named_modules():
            self._fill_module(path, module, tied)
        upstream.tie(self._model, tied)

    @torch.no_grad()
    def _fill_module(self, path: str, module: nn.Module, skip: Collection[str] = ()) -> None:
        vectors = {}
        for leaf, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            name = f"{path}.{leaf}"
            if not tensor.is_meta or name in skip:
                continue
            if tensor.ndim < 2:
                vectors[name] = _replace(module, leaf, torch.zeros_like(tensor, device=self._device))
                continue
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            self._seed_for(name)
            values.normal_(0.0, self._std, generator=self._generator)
            if quantize.is_4bit(module):
                quantize.quantize_weight(module, values)
            else:
                _replace(module, leaf, values)
            upstream.mark_initialized(getattr(module, leaf))
        if vectors:
            self._fill_vectors(path, module, vectors)

    def _fill_vectors(self, path: str, module: nn.Module, vectors: dict[str, torch.Tensor]) -> None:
        """Run the model's own initialisation on ``module`` and add noise; leave the global generators as they were."""
        cuda = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.default_generator.manual_seed(self._seed_of(path))
            for device in cuda:
                torch.cuda.default_generators[device.index].manual_seed(self._seed_of(path))
            upstream.initialize(self._model, path, module)
        for name, tensor in vectors.items():
            if tensor.is_floating_point():
                self._seed_for(name)
                noise = torch.empty_like(tensor).normal_(0.0, self._std, generator=self._generator)
                tensor.add_(noise)

    def _seed_for(self, name: str) -> None:
        self._generator.manual_seed(self._seed_of(name))

    def _seed_of(self, name: str) -> int:
        return crc32(f"{self._seed}:{name}".encode())  # the CPU's generator takes 32 bits


def _replace(module: nn.Module, leaf: str, tensor: torch.Tensor) -> torch.Tensor:
    """Put ``tensor`` in the place of an empty parameter or buffer, and return what is there then."""
    if leaf in module._buffers:
        module._buffers[leaf] = tensor
        return tensor
    parameter = nn.Parameter(tensor, requires_grad=False)
    setattr(module, leaf, parameter)
    return parameter
