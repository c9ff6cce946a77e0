"""The batches of a pass: the same tokens for every method, on the device before the clock starts."""

import hashlib
import math
from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch

from poros.errors import ConfigError, DataError
from poros.evidence.engines.base import CellRequest, dataset_of
from poros.evidence.engines.recorder import Recorder
from poros.evidence.text import random_ids, require_room, token_types
from poros.train.data import read_rows
from poros.train.encode import IGNORED, Encoder
from poros.train.tokenizer import load_tokenizer

Batch = dict[str, torch.Tensor]


def make_batches(request: CellRequest, model: Any, recorder: Recorder) -> list[list[Batch]]:
    """For each optimizer step of the pass, its micro-batches: ``input_ids`` and ``labels`` of ``(batch, seq)``.

    Every row has exactly ``seq_len`` tokens, so that tokens a second mean the same everywhere. Rows of a file are put
    one behind another and cut to that length, as often as it takes. The dataset is noted in the recorder's facts.

    Args:
        model: bare or with adapters; its vocabulary and what else its forward needs are read from it.

    Raises:
        DataError, CheckpointError: the file, or the model's tokenizer, cannot be read.
        ConfigError: the file's tokens are not of this model's vocabulary, or all tokens of the pass are more than host
            memory holds.
    """
    shape = request.total_steps, request.accumulation, request.batch_size, request.seq_len
    require_room(shape)
    if request.dataset is None:
        ids, digest = random_ids(model.config, shape, request.seed)
        labels = ids.clone()
    else:
        ids, labels = (part.view(shape) for part in _from_file(request, model.config, math.prod(shape)))
        digest = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    labels[..., 0] = IGNORED  # nothing predicts it, and some losses count it all the same
    recorder.facts["dataset"] = dataset_of(request) | {"sha256": digest}
    ids, labels = ids.to(recorder.device), labels.to(recorder.device)
    types = token_types(model.get_base_model() if hasattr(model, "get_base_model") else model, ids[0, 0])
    return [
        [{"input_ids": ids[step, part], "labels": labels[step, part], **types} for part in range(request.accumulation)]
        for step in range(request.total_steps)
    ]


def _from_file(request: CellRequest, config: Any, ids_needed: int) -> Iterator[torch.Tensor]:
    """Token ids and labels of the file's rows, repeated until there are enough."""
    assert request.dataset is not None
    tokenizer = load_tokenizer(request.source)
    try:
        rows = read_rows([request.dataset], Encoder(tokenizer), max_length=request.seq_len)
    except DataError as error:
        raise DataError(_of_a_spec(str(error))) from None
    vocabulary = config.get_text_config().vocab_size
    if rows.largest_id >= vocabulary:
        raise ConfigError(
            f"{request.dataset} has token id {rows.largest_id}, but {request.model} has only {vocabulary} embeddings: "
            "the tokenizer in the model's folder is not this model's"
        )
    for name in ("input_ids", "labels"):
        tokens = chain.from_iterable(getattr(example, name) for example in cycle(rows.examples))
        yield torch.tensor(list(islice(tokens, ids_needed)), dtype=torch.long)


def _of_a_spec(message: str) -> str:
    """What reading rows says, in the settings of a spec instead of those of a training run."""
    for theirs, ours in (
        ("raise data.max_length or set data.truncation: keep_end", "raise seq_len"),
        ("data.train or data.eval", "dataset.path"),
    ):
        message = message.replace(theirs, ours)
    return message
