"""Under the trainers that people use, with their own defaults, a prepared model trains to the resident run's bits.

The resident twin runs without gradient checkpointing, whatever the streamed run is told: that is the promise.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers as tf

import poros
from tests import skips, tiny, tiny_run
from tests.oracle import Trace, compare, count_layer_runs, fixed_threads

SETTINGS = {"block_size": 2, "slots": 2, "device": "cpu", "poison": True}
STEPS = 3

pytestmark = skips.needs_trl
with contextlib.suppress(ImportError):
    import trl
    from datasets import Dataset


def make(**options):
    return tiny.build("llama", **{"num_layers": 5, "dropout": 0.1, "vocab_size": 320, **options})


@dataclass
class Outcome:
    trace: Trace  # of one step: the last
    history: list[dict[str, Any]]
    layer_runs: list[int]


def outcome(trainer) -> Outcome:
    """Train, and take everything that the parity contract names."""
    with fixed_threads(), count_layer_runs(trainer.model) as runs:
        trainer.train()
    model = trainer.model
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    record = {f"param/{name}": p.detach().clone() for name, p in trainable.items()}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    for name, p in trainable.items():
        for key, value in optimizer.state[p].items():
            record[f"optimizer/{name}.{key}"] = torch.as_tensor(value).clone()
    record["rng/cpu"] = torch.get_rng_state()
    history = [
        {key: value for key, value in entry.items() if "runtime" not in key and "second" not in key}
        for entry in trainer.state.log_history
    ]
    return Outcome(Trace([record]), history, list(runs))


def check(build, *, forwards: int = STEPS, without_gradient: int = 0, streamed_with=(None, True, False), **options):
    """Run a trainer on the resident model twice and on the prepared one, and compare.

    Args:
        build: makes the trainer from a model and a value for ``gradient_checkpointing``.
        forwards: how often each layer runs forward with gradients in a resident run.
        without_gradient: how often besides.
        streamed_with: values of ``gradient_checkpointing`` for the streamed runs; None leaves the trainer's default.
        options: of the model.
    """

    def train(prepare: bool, checkpointing: bool | None) -> Outcome:
        model = make(**options)
        if prepare:
            poros.prepare(model, **SETTINGS)
        torch.manual_seed(5)
        return outcome(build(model, checkpointing))

    resident = train(False, False)
    control = train(False, False)
    assert compare(resident.trace, control.trace) is None, "inconclusive"
    assert resident.history == control.history, "inconclusive"
    assert resident.layer_runs == [forwards + without_gradient] * 5
    assert all(entry["grad_norm"] > 0 for entry in resident.history if "grad_norm" in entry)
    assert len([entry for entry in resident.history if "grad_norm" in entry]) == STEPS
    for checkpointing in streamed_with:
        streamed = train(True, checkpointing)
        assert compare(resident.trace, streamed.trace) is None, f"gradient_checkpointing={checkpointing}"
        assert streamed.history == resident.history
        assert streamed.layer_runs == [2 * forwards + without_gradient] * 5
    return resident


def arguments(kind, folder, checkpointing, **fields):
    """A trainer's configuration with its defaults, but for what a CPU test needs."""
    needed = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    if checkpointing is not None:
        needed["gradient_checkpointing"] = checkpointing
    return kind(**{**needed, **fields})


def token_rows(count=24):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 250, (6 + i % 5,), generator=generator).tolist() for i in range(count)]
    return Dataset.from_list([{"input_ids": row, "labels": row, "unused": 1} for row in rows])


def collator():
    return tf.DataCollatorForSeq2Seq(tiny_run.tokenizer(pad="<pad>"), padding=True)


def plain_trainer(folder, **fields):
    """Builds a ``transformers.Trainer``; the dataset has a column that no model takes, which the Trainer drops."""

    def build(model, checkpointing):
        args = arguments(tf.TrainingArguments, folder, checkpointing, **fields)
        rows = token_rows()
        return tf.Trainer(
            model=model, args=args, train_dataset=rows, eval_dataset=rows.select(range(4)), data_collator=collator()
        )

    return build


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer(tmp_path, accumulation):
    build = plain_trainer(tmp_path, gradient_accumulation_steps=accumulation)
    check(build, forwards=STEPS * accumulation)


