"""The run behind ``poros train``: data and base model in, adapter out."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

import poros
from poros.config import RunConfig
from poros.errors import ConfigError, DataError, PorosError
from poros.model.adapter import add_lora
from poros.train.checkpoints import (
    ADAPTER,
    Checkpoint,
    complete_checkpoints,
    damaged_checkpoints,
    delete_partial,
    delete_run,
    export_adapter,
)
from poros.train.chunked_loss import ChunkedCausalLMLoss
from poros.train.collate import PaddingCollator
from poros.train.identity import (
    bits_depend_on,
    changed_versions,
    check_same_run,
    library_versions,
    padding_multiple,
)
from poros.train.interrupt import Interrupted, StopRequest, stop_request
from poros.train.output import claimed_output, describe_output
from poros.train.progress import ProgressCallback
from poros.train.run_data import RunData, read_data
from poros.train.trainer import AdapterTrainer, training_arguments


@dataclass(frozen=True)
class RunResult:
    """What a finished run left."""

    adapter: Path
    num_steps: int
    losses: list[float]  # as reported, every ``train.logging_steps``


def run(
    config: RunConfig, *, resume: bool = False, overwrite: bool = False, console: Console | None = None
) -> RunResult:
    """Train an adapter as ``config`` says and save it in the folder ``adapter`` of ``config.output``.

    Args:
        resume: go on from the newest complete checkpoint in the output folder, to the same bits as without the break.
        overwrite: delete what an earlier run left in the output folder.
        console: where progress goes; stderr if left out.

    Raises:
        PorosError: a setting, the data, the model or the disk does not allow it.
        Interrupted: Ctrl-C. The message says what is on the disk.
    """
    console = console or Console(stderr=True)
    output = Path(config.output)
    try:
        with claimed_output(output, resume=resume, overwrite=overwrite) as checkpoint:
            return _run(config, output, checkpoint, overwrite, console)
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted. {describe_output(output)}") from None
    except torch.OutOfMemoryError as error:
        raise PorosError(
            f"the GPU's memory is full: {str(error).splitlines()[0]} Lower data.max_length or train.batch_size (with "
            "train.accumulation raised as much), model.resident_blocks, model.slots or model.block_size, or close what "
            "else uses the GPU. "
            f"{describe_output(output)}"
        ) from error


def _run(
    config: RunConfig, output: Path, checkpoint: Checkpoint | None, overwrite: bool, console: Console
) -> RunResult:
    device = _device(config.model.device)
    data = read_data(config)
    _say(console, *(f"data   {line}" for line in data.train.summary(config.train.batch_size)))
    dtype = _dtype(config.model.dtype, device)
    settings = bits_depend_on(config, data.train.digest(), device.type, dtype)
    if checkpoint is not None:
        check_same_run(checkpoint, settings)
        damaged = [folder.name for folder in damaged_checkpoints(output)]
        _say(console, *(f"note   {name} is incomplete or damaged, and left alone" for name in damaged))
        _say(console, f"resume from step {checkpoint.step}", *changed_versions(checkpoint))
    if checkpoint is None or not checkpoint.is_last():
        with _quiet_libraries():
            model = _build(config, data, device, dtype)
            loss = _chunked_loss(config, model)
            if config.model.stream:
                _say(console, str(poros.report(model)))
            if overwrite:
                delete_run(output)
            delete_partial(output)
            with stop_request(lambda text: _say(console, text)) as stop:
                _train(_trainer(config, model, loss, data, settings, stop), checkpoint, console)
        checkpoint = complete_checkpoints(output)[-1]
        if not checkpoint.is_last():
            raise Interrupted(f"Stopped after step {checkpoint.step}. {describe_output(output)}")
    export_adapter(checkpoint, output / ADAPTER)
    return RunResult(output / ADAPTER, checkpoint.step, checkpoint.losses())


def _build(config: RunConfig, data: RunData, device: torch.device, dtype: str) -> Any:
    """The base model with a fresh adapter."""
    base = poros.load(
        config.model.path,
        quantization=None if config.model.quantization == "none" else "nf4",
        double_quant=config.model.double_quant,
        dtype=dtype,
        block_size=config.model.block_size,
        slots=config.model.slots,
        resident_blocks=config.model.resident_blocks,
        replay=config.model.replay,
        device=device,
        stream=config.model.stream,
        attn_implementation=config.model.attn_implementation,
        revision=config.model.revision,
        gguf_file=config.model.gguf_file,
    )
    base.config.use_cache = False  # a cache only costs memory in training
    num_embeddings = base.get_input_embeddings().num_embeddings
    if data.largest_id >= num_embeddings:
        raise DataError(
            f"a row has token id {data.largest_id}, but {config.model.path} has only {num_embeddings} embeddings: the "
            "tokenizer is not this model's. Use the one that was saved with the model."
        )
    targets = config.lora.target_modules
    return add_lora(
        base,
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        dropout=config.lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        seed=config.train.seed,
    )


def _chunked_loss(config: RunConfig, model: Any) -> ChunkedCausalLMLoss | None:
    """The loss that stands in for the model's own, if the settings want one."""
    if config.train.loss_chunk_tokens is None:
        return None
    loss = ChunkedCausalLMLoss(config.train.loss_chunk_tokens)
    loss.check(model)
    return loss


def _trainer(
    config: RunConfig,
    model: Any,
    loss: ChunkedCausalLMLoss | None,
    data: RunData,
    settings: Mapping[str, Any],
    stop: StopRequest,
) -> AdapterTrainer:
    on_cpu = not any(parameter.is_cuda for parameter in model.parameters() if parameter.requires_grad)
    multiple = padding_multiple(config, "cpu" if on_cpu else "cuda")
    return AdapterTrainer(
        model=model,
        args=training_arguments(config.train, config.output, evaluate=data.eval is not None, on_cpu=on_cpu),
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=PaddingCollator(data.pad_id, multiple=multiple, max_length=config.data.max_length),
        processing_class=data.tokenizer,
        settings=settings,
        versions=library_versions(),
        keep=config.train.save_total_limit,
        stop=stop,
        loss=loss,
    )


def _train(trainer: AdapterTrainer, checkpoint: Checkpoint | None, console: Console) -> None:
    progress = ProgressCallback(console, lambda: trainer.num_tokens)
    trainer.add_callback(progress)
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.folder))
    finally:
        progress.close()


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda', but torch sees no CUDA device. Set it to 'auto' or 'cpu'.")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _dtype(wanted: str, device: torch.device) -> str:
    return ("bfloat16" if device.type == "cuda" else "float32") if wanted == "auto" else wanted


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep what other libraries say to their own developers out of the display."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
