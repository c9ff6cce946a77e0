"""What ``poros train`` leaves, that it learns as the bare loop does, and that it stops rather than learn nothing."""

import io
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import poros
from poros.config_file import load_config
from poros.errors import PorosError
from poros.model.adapter import add_lora
from poros.train import guards, trainer
from poros.train.loop import accumulate, train_step, trainable
from poros.train.run import run
from tests import tiny_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.model_folder(tmp_path_factory.mktemp("train") / "model")


def train(folder: Path, model: Path, /, *options: str, output: str = "out", **sections: dict[str, Any]) -> Any:
    """Run ``poros train`` in this process; ``sections`` change single settings."""
    data = tiny_run.write_rows(folder / "rows.jsonl", tiny_run.some_rows())
    run = tiny_run.settings(model, data, folder / output, **sections)
    return tiny_run.poros("train", tiny_run.write_settings(folder / "run.yaml", run), *options)


def adapter(folder: Path, output: str = "out") -> bytes:
    return (folder / output / "adapter" / "adapter_model.safetensors").read_bytes()


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --- what it leaves


def test_the_adapter_loads_with_peft_alone_and_changes_the_model(tmp_path: Path, model: Path) -> None:
    result = train(tmp_path, model, train={"steps": 8})
    assert result.exit_code == 0, result.output
    assert "adapter of 8 steps saved" in result.stdout
    folder = tmp_path / "out" / "adapter"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    before = set(base.state_dict())
    ids = AutoTokenizer.from_pretrained(folder)("is it?", return_tensors="pt").input_ids
    plain = base(ids).logits.detach()
    tuned = PeftModel.from_pretrained(base, folder)
    assert not torch.equal(tuned(ids).logits, plain)
    saved = load_file(folder / "adapter_model.safetensors")
    assert len(saved) == 4 * 7 * 2  # layers, linears, two matrices
    assert all(tensor.isfinite().all() and tensor.any() for tensor in saved.values())
    assert {
        name.replace(".base_layer.", ".") for name in tuned.base_model.model.state_dict() if "lora" not in name
    } == before
    assert base.get_input_embeddings().num_embeddings == 320  # no token was added to pad with


def test_checkpoints_hold_the_adapter_and_no_base_and_older_ones_go(tmp_path: Path, model: Path) -> None:
    assert train(tmp_path, model, train={"steps": 4, "save_total_limit": 2}).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapter", "checkpoint-3", "checkpoint-4"]
    checkpoint = tree(tmp_path / "out" / "checkpoint-4")
    assert checkpoint >= {
        "adapter_model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
    }
    assert not {name for name in checkpoint if name.startswith(("model", "pytorch_model", "training_args"))}


def test_the_loss_falls_and_is_reported_with_speed_memory_and_time_left(tmp_path: Path, model: Path) -> None:
    result = train(tmp_path, model, train={"steps": 12})
    lines = [line.split() for line in result.stderr.splitlines() if line.startswith("step ")]
    losses = [float(line[3]) for line in lines]
    assert [line[1] for line in lines] == [f"{step}/12" for step in range(1, 13)]
    assert sum(losses[-3:]) < sum(losses[:3]) - 1
    assert all("tokens/s" in line and "left" in line for line in lines)


def test_a_terminal_gets_a_bar_and_is_left_as_it_was(tmp_path: Path, model: Path) -> None:
    data = tiny_run.write_rows(tmp_path / "rows.jsonl", tiny_run.some_rows())
    settings = tiny_run.write_settings(tmp_path / "run.yaml", tiny_run.settings(model, data, tmp_path / "out"))
    screen = io.StringIO()
    with tiny_run.one_thread():
        result = run(load_config(settings), console=Console(file=screen, force_terminal=True, width=120))
    assert result.num_steps == len(result.losses) == 3
    said = screen.getvalue()
    assert f"loss {result.losses[-1]:.4f}" in said
    assert "3/3" in said
    assert said.count("\x1b[?25l") == said.count("\x1b[?25h") == 1  # the cursor: hidden once, shown again once


