"""Filling a skeleton from a checkpoint: the whole of it is checked first, then it is read one layer at a time."""

import logging
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from poros.errors import CheckpointError
from poros.model import quantize, upstream
from poros.model.checkpoint import Checkpoint
from poros.residency.discover import find_decoder

log = logging.getLogger("poros")

_REST = ""  # the group of everything that is in no decoder layer


class CheckpointWeights:
    """The weights of a model on disk, in the groups in which they are loaded.

    Construction compares the checkpoint with the skeleton and reads nothing but headers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        *,
        quantizer: Any,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Match the tensors of ``checkpoint`` with the parameters of ``model``.

        Args:
            model: the skeleton; an already quantised checkpoint decides which of its linears are in 4 bits.
            checkpoint: the files.
            quantizer: transformers' quantiser, or ``None``.
            dtype: of what is not quantised.
            device: where tensors are put, and quantised.

        Raises:
            CheckpointError: the model needs a tensor that the checkpoint lacks, or one of another shape.
        """
        self._model = model
        self._checkpoint = checkpoint
        self._device = device
        loader = upstream.Loader(model, quantizer, dtype, device)
        self._targets = {key: self._target(key, loader) for key in checkpoint}
        self._sources: dict[str, list[str]] = defaultdict(list)  # parameter -> tensors that it is made from
        for key, target in self._targets.items():
            for name in target.names:
                self._sources[name].append(key)
        if quantizer is not None and quantizer.pre_quantized:
            settings = quantizer.quantization_config
            quantize.settle_stored_weights(model, checkpoint, self._sources, settings, dtype)
            loader = upstream.Loader(model, quantizer, dtype, device)
        self._loader = loader
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.missing = self._check_complete()
        self._check_stored_shapes()
        layers = {name for name, _ in find_decoder(model).layers}
        self._groups: dict[str, list[str]] = defaultdict(list)  # decoder layer, or the rest -> tensors
        for key, target in self._targets.items():
            self._groups[_group(target.names[0], layers)].append(key)

    def fill_layer(self, name: str, layer: nn.Module) -> None:
        """Give every parameter and persistent buffer of the decoder layer called ``name`` its value."""
        self._load(self._groups.pop(name, []))
        quantize.require_quantized(name, layer)
        for path, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            expected = self._shapes.get(f"{name}.{path}", tensor.shape)
            if tensor.shape != expected and getattr(tensor, "quant_state", None) is None:
                raise upstream.mismatch(f"{name}.{path}", tensor.shape, expected)  # merged from too few or too many

    def fill_rest(self) -> None:
        """Give everything outside the decoder layers its value, and tie what is tied."""
        self._load(self._groups.pop(_REST, []))
        upstream.tie(self._model, self.missing)

    def _load(self, keys: list[str]) -> None:
        self._loader.load({key: self._checkpoint.lazy(key, self._device) for key in keys})

    def _target(self, key: str, loader: upstream.Loader) -> upstream.Target:
        """Where ``key`` goes; a part of a quantised weight (``weight.absmax``) goes where the weight does."""
        weight, _, part = key.rpartition(".weight.")
        if part and f"{weight}.weight" in self._checkpoint:
            return loader.target(f"{weight}.weight")
        return loader.target(key)

    def _check_complete(self) -> set[str]:
        """Names of tied parameters that the checkpoint holds under their other name; anything else must be there."""
        unknown = [
            name for name in self._sources if name not in self._shapes and not upstream.is_ignored(self._model, name)
        ]
        if unknown:
            found = f"{len(unknown)} tensors are not part of the model and were not loaded, such as {unknown[0]}"
            log.warning("%s: %s", self._checkpoint.folder, found)
        absent = {name for name in self._shapes if name not in self._sources}
        twins: dict[str, set[str]] = defaultdict(set)
        for tied, source in self._model.all_tied_weights_keys.items():
            twins[source] |= {tied, source}
        held = {name for names in twins.values() if names - absent for name in names}
        missing = sorted(absent - held)
        if missing:
            others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            raise CheckpointError(
                f"the model needs {missing[0]!r}{others}, which the checkpoint in {self._checkpoint.folder} does not "
                "hold. Download it again, or check that config.json is of the same model."
            )
        return absent

    def _check_stored_shapes(self) -> None:
        """Compare what is loaded as it is stored; what is merged or split on the way shows its shape only then."""
        for key, target in self._targets.items():
            expected = self._shapes.get(target.names[0])
            if target.converted or expected is None or len(self._sources[target.names[0]]) > 1:
                continue
            if self._checkpoint[key].shape != expected:
                raise upstream.mismatch(key, self._checkpoint[key].shape, expected)


def _group(name: str, layers: Collection[str]) -> str:
    """The decoder layer that holds the parameter called ``name``, or the rest."""
    while name:
        name = name.rpartition(".")[0]
        if name in layers:
            return name
    return _REST
