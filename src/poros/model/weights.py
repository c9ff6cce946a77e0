"""Filling a skeleton from a checkpoint: the whole of it is checked first, then it is read one layer at a time."""

import logging
import re
from collections import defaultdict
from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedModel

from poros.errors import CheckpointError
from poros.model import quantize, upstream
from poros.model.checkpoint import Checkpoint

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
        layers: Collection[str],
        *,
        quantizer: object,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Match the tensors of ``checkpoint`` with the parameters of ``model``.

        Args:
            model: the skeleton; an already quantised checkpoint may turn some of its 4-bit linears into plain ones.
            checkpoint: the files.
            layers: names of the decoder layers, each of which is a group of its own.
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
        targets = {key: self._target(key, loader) for key in checkpoint}
        self._sources: dict[str, list[str]] = defaultdict(list)  # parameter -> tensors that it is made from
        for key, target in targets.items():
            for name in target.names:
                self._sources[name].append(key)
        if getattr(quantizer, "pre_quantized", False):
            quantize.settle_stored_weights(model, checkpoint, self._sources, dtype)
            loader = upstream.Loader(model, quantizer, dtype, device)
        self._loader = loader
        self.missing = self._check_complete()
        self._check_shapes(targets)
        self._groups: dict[str, list[str]] = defaultdict(list)
        for key, target in targets.items():
            self._groups[_group(target.names[0], layers)].append(key)

    def fill_layer(self, name: str, layer: nn.Module) -> None:
        """Give every parameter and persistent buffer of the decoder layer called ``name`` its value."""
        self._load(self._groups.pop(name, []))
        quantize.require_quantized(name, layer)

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
        expected = self._model.state_dict()
        unknown = [name for name in self._sources if name not in expected and not self._is_ignored(name)]
        if unknown:
            log.warning(
                "%s: %d tensors are not part of the model and were not loaded, such as %s",
                self._checkpoint.folder, len(unknown), unknown[0],
            )  # fmt: skip
        absent = {name for name in expected if name not in self._sources}
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

    def _is_ignored(self, name: str) -> bool:
        """Whether the model says that a checkpoint may hold ``name`` although it has no use for it."""
        patterns = (*self._model._keys_to_ignore_on_load_unexpected, r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
        return any(re.search(pattern, name) for pattern in patterns)

    def _check_shapes(self, targets: dict[str, upstream.Target]) -> None:
        expected = self._model.state_dict()
        for key, target in targets.items():
            name = target.names[0]
            if target.converted or name not in expected or len(self._sources[name]) > 1:
                continue
            if self._checkpoint[key].shape != tuple(expected[name].shape):
                raise upstream.mismatch(key, self._checkpoint[key].shape, expected[name].shape)


def _group(name: str, layers: Collection[str]) -> str:
    """The decoder layer that holds the parameter called ``name``, or the rest."""
    while name:
        name = name.rpartition(".")[0]
        if name in layers:
            return name
    return _REST