# --- that it learns the same, wherever the base is, and as the bare loop


def test_streamed_and_resident_runs_save_the_same_bytes(tmp_path: Path, model: Path) -> None:
    assert train(tmp_path, model, output="resident", model={"stream": False}).exit_code == 0
    assert train(tmp_path, model, output="streamed", model={"block_size": 2, "slots": 1}).exit_code == 0
    assert adapter(tmp_path, "resident") == adapter(tmp_path, "streamed")


def test_evaluation_in_between_changes_no_bit(tmp_path: Path, model: Path) -> None:
    assert train(tmp_path, model, output="without").exit_code == 0
    result = train(tmp_path, model, output="with", data={"eval": str(tmp_path / "rows.jsonl")}, train={"eval_steps": 1})
    assert result.exit_code == 0, result.output
    assert result.stderr.count("evaluation loss") == 3
    assert adapter(tmp_path, "without") == adapter(tmp_path, "with")


def test_the_bare_loop_gives_the_trainers_bits(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batches from the same random state, step by step: adapters, losses and gradient norms."""
    batches: list[Any] = []
    states: list[torch.Tensor] = []
    step = trainer.AdapterTrainer.training_step

    def record(self: Any, net: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        states.append(torch.get_rng_state())
        batches.append({name: value.clone() for name, value in inputs.items()})
        return step(self, net, inputs, *args, **kwargs)

    monkeypatch.setattr(trainer.AdapterTrainer, "training_step", record)
    settings = {"schedule": "constant", "max_grad_norm": 0.5, "learning_rate": 1e-2, "accumulation": 2}
    result = train(tmp_path, model, train=settings)
    assert result.exit_code == 0, result.output

    base = poros.load(model, dtype="float32", device="cpu", stream=False)
    net = add_lora(base, rank=2, alpha=4, dropout=0.1, seed=3).train()
    optimizer = torch.optim.AdamW(trainable(net), lr=1e-2, weight_decay=0.0)
    losses = []
    for at in range(0, len(batches), 2):
        torch.set_rng_state(states[at])
        with tiny_run.one_thread():
            losses.append(train_step(net, batches[at : at + 2], optimizer, max_grad_norm=0.5).loss)
    reported = [float(line.split()[3]) for line in result.stderr.splitlines() if line.startswith("step ")]
    assert [round(loss.item(), 4) for loss in losses] == reported
    saved = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    ours = {name.replace(".default", ""): value for name, value in net.named_parameters() if value.requires_grad}
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in saved)


def test_the_loss_of_accumulated_batches_is_the_mean_over_all_their_tokens(model: Path) -> None:
    net = add_lora(poros.load(model, dtype="float32", device="cpu", quantization=None), rank=2, alpha=4).train()
    ids = torch.randint(3, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[1, 3:] = -100  # the second row has two learnt tokens, the first eight
    with tiny_run.one_thread():
        whole = accumulate(net, [{"input_ids": ids, "labels": labels}])
        split = accumulate(net, [{"input_ids": ids[i : i + 1], "labels": labels[i : i + 1]} for i in range(2)])
    torch.testing.assert_close(split, whole)


# --- that it stops


def test_a_loss_that_is_no_number_stops_the_run_and_reaches_no_adapter(tmp_path: Path, model: Path) -> None:
    result = train(tmp_path, model, train={"learning_rate": 1e30, "steps": 9, "max_grad_norm": 0.0})
    assert result.exit_code == 2
    assert "the loss of step" in result.stderr
    assert "Lower train.learning_rate" in result.stderr
    assert not (tmp_path / "out" / "adapter").exists()
    for file in (tmp_path / "out").rglob("adapter_model.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values())


def test_an_adapter_that_is_no_number_is_not_saved(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = torch.optim.AdamW.step

    def spoil(self: Any, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        self.param_groups[0]["params"][0].data.fill_(math.nan)

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    result = train(tmp_path, model)
    assert result.exit_code == 2
    assert "holds values that are no numbers, so the adapter of step 1 is not saved" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_adapter_without_a_gradient_stops_the_first_step(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/ostris/ai-toolkit/issues/1054"""
    forward = nn.Linear.forward

    def cut(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x).detach() if self.out_features == 2 else forward(self, x)  # lora_A has rank 2

    monkeypatch.setattr(nn.Linear, "forward", cut)
    result = train(tmp_path, model, model={"stream": False})
    assert result.exit_code == 2
    assert "took part in the first step but got no gradient, first base_model" in result.stderr
    assert not (tmp_path / "out").exists()


def test_gradients_that_are_all_zero_stop_the_first_step() -> None:
    net = nn.Linear(2, 2)
    with guards.modules_that_run() as ran:
        (net(torch.ones(1, 2)) * 0).sum().backward()
    assert ran == {net}
    with pytest.raises(PorosError, match="every gradient of the first step is zero"):
        guards.check_gradients(net, ran)


def test_a_module_that_takes_no_part_needs_no_gradient() -> None:
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "expert": nn.Linear(2, 2)})
    with guards.modules_that_run() as ran:
        net["used"](torch.ones(1, 2)).sum().backward()
    guards.check_gradients(net, ran)


