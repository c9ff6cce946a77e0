"""Loads the base model's tokenizer, with the chat template that the run asks for."""

from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from poros.errors import CheckpointError, DataError
from poros.families import text_family
from poros.model.hub import locate


def load_tokenizer(
    model: str, *, revision: str | None = None, gguf_file: str | None = None, chat_template: str | None = None
) -> Any:
    """The tokenizer of ``model``, a folder or a hub id.

    Args:
        chat_template: file with a Jinja template that replaces the tokenizer's own.

    Raises:
        UnsupportedModelError: the model's family is not supported; found from its configuration, before anything else.
        CheckpointError: there is no such model, or it has no tokenizer.
        DataError: the template's file cannot be read.
    """
    from transformers import AutoTokenizer

    if gguf_file is None:
        text_family(locate(model, revision).config()["model_type"])
    elif Path(model).is_dir() and not (Path(model) / gguf_file).is_file():
        raise CheckpointError(f"{model}: no file {gguf_file}. Set model.gguf_file to the name of a GGUF file in it.")
    options = {"gguf_file": gguf_file} if gguf_file is not None else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision or "main", **options)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(
            f"{model}: no tokenizer can be loaded: {_first_line(error)}. The folder needs a tokenizer.json and a "
            "tokenizer_config.json beside the weights, as tokenizer.save_pretrained writes them."
        ) from error
    if chat_template is not None:
        _use_template(tokenizer, chat_template)
    return tokenizer


def _use_template(tokenizer: Any, file: str) -> None:
    try:
        tokenizer.chat_template = Path(file).read_text(encoding="utf-8")
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(
            f"{file}: the chat template cannot be read: {reason}. Set data.chat_template to a Jinja template's file."
        ) from None
    except TemplateSyntaxError as error:
        raise DataError(f"{file}:{error.lineno}: the chat template is not valid Jinja: {error.message}") from None
    except TemplateError:
        pass  # it may refuse this conversation and take those of the rows


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
