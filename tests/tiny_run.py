"""A tiny model's folder, data and settings: everything that ``poros train`` needs, made in a moment."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from poros.cli import app

# A turn is "<s>role", a newline, the words, "</s>".
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)


def tokenizer(*, bos: bool = True, pad: str | None = None, template: str | None = CHAT_TEMPLATE) -> Any:
    """A byte-level tokenizer: one token a byte, but for a few merges and ``<s>``, ``</s>``, ``<pad>``.

    Args:
        bos: put ``<s>`` in front of a text, as Llama's tokenizers do.
        pad: the padding token, which many base models do not have.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the answer is yes and no, user system assistant"] * 2, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token=pad, chat_template=template
    )


def model_folder(folder: Path, *, shard_bytes: int | str = "50GB", **settings: Any) -> Path:
    """Save a Llama of four layers with random weights, and its tokenizer."""
    fields = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**fields, **settings}))
        model.save_pretrained(folder, max_shard_size=shard_bytes)
    tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: matrices this small only make two of them wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def poros(*arguments: str | Path) -> Any:
    """The result of a ``poros`` command, run in this process."""
    with one_thread():
        return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write a JSONL file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def some_rows(count: int = 12) -> list[dict[str, Any]]:
    """Rows of all three formats, of different lengths."""
    rows: list[dict[str, Any]] = []
    for i in range(count):
        answer = "yes " * (1 + i % 4) + str(i)
        if i % 3 == 0:
            said = [{"role": "user", "content": f"is it {i}?"}, {"role": "assistant", "content": answer}]
            rows.append({"messages": said})
        elif i % 3 == 1:
            rows.append({"prompt": f"is it {i}?", "completion": " " + answer})
        else:
            rows.append({"text": f"the answer is {answer}"})
    return rows


def settings(model: Path, data: Path, output: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """Settings of a short run; ``sections`` change single settings, as in ``train={"steps": 3}``."""
    run: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "lora": {"rank": 2, "alpha": 4, "dropout": 0.1},
        "data": {"train": str(data), "max_length": 64},
        "train": {"steps": 3, "batch_size": 2, "accumulation": 2, "learning_rate": 1e-2, "save_steps": 1, "seed": 3},
        "output": str(output),
    }
    for section, changes in sections.items():
        run[section] = {**run[section], **changes}
    return run


def write_settings(file: Path, run: dict[str, Any]) -> Path:
    """Write settings as YAML."""
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    return file
