"""Poros under transformers' Trainer: the same model, data and optimizer, stepped by the loop that most people use."""

import tempfile
from typing import Any

from poros.evidence.engines.base import CellRequest, Engine

ENGINE = Engine(
    name="poros-trainer",
    title="poros in the Trainer",
    changes=("loop: transformers' Trainer",),
    settings=("block_size", "slots", "resident_blocks", "replay"),
    launches=("eager", "replay"),
)


def run(request: CellRequest, recorder: Any) -> None:
    """Let the Trainer take the steps; a step's time is what lies between its own callbacks around one."""
    import torch
    from torch.utils.data import SequentialSampler
    from transformers import PrinterCallback, Trainer, TrainerCallback

    from poros.config import TrainConfig
    from poros.evidence.engines.batches import make_batches
    from poros.evidence.engines.qlora import build_streamed
    from poros.train.loop import trainable
    from poros.train.trainer import training_arguments

    model = build_streamed(request, recorder)
    steps = make_batches(request, model, recorder)
    rows = [{key: value[i] for key, value in batch.items()} for step in steps for batch in step
            for i in range(request.batch_size)]  # fmt: skip

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if trainer.state.global_step == 0:
                torch.manual_seed(request.seed)  # of the dropout; making the data loader has drawn from the generator
            trainer.loss = torch.zeros((), device=recorder.device)
            recorder.begin_step()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.end_step(trainer.loss)

    class InOrder(Trainer):  # type: ignore[misc]
        loss: torch.Tensor

        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return SequentialSampler(rows)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            self.loss += loss  # each batch's share of the step's mean
            return loss

        def floating_point_ops(self, *_: Any) -> int:
            return 0  # counting walks every module for every batch; `poros train` does without as well

    with tempfile.TemporaryDirectory() as output:
        settings = TrainConfig(
            batch_size=request.batch_size,
            accumulation=request.accumulation,
            steps=request.total_steps,
            learning_rate=request.learning_rate,
            max_grad_norm=request.max_grad_norm,
            schedule="constant",
            logging_steps=request.total_steps + 1,
            seed=request.seed,
        )
        arguments = training_arguments(settings, output, evaluate=False, on_cpu=recorder.device.type == "cpu")
        arguments.save_strategy = "no"
        arguments.dataloader_pin_memory = False  # the rows are on the device
        optimizer = torch.optim.AdamW(trainable(model), lr=request.learning_rate)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer = InOrder(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=lambda picked: {key: torch.stack([row[key] for row in picked]) for key in picked[0]},
            optimizers=(optimizer, constant),
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