@pytest.mark.parametrize("reentrant", [True, False])
def test_trainer_with_either_kind_of_checkpointing(tmp_path, reentrant):
    kwargs = {"use_reentrant": reentrant}
    check(plain_trainer(tmp_path, gradient_checkpointing_kwargs=kwargs), streamed_with=(True,))


def test_trainer_that_evaluates_saves_and_loads_the_best(tmp_path):
    """An evaluation and a checkpoint at every step; the best one is loaded at the end, and its files are the same."""
    files = []

    def build(model, checkpointing):
        folder = tmp_path / str(len(files))
        files.append(folder)
        fields = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        return plain_trainer(folder, load_best_model_at_end=True, **fields)(model, checkpointing)

    check(build, without_gradient=STEPS, streamed_with=(True,))
    saved = [
        {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*.safetensors"))} for folder in files
    ]
    assert len(saved[0]) == STEPS
    assert saved[0] == saved[-1]


def test_trainer_with_noisy_embeddings(tmp_path):
    check(plain_trainer(tmp_path, neftune_noise_alpha=5.0), streamed_with=(True,))


def test_trainer_with_an_unquantised_base(tmp_path):
    check(plain_trainer(tmp_path), streamed_with=(True,), quant=None)


def sft_rows():
    return Dataset.from_list([{"prompt": f"is it {i}?", "completion": " yes" * (1 + i % 3)} for i in range(24)])


def test_sft_trainer(tmp_path):
    def build(model, checkpointing):
        args = arguments(trl.SFTConfig, tmp_path, checkpointing, bf16=False)
        assert args.gradient_checkpointing is (checkpointing is not False)  # on, unless told otherwise
        tokenizer = tiny_run.tokenizer(pad="<pad>")
        return trl.SFTTrainer(model=model, args=args, train_dataset=sft_rows(), processing_class=tokenizer)

    check(build)


def test_sft_trainer_that_makes_the_adapters(tmp_path):
    """The bare model is prepared, and TRL wraps it and puts adapters beside weights that are away."""

    def build(model, checkpointing):
        args = arguments(trl.SFTConfig, tmp_path, checkpointing, bf16=False)
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
        return trl.SFTTrainer(
            model=model,
            args=args,
            train_dataset=sft_rows(),
            processing_class=tiny_run.tokenizer(pad="<pad>"),
            peft_config=config,
        )

    check(build, lora=False)


def test_dpo_trainer(tmp_path):
    """Two forwards a step, the second without adapters and without gradient."""
    rows = [{"prompt": f"is it {i}?", "chosen": " yes" * (1 + i % 3), "rejected": " no"} for i in range(24)]

    def build(model, checkpointing):
        args = arguments(trl.DPOConfig, tmp_path, checkpointing, bf16=False)
        tokenizer = tiny_run.tokenizer(pad="<pad>")
        return trl.DPOTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)

    check(build, without_gradient=STEPS)


@pytest.fixture
def fresh_accelerate():
    """Accelerate keeps one configuration a process, and refuses another."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_accelerator_loop():
    """``accelerator.prepare`` moves the model and puts bf16 autocast around each forward."""

    def build(model):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        with fixed_threads():
            for seed in range(2):
                batch = tiny.batch("llama", batch_size=1, seq_len=6, seed=seed)
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses += [loss.detach(), norm]
        accelerator.free_memory()
        params = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        return Trace([{**{f"loss/{i}": loss for i, loss in enumerate(losses)}, **params}])

    make_tiny = {"num_layers": 3, "dropout": 0.0}
    resident = build(make(**make_tiny))
    assert compare(resident, build(make(**make_tiny))) is None, "inconclusive"
    assert compare(resident, build(poros.prepare(make(**make_tiny), **SETTINGS))) is None
