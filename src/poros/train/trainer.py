"""The trainer of ``poros train``: transformers' own, which saves only the adapter and stops when asked to."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from poros.config import TrainConfig
from poros.model.adapter import save_adapter
from poros.train.checkpoints import checkpoint_folder, complete_checkpoints, delete_older, whole_folder, write_manifest
from poros.train.chunked_loss import ChunkedCausalLMLoss
from poros.train.guards import check_adapter, check_gradients, check_loss, modules_that_run
from poros.train.interrupt import StopRequest


def training_arguments(config: TrainConfig, output: str, *, evaluate: bool, on_cpu: bool) -> TrainingArguments:
    """transformers' arguments for a run with these settings."""
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        max_steps=config.steps or -1,
        num_train_epochs=config.epochs or 1.0,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant_with_warmup" if config.schedule == "constant" else config.schedule,
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        seed=config.seed,
        optim="adamw_torch",
        save_strategy="steps",
        save_steps=config.save_steps,
        logging_steps=config.logging_steps,
        logging_nan_inf_filter=False,  # it would report an average in place of the loss that is no number
        eval_strategy="steps" if evaluate else "no",
        eval_steps=(config.eval_steps or config.save_steps) if evaluate else None,
        prediction_loss_only=True,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to="none",
    )
    # With several GPUs in sight the trainer would replicate the model on all of them.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


class AdapterTrainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Trains the adapter of a PEFT model, and keeps nothing but the adapter and what resuming needs.

    Args:
        settings: what the run's bits depend on; kept with each checkpoint.
        versions: of the libraries that compute them; kept as well.
        keep: checkpoints to keep.
        stop: looked at after every step.
        loss: computes the loss in place of the model.
    """

    def __init__(
        self,
        *args: Any,
        settings: Mapping[str, Any],
        versions: Mapping[str, str],
        keep: int,
        stop: StopRequest,
        loss: ChunkedCausalLMLoss | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)
        self.add_callback(_StopCallback(stop))
        self.num_tokens = 0  # through the model in this process, padding included
        self._output = Path(self.args.output_dir)
        self._settings = settings
        self._versions = versions
        self._keep = keep
        self._loss = loss
        self._partial: Path | None = None  # the folder being filled, while a checkpoint is saved
        self._checked_gradients = False

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """One forward and backward; the first in a process shows whether the adapter gets gradients."""
        self.num_tokens += inputs["input_ids"].numel()
        with ExitStack() as stack:
            ran = set() if self._checked_gradients else stack.enter_context(modules_that_run())
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        check_loss(loss, self.state.global_step + 1)
        if not self._checked_gradients:
            check_gradients(model, ran)
            self._checked_gradients = True
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of one batch as its share of the mean over the step's tokens, and on request the (no) outputs."""
        if self._loss is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = self._loss(model, inputs, num_items_in_batch)
        return (loss, {}) if return_outputs else loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The loss on the evaluation rows; the random state stays, so that training does not depend on it."""
        with torch.random.fork_rng(devices=[]):
            result: dict[str, float] = super().evaluate(*args, **kwargs)
        return result

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The adapter and the tokenizer: what ``PeftModel.from_pretrained`` and inference need."""
        folder = Path(output_dir or self.args.output_dir)
        check_adapter(self.model, f"the adapter of step {self.state.global_step}")
        save_adapter(self.model, folder)
        self.processing_class.save_pretrained(folder)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: counting walks every module of the model for every batch."""
        return 0

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        step = self.state.global_step
        final = checkpoint_folder(self._output, step)
        if any(checkpoint.step == step for checkpoint in complete_checkpoints(self._output)):
            return  # asked twice at one step, as when Ctrl-C comes with a regular checkpoint
        with whole_folder(final) as self._partial:
            super()._save_checkpoint(*args, **kwargs)
            made = checkpoint_folder(self._partial, step)
            for path in made.iterdir():
                path.rename(self._partial / path.name)
            made.rmdir()
            write_manifest(self._partial, step, self._settings, self._versions)
        self._partial = None
        delete_older(self._output, self._keep)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._partial or self._output)


class _StopCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a checkpoint and ends the run after the step in which that was asked for."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stop.requested:
            control.should_save = True
            control.should_training_stop = True
