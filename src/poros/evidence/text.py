"""Random text for a model: token ids that stand for text, and what else a multimodal class wants to be told."""

import hashlib
import inspect
import math
import sys
from typing import Any

import torch

from poros.model.memory import require_host_memory

# Ids of a multimodal configuration that stand for something else than text; they are the last of the vocabulary.
_NOT_TEXT = ("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id")


_ID_BYTES = 3 * 8  # the id, its label, and a copy of one of them on the way


def require_room(shape: tuple[int, ...]) -> None:
    """Raise :class:`ConfigError` unless host memory holds token ids of ``(steps, accumulation, batch, seq)``."""
    require_host_memory(
        math.prod(shape) * _ID_BYTES,
        f"drawing {' x '.join(map(str, shape))} tokens (steps, batches, rows, length)",
        "Lower one of them.",
    )


def random_ids(config: Any, shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, str]:
    """Token ids of ``shape``, and their SHA-256. They are drawn on the CPU and depend on vocabulary and seed alone."""
    special = (getattr(config, name, None) for name in _NOT_TEXT)
    end = min([config.get_text_config().vocab_size, *(token for token in special if token)])
    ids = torch.randint(0, end, shape, generator=torch.Generator().manual_seed(seed))
    return ids, hashlib.sha256(ids.numpy().tobytes()).hexdigest()


def token_types(base: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keyword arguments that say "all of ``ids`` is text", where transformers does not train the model without them.

    Later releases take their absence for the same, and may choose a faster attention then.
    """
    masks = getattr(sys.modules[type(base).__module__], "create_causal_mask_mapping", None)
    wanted = () if masks is None else inspect.signature(masks).parameters
    if "is_training" not in wanted:
        return {}
    return {name: torch.zeros_like(ids) for name in ("token_type_ids", "mm_token_type_ids") if name in wanted}
