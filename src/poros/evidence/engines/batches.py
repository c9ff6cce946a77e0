"""The batches of a pass: the same tokens for every method, on the device before the clock starts."""

import hashlib
import inspect
import math
import sys
from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch

from poros.errors import ConfigError
from poros.evidence.engines.base import CellRequest, dataset_of
from poros.evidence.engines.recorder import Recorder
from poros.train.data import read_rows
from poros.train.encode import IGNORED, Encoder
from poros.train.tokenizer import load_tokenizer

Batch = dict[str, torch.Tensor]

# Ids in a multimodal configuration that stand for something else than text.
_NOT_TEXT = ("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id")


def make_batches(request: CellRequest, model: Any, recorder: Recorder) -> list[list[Batch]]:
    """For each optimizer step of the pass, its micro-batches: ``input_ids`` and ``labels`` of ``(batch, seq)``.

    Every row has exactly ``seq_len`` tokens, so that tokens a second mean the same everywhere. Rows of a file are put
    one behind another and cut to that length, as often as it takes. The dataset is noted in the recorder's facts.

    Args:
        model: bare or with adapters; its vocabulary and what else its forward needs are read from it.

    Raises:
        DataError, CheckpointError: the file, or the model's tokenizer, cannot be read.
        ConfigError: the file's tokens are not of this model's vocabulary.
    """
    shape = request.total_steps, request.accumulation, request.batch_size, request.seq_len
    if request.dataset is None:
        generator = torch.Generator().manual_seed(request.seed)
        ids = torch.randint(0, _num_text_tokens(model.config), shape, generator=generator)
        labels = ids.clone()
    else:
        ids, labels = (part.view(shape) for part in _from_file(request, model.config, math.prod(shape)))
    labels[..., 0] = IGNORED  # nothing predicts it, and some losses count it all the same
    digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    recorder.facts["dataset"] = dataset_of(request) | {"sha256": digest}
    ids, labels = ids.to(recorder.device), labels.to(recorder.device)
    types = _token_types(model, ids[0, 0])
    return [
        [{"input_ids": ids[step, part], "labels": labels[step, part], **types} for part in range(request.accumulation)]
        for step in range(request.total_steps)
    ]


def _num_text_tokens(config: Any) -> int:
    """Ids below this are text."""
    others = [getattr(config, name, None) for name in _NOT_TEXT]
    return min([config.get_text_config().vocab_size, *(other for other in others if isinstance(other, int) and other)])


def _from_file(request: CellRequest, config: Any, ids_needed: int) -> Iterator[torch.Tensor]:
    """Token ids and labels of the file's rows, repeated until there are enough."""
    assert request.dataset is not None
    tokenizer = load_tokenizer(request.source)
    rows = read_rows([request.dataset], Encoder(tokenizer), max_length=request.seq_len)
    vocabulary = config.get_text_config().vocab_size
    if rows.largest_id >= vocabulary:
        raise ConfigError(
            f"{request.dataset} has token id {rows.largest_id}, but {request.model} has only {vocabulary} embeddings: "
            "the tokenizer in the model's folder is not this model's"
        )
    for name in ("input_ids", "labels"):
        tokens = chain.from_iterable(getattr(example, name) for example in cycle(rows.examples))
        yield torch.tensor(list(islice(tokens, ids_needed)), dtype=torch.long)


def _token_types(model: Any, ids: torch.Tensor) -> Batch:
    """Token types that say "all text", where the installed transformers refuses to train a model without them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    make_masks = getattr(sys.modules[type(base).__module__], "create_causal_mask_mapping", None)
    names = () if make_masks is None else inspect.signature(make_masks).parameters
    if "is_training" not in names:
        return {}
    return {name: torch.zeros_like(ids) for name in ("token_type_ids", "mm_token_type_ids") if name in names}
