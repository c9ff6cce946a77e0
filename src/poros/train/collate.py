"""Makes a batch of rows of different lengths."""

from collections.abc import Sequence

import torch

from poros.train.encode import IGNORED


class PaddingCollator:
    """Pads rows to the longest on the right: ``input_ids``, ``attention_mask`` and ``labels``, each ``(batch, seq)``.

    ``pad_id`` may be any id of the vocabulary, the end of a sequence too: padding is masked because of where it is.
    """

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, rows: Sequence[dict[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        shape = len(rows), max(len(row["input_ids"]) for row in rows)
        ids = torch.full(shape, self.pad_id, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORED, dtype=torch.long)
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            ids[i, :length] = torch.tensor(row["input_ids"])
            labels[i, :length] = torch.tensor(row["labels"])
            mask[i, :length] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
