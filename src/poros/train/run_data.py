"""What a run learns from: the tokenizer and the encoded rows, read before the model is loaded."""

from dataclasses import dataclass
from typing import Any

from poros.config import RunConfig
from poros.train.data import RowDataset, read_rows
from poros.train.encode import Encoder
from poros.train.tokenizer import load_tokenizer


@dataclass(frozen=True)
class RunData:
    """The rows of a run, and the tokenizer that encoded them."""

    tokenizer: Any
    train: RowDataset
    eval: RowDataset | None

    @property
    def pad_id(self) -> int:
        """A token to pad with. It is masked by position, so a tokenizer without one needs no new token."""
        candidates = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0
        return next(token for token in candidates if token is not None)

    @property
    def largest_id(self) -> int:
        """The largest token id that the model will be given."""
        return max(self.train.largest_id, self.eval.largest_id if self.eval else 0, self.pad_id)


def read_data(config: RunConfig) -> RunData:
    """Load the tokenizer and read all rows of ``config``.

    Raises:
        CheckpointError, UnsupportedModelError: there is no such model or tokenizer, or its family is not supported.
        DataError: the rows cannot be used.
    """
    tokenizer = load_tokenizer(
        config.model.path,
        revision=config.model.revision,
        gguf_file=config.model.gguf_file,
        chat_template=config.data.chat_template,
    )
    encoder = Encoder(tokenizer, append_eos=config.data.append_eos, assistant_turns=config.data.assistant_turns)

    def read(files: str | list[str]) -> RowDataset:
        return read_rows(
            [files] if isinstance(files, str) else files,
            encoder,
            format=config.data.format,
            max_length=config.data.max_length,
            truncation=config.data.truncation,
        )

    return RunData(tokenizer, read(config.data.train), read(config.data.eval) if config.data.eval else None)
