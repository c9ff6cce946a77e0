"""Finding the decoder layers of a model, by structure."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from poros.errors import UnsupportedModelError
from poros.families import VERIFIED, text_family


@dataclass(frozen=True)
class Decoder:
    """The part of a model that streams.

    Attributes:
        base: The outermost transformers model (inside PEFT's wrappers, if there are any).
        model_type: ``model_type`` of the text model.
        layers: (qualified name in the model given, layer), in the order in which they run.
        path: Every module from the model given down to the list of layers, outermost first.
    """

    base: PreTrainedModel
    model_type: str
    layers: list[tuple[str, nn.Module]]
    path: list[nn.Module]


def find_decoder(model: nn.Module) -> Decoder:
    """Find the decoder layers of ``model``: a transformers model, or one inside PEFT's wrappers.

    Raises:
        UnsupportedModelError: the model is not a transformers decoder, or not of a verified family.
    """
    base = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if base is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds no transformers model; poros.prepare takes a transformers causal language "
            "model, bare or with PEFT adapters"
        )
    text_family(base.config.model_type)
    text = base.get_decoder()
    layers = getattr(text, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise UnsupportedModelError(
            f"no decoder layers found in {type(base).__name__} (looked for a list 'layers' in {type(text).__name__})"
        )
    model_type = text.config.model_type
    text_family(model_type if model_type in VERIFIED else base.config.model_type)
    names = {id(module): name for name, module in model.named_modules()}
    prefix = names[id(layers)]
    parts = prefix.split(".")
    path = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    # A depth-first count may be larger than the configuration's: only the layers that the model's loop runs stream.
    used = list(layers)[: text.config.num_hidden_layers]
    return Decoder(base, model_type, [(f"{prefix}.{index}", layer) for index, layer in enumerate(used)], path)
