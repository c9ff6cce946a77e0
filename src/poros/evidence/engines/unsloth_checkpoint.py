"""Writes the random weights of a shape as a 4-bit checkpoint: ``python -m ... FOLDER``, with a request on stdin.

For loaders that read checkpoints only. The weights are those that every other method builds in memory.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poros.evidence.engines.base import CellRequest
from poros.evidence.engines.qlora import build_base
from poros.evidence.engines.recorder import Recorder

_SHARD = "4GB"


def make_checkpoint(request: CellRequest, folder: Path) -> None:
    """Build the base of ``request``, and save it with a small tokenizer; ``folder`` appears when all is written."""
    model = build_base(request, Recorder(request), stream=False)
    model.config.architectures = [type(model).__name__]
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(draft, max_shard_size=_SHARD)
        _tokenizer().save_pretrained(draft)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _tokenizer() -> Any:
    """A tokenizer of a thousand words that nobody will use: loaders ask for one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<eos>", "<pad>", "<unk>"]
    words = [f"w{i}" for i in range(1000)]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*words, *special])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def main(arguments: Sequence[str]) -> None:
    """Make the checkpoint of the request on stdin."""
    make_checkpoint(CellRequest.parse(sys.stdin.read()), Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
