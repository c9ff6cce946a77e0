"""LoRA adapters: put on a model, and written to disk whole or not at all. The only module that imports PEFT."""

import os
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from poros.errors import CheckpointError, ConfigError
from poros.families import MULTIMODAL
from poros.model.checkpoint import read_header
from poros.residency.attach import attachment_of, prepare
from poros.residency.discover import find_decoder

ALL_LINEAR = "all-linear"


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    target_modules: str | Sequence[str] = ALL_LINEAR,
    seed: int | None = None,
) -> PeftModel:
    """Freeze ``model`` and put trainable LoRA adapters on it, as ``peft.get_peft_model`` does.

    Args:
        model: bare, prepared or not; it is changed in place.
        rank: of the update, ``r`` in PEFT.
        alpha: the update is scaled by ``alpha / rank``.
        dropout: on the adapters' input, in training.
        target_modules: ``"all-linear"`` (every linear but the head; of a multimodal model those of the decoder layers
            only, because text sends no gradient through the towers), names such as ``["q_proj", "v_proj"]``, or a
            regular expression over full names.
        seed: of the initial values. The global random state is left as it was; ``None`` draws from it.

    Raises:
        ConfigError: PEFT cannot adapt these modules with these settings. Load the model again before another attempt.
    """
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        exclude_modules=_outside_the_decoder(model) if targets == ALL_LINEAR else None,
        task_type="CAUSAL_LM",
    )
    try:
        with nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.default_generator.manual_seed(seed)  # PEFT draws on the CPU, wherever the adapter goes
            adapted = get_peft_model(model, config)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ConfigError(f"PEFT cannot add these adapters: {reason}. {_way_out(dropout, reason)}") from error
    if attachment_of(adapted) is not None:
        prepare(adapted)  # brings the new tensors to the compute device
    return adapted


def save_adapter(model: PeftModel, folder: str | Path) -> None:
    """Write the adapters of ``model`` to ``folder``, byte for byte as ``save_pretrained`` does, but atomically.

    Everything is written and flushed under another name first. A new folder appears in one step; in an existing one
    each file is replaced in one step. A process that is killed leaves the old adapter or the new one.

    Raises:
        ConfigError: ``model`` has no adapters.
        CheckpointError: not a single tensor would be saved. Nothing was written.
    """
    if not isinstance(model, PeftModel):
        raise ConfigError(f"a {type(model).__name__} has no adapter to save; add one with PEFT first")
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    shutil.rmtree(draft, ignore_errors=True)
    if (folder / "README.md").is_file():  # PEFT edits the card that is there
        draft.mkdir()
        shutil.copy2(folder / "README.md", draft)
    try:
        model.save_pretrained(str(draft))
        _require_tensors(draft)
        _flush(draft)
        _move(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _outside_the_decoder(model: PreTrainedModel) -> str | None:
    """A pattern for the modules of a multimodal model that text does not pass through."""
    if model.config.model_type not in MULTIMODAL:
        return None
    layers = find_decoder(model).layers[0][0].rpartition(".")[0]
    return rf"(?!{re.escape(layers)}\.).*"


def _way_out(dropout: float, reason: str) -> str:
    if dropout and "lora_dropout" in reason:
        return (
            "Fused experts take no dropout: set it to 0, or adapt the attention only "
            '(target_modules ["q_proj", "k_proj", "v_proj", "o_proj"]).'
        )
    return "Check target_modules against the names in the model."


def _require_tensors(folder: Path) -> None:
    files = sorted(folder.rglob("adapter_model.safetensors"))
    empty = [file for file in files if not read_header(file)]
    if empty or not files:
        raise CheckpointError(
            "no adapter tensor would be saved: the names of the model's modules are not those that PEFT knows, or no "
            "adapter is on it. Save the PeftModel itself, without wrappers inside it."
        )


def _flush(folder: Path) -> None:
    """Write everything in ``folder`` to the disk proper, directories included."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _move(draft: Path, folder: Path) -> None:
    if not folder.exists():
        draft.rename(folder)
    else:
        for file in sorted(path for path in draft.rglob("*") if path.is_file()):
            final = folder / file.relative_to(draft)
            final.parent.mkdir(parents=True, exist_ok=True)
            file.replace(final)
        _flush_entries(folder)
    _flush_entries(folder.parent)


def _flush_entries(folder: Path) -> None:
    """Make the renames in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