def test_a_full_gpu_is_reported_with_what_to_lower(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nMore lines.")

    monkeypatch.setattr(trainer.AdapterTrainer, "training_step", full)
    result = train(tmp_path, model)
    assert result.exit_code == 2
    assert "memory is full: CUDA out of memory. Tried to allocate 1 GiB. Lower data.max_length" in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


# --- that it can be stopped


def interrupt_in_step_2(monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """Send Ctrl-C to this process in the first ``times`` batches of the second step."""
    step = trainer.AdapterTrainer.training_step
    sent: list[int] = []

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 1 and len(sent) < times:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(trainer.AdapterTrainer, "training_step", interrupted)


def test_the_first_ctrl_c_ends_the_step_and_the_run_resumes_to_the_same_bits(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare = {"steps": 4, "save_steps": 50}
    before = signal.getsignal(signal.SIGINT)  # ignored, in a job that a shell has started in the background
    assert train(tmp_path, model, output="whole", train=rare).exit_code == 0
    with monkeypatch.context() as patch:
        interrupt_in_step_2(patch, times=1)
        result = train(tmp_path, model, train=rare)
    assert result.exit_code == 130
    assert "Stopping after this step, with a checkpoint." in result.stderr
    assert "checkpoint-2 holds everything up to step 2. Go on from it with --resume." in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "out" / "adapter").exists()
    assert signal.getsignal(signal.SIGINT) is before
    assert train(tmp_path, model, "--resume", train=rare).exit_code == 0
    assert adapter(tmp_path) == adapter(tmp_path, "whole")


def test_the_second_ctrl_c_stops_at_once_and_says_what_is_on_the_disk(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_in_step_2(monkeypatch, times=2)
    result = train(tmp_path, model)
    assert result.exit_code == 130
    assert "checkpoint-1 holds everything up to step 1. Go on from it with --resume." in result.stderr
    assert "Traceback" not in result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-1"]


def test_ctrl_c_while_the_model_loads_says_that_nothing_was_saved(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(poros, "load", interrupted, raising=False)
    result = train(tmp_path, model)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == f"Interrupted. Nothing was saved in {tmp_path / 'out'}."
    assert not (tmp_path / "out").exists()


def test_overwrite_deletes_the_earlier_run_and_nothing_else(tmp_path: Path, model: Path) -> None:
    assert train(tmp_path, model, train={"steps": 3}).exit_code == 0
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert train(tmp_path, model, "--overwrite", train={"steps": 1}).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapter", "checkpoint-1", "notes.txt"]
