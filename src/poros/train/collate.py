"""Makes a batch of rows of different lengths."""

from collections.abc import Sequence

import torch

from poros.train.encode import IGNORED


class PaddingCollator:
    """Pads rows to the longest on the right: ``input_ids``, ``attention_mask`` and ``labels``, each ``(batch, seq)``.

    What follows a row is hidden from it by causal attention, and has no label. So the mask is needed for rows of
    different lengths only to be what everyone's is; where all are of one length it is all ones, and attention keeps its
    fast kernels.

    Args:
        pad_id: any id of the vocabulary, the end of a sequence too: padding is masked because of where it is.
        multiple: of which the padded length is one, as far as ``max_length`` allows.
    """

    def __init__(self, pad_id: int, *, multiple: int = 1, max_length: int | None = None) -> None:
        self.pad_id = pad_id
        self._multiple = multiple
        self._max_length = max_length

    def _padded(self, longest: int) -> int:
        padded = -(-longest // self._multiple) * self._multiple
        return padded if self._max_length is None else max(longest, min(padded, self._max_length))

    def __call__(self, rows: Sequence[dict[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        lengths = {len(row["input_ids"]) for row in rows}
        shape = len(rows), self._padded(max(lengths))
        ids = torch.full(shape, self.pad_id, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORED, dtype=torch.long)
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            ids[i, :length] = torch.tensor(row["input_ids"])
            labels[i, :length] = torch.tensor(row["labels"])
            mask[i, : length if len(lengths) > 1 else None] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
