"""Turns a row into token ids and labels: which tokens are learnt, and which are only read.

A label is the token's id where it is learnt and ``IGNORED`` elsewhere. What is learnt is decided from positions in the
text, never from token ids: a padding token that is also the end-of-sequence token cannot hide a real end.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from jinja2 import TemplateError

from poros.errors import DataError
from poros.train.rows import Row, RowError

IGNORED = -100  # the label that the loss of PyTorch and transformers skips

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoded:
    """Token ids of one row and, at the same positions, the labels."""

    input_ids: Sequence[int]
    labels: Sequence[int]

    @property
    def num_trained(self) -> int:
        """Tokens that the loss counts. The first is never predicted, whatever its label."""
        return sum(label != IGNORED for label in self.labels[1:])


class Encoder:
    """Encodes rows with one tokenizer.

    ``text`` is learnt whole, of ``prompt`` and ``completion`` the completion, of ``messages`` the assistant's turns.
    Special tokens in front (such as BOS) come once: from the chat template for ``messages``, else as the tokenizer
    puts them. ``append_eos`` ends ``text`` and ``completion`` with the end-of-sequence token, once.
    """

    def __init__(
        self, tokenizer: Any, *, append_eos: bool = True, assistant_turns: Literal["all", "last"] = "all"
    ) -> None:
        if append_eos and tokenizer.eos_token_id is None:
            raise DataError(
                "the tokenizer has no end-of-sequence token, so a model trained on it would not learn where to stop. "
                "Set data.append_eos: false to train without one."
            )
        self._tokenizer = tokenizer
        self._ending = [tokenizer.eos_token_id] if append_eos else []
        self._assistant_turns = assistant_turns
        self._leading = _leading_tokens(tokenizer)

    def encode(self, row: Row) -> Encoded:
        """Encode one row at its full length.

        Raises:
            RowError: the tokenizer or the chat template cannot take this row.
            DataError: no row of this kind can be encoded, for want of a chat template.
        """
        fields = row.fields
        if row.kind == "messages":
            return self._encode_messages(fields["messages"], fields.get("tools"))
        if row.kind == "prompt":
            return self._encode_completion(fields["prompt"], fields["completion"])
        ids = self._with_ending(self._with_leading(self._tokenize(fields["text"])))
        return Encoded(ids, ids if fields["text"] else [IGNORED] * len(ids))

    def _encode_completion(self, prompt: str, completion: str) -> Encoded:
        """The prompt's tokens are always those of the prompt alone, since that is what the model will be given."""
        head = self._with_leading(self._tokenize(prompt))
        whole = self._with_leading(self._tokenize(prompt + completion))
        tail = whole[len(head) :] if whole[: len(head)] == head else self._tokenize(completion)
        ids = self._with_ending(head + tail)
        learnt = ids[len(head) :] if completion else [IGNORED] * (len(ids) - len(head))
        return Encoded(ids, [IGNORED] * len(head) + learnt)

    def _encode_messages(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Encoded:
        if not messages:
            return Encoded([], [])
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
        except ValueError:
            raise DataError(
                "the rows are conversations ('messages'), but the tokenizer has no chat template, as is usual for a "
                "base model. Set data.chat_template to a file with a Jinja template, or give the rows as 'prompt' and "
                "'completion' or as 'text'."
            ) from None
        try:
            if _GENERATION.search(template):
                return self._encode_marked(messages, tools)
            return self._encode_turns(messages, tools)
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise RowError(f"the chat template refused the conversation: {error}") from None

    def _encode_marked(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Encoded:
        """For a template that marks the assistant's words with ``{% generation %}`` itself."""
        encoded = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learnt = encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]]
        if self._assistant_turns == "last":
            starts = [i for i, (before, now) in enumerate(pairwise([False, *learnt])) if now and not before]
            learnt = [flag and i >= starts[-1] for i, flag in enumerate(learnt)]
        return Encoded(ids, [token if flag else IGNORED for token, flag in zip(ids, learnt, strict=True)])

    def _encode_turns(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Encoded:
        text = self._render(messages, tools)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self._assistant_turns == "last":
            turns = turns[-1:]
        spans = [self._turn_span(messages, turn, text, tools) for turn in turns]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = encoded["input_ids"]
        labels = [
            token if any(start <= at < end for start, end in spans) else IGNORED
            for token, (at, _) in zip(ids, encoded["offset_mapping"], strict=True)
        ]
        return Encoded(ids, labels)

    def _turn_span(
        self, messages: list[dict[str, Any]], turn: int, text: str, tools: list[Any] | None
    ) -> tuple[int, int]:
        """Where one assistant turn's words are in ``text``: after what the model is given, up to the turn's end."""
        given = self._render(messages[:turn], tools, add_generation_prompt=True) if turn else ""
        ended = self._render(messages[: turn + 1], tools) if turn + 1 < len(messages) else text
        if not (ended.startswith(given) and text.startswith(ended)):
            raise RowError(
                f"the chat template writes message {turn + 1} differently once others follow it, so the assistant's "
                "words cannot be told apart. Set data.assistant_turns: last, or data.chat_template to a template with "
                "{% generation %} marks"
            )
        return len(given), len(ended)

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))

    def _tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _with_leading(self, ids: list[int]) -> list[int]:
        return ids if ids[: len(self._leading)] == self._leading else self._leading + ids

    def _with_ending(self, ids: list[int]) -> list[int]:
        return ids if ids[-1:] == self._ending else ids + self._ending


def _leading_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer itself puts in front of a text, such as BOS."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start]
    return []
