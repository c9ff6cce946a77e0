"""The loss in chunks is the model's own, streams to the same bits, and never holds the logits of the whole batch."""

import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

import poros
from poros.errors import ConfigError, DataError, UnsupportedModelError
from poros.families import MULTIMODAL
from poros.train import trainer
from poros.train.loop import accumulate, next_token_loss, num_learnt
from tests import tiny, tiny_run
from tests.oracle import check_parity, fixed_threads

CHUNK = 7  # divides no batch here
CAP = 0.05  # the heads here make logits of about 0.2


def chunked(chunk_tokens: int = CHUNK) -> Any:
    return poros.nn.ChunkedCausalLMLoss(chunk_tokens)


def learn(model: nn.Module, batches: Sequence[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """One step of a loop of one's own: the mean over the learnt tokens of all batches."""
    count = sum(int(num_learnt(batch["labels"])) for batch in batches)
    losses = [chunked()(model, batch, num_items_in_batch=count) for batch in batches]
    for loss in losses:
        loss.backward()
    return losses


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients, taken off the model."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad(set_to_none=True)
    return found


def assert_own_loss(model: nn.Module, batches: Sequence[dict[str, torch.Tensor]], loss_fn: Any = None) -> None:
    """Value and every gradient are close to those of the model's own loss: the sums are in another order."""
    results = []
    with fixed_threads():
        for candidate in (next_token_loss, loss_fn or chunked()):
            torch.manual_seed(3)
            results.append((accumulate(model, batches, loss_fn=candidate), gradients(model)))
    (own, own_gradients), (mine, my_gradients) = results
    torch.testing.assert_close(mine, own, rtol=1e-6, atol=0)
    assert any(gradient is not None and gradient.any() for gradient in own_gradients.values())
    for name, gradient in own_gradients.items():
        assert (gradient is None) == (my_gradients[name] is None), name
        if gradient is not None:
            distance = (my_gradients[name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
            assert distance < 2e-5, f"{name}: {distance}"


# --- it is the model's own


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_value_and_gradients_are_those_of_the_families_own_loss(family: str) -> None:
    """Over two batches with different numbers of learnt tokens, in one mean."""
    cap = {"final_logit_softcapping": CAP} if family.startswith("gemma") else {}
    layers = None if family.startswith("gemma4") else 2
    model = tiny.build(family, quant=None, num_layers=layers, **cap)
    image = family in MULTIMODAL
    batches = [
        tiny.batch(family, padding="left", image=image, seed=1),
        tiny.batch(family, padding="right", batch_size=3, image=image, seed=2),
    ]
    assert_own_loss(model, batches)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text", "gemma4"])
def test_the_cap_on_the_logits_counts(family: str) -> None:
    batch = tiny.batch(family)
    losses = []
    for cap in (CAP, None):
        model = tiny.build(family, quant=None, lora=False, final_logit_softcapping=cap)
        losses.append(chunked()(model, batch))
    assert not torch.allclose(*losses, rtol=1e-4)


HEADS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "adapted": {"lora": {"target_modules": ["q_proj", "lm_head"]}},
    "adapted with magnitudes": {"lora": {"target_modules": ["q_proj", "lm_head"], "use_dora": True}},
    "adapted like the embedding": {"lora": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}},
    "saved": {"lora": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}},
    "single tokens": {
        "lora": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 4], "lm_head": [4, 5]}}
    },
    "trained": {"unfrozen": "lm_head"},
}


def with_head(head: str, **options: Any) -> Any:
    """A Llama with one of ``HEADS``."""
    settings = {**HEADS[head], **options}
    unfrozen = settings.pop("unfrozen", None)
    model = tiny.build("llama", **{"num_layers": 3, **settings})
    if unfrozen is not None:
        model.get_base_model().get_submodule(unfrozen).weight.requires_grad_(True)
    return model


with_tied_heads = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")


@with_tied_heads
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("head", HEADS)
def test_heads_that_learn_get_the_gradients_of_the_own_loss(head: str, tied: bool) -> None:
    assert_own_loss(with_head(head, tied=tied, num_layers=1, quant=None), tiny.batches("llama", 2, padding="left"))


def test_a_bias_and_a_hook_on_the_head_count() -> None:
    model = tiny.build("llama", quant=None, num_layers=1)
    head = model.get_output_embeddings()
    head.bias = nn.Parameter(torch.linspace(-1, 1, tiny.VOCAB))
    head.register_forward_hook(lambda module, args, output: output * 3)
    assert_own_loss(model, tiny.batches("llama", 1))


@pytest.mark.parametrize("chunk", [1, 47, 48, 1000])
def test_any_size_of_chunk(chunk: int) -> None:
    assert_own_loss(tiny.build("llama", quant=None, num_layers=1), tiny.batches("llama", 1), chunked(chunk))


def test_without_a_count_it_is_the_mean_over_the_batch() -> None:
    model, batch = tiny.build("llama", num_layers=1), tiny.batch("llama", padding="left")
    torch.testing.assert_close(chunked()(model, batch), model(**batch).loss, rtol=1e-6, atol=0)
    batch["labels"].fill_(-100)
    assert chunked()(model, batch).isnan()


def test_a_lower_precision_adds_a_trained_heads_gradient_in_float32() -> None:
    """In bfloat16, many small chunks would lose most of what a sum in bfloat16 gets."""
    batch = tiny.batch("llama", batch_size=8, seq_len=64)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = with_head("trained", dtype=dtype, quant=None, num_layers=1)
        with fixed_threads():
            chunked(2)(model, batch).backward()
        assert model.get_output_embeddings().weight.grad.dtype == dtype
        found.append(model.get_output_embeddings().weight.grad.float())
    assert (found[0] - found[1]).norm() / found[0].norm() < 0.02


# --- what a loop may do with it


def test_a_scaled_loss_a_retained_graph_and_no_gradients() -> None:
    model, batch = with_head("adapted"), tiny.batch("llama")
    with fixed_threads():
        loss = chunked()(model, batch)
        loss.backward(retain_graph=True)
        once = gradients(model)
        (loss * 4).backward()
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, 4 * once[name]), name  # a power of two: exact
        with torch.no_grad():
            value = chunked()(model, batch)
    assert torch.equal(value, loss)
    assert not value.requires_grad


def test_float16_keeps_small_gradients_when_the_loss_is_scaled() -> None:
    """As a GradScaler does, because float16 has no numbers below 6e-8."""
    batch = tiny.batch("llama", batch_size=2, seq_len=64)
    found = []
    for dtype, scale in ((torch.float32, 1.0), (torch.float16, 2.0**16)):
        model = tiny.build("llama", dtype=dtype, quant=None, num_layers=1)
        with fixed_threads():
            (chunked()(model, batch, num_items_in_batch=10_000_000) * scale).backward()
        found.append(torch.cat([g.float().flatten() / scale for g in gradients(model).values()]))
    assert (found[0] - found[1]).norm() / found[0].norm() < 0.02


def test_hooks_on_the_heads_parameters_run_once_on_the_whole_gradient() -> None:
    model, seen = with_head("adapted"), []
    parameter = next(p for name, p in model.named_parameters() if "lm_head.lora_B" in name)
    parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
    chunked()(model, tiny.batch("llama")).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], parameter.grad)


def test_an_adapter_that_changes_after_the_forward() -> None:
    """The head's gradients are those of the forward, whatever its adapter does by the time of the backward."""
    model, batch = with_head("adapted"), tiny.batch("llama")
    with fixed_threads():
        chunked()(model, batch).backward()
        expected = gradients(model)["base_model.model.lm_head.lora_B.default.weight"]
        loss = chunked()(model, batch)
        model.get_output_embeddings().scaling["default"] *= 5
        loss.backward()
    assert torch.equal(gradients(model)["base_model.model.lm_head.lora_B.default.weight"], expected)


# --- streamed and resident runs agree to the bit


@with_tied_heads
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("head", ["frozen", "adapted", "saved", "trained"])
def test_streamed_is_resident(head: str, tied: bool) -> None:
    """With dropout (on the head's adapter too), padding, and two batches a step."""
    lora = {**HEADS[head].get("lora", {}), "lora_dropout": 0.1}
    check_parity(
        lambda: with_head(head, tied=tied, lora=lora, num_layers=4),
        tiny.batches("llama", 4, padding="left"),
        {"slots": 2, "poison": True},
        learn=learn,
        accumulation=2,
    )


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen3_5", "gpt_oss"])
def test_streamed_is_resident_in_other_families(family: str) -> None:
    batches = tiny.batches(family, 2, padding="right", image=family in MULTIMODAL)
    check_parity(lambda: tiny.build(family, dropout=0.1), batches, {"block_size": 2, "poison": True}, learn=learn)


def test_streamed_is_resident_under_autocast() -> None:
    batches = tiny.batches("llama", 4, padding="left")
    options: dict[str, Any] = {"learn": learn, "accumulation": 2, "autocast": torch.bfloat16}
    check_parity(lambda: with_head("adapted", num_layers=4), batches, {"slots": 2, "poison": True}, **options)


# --- memory


VOCAB = 8192
ROWS, LENGTH, SMALL = 4, 64, 16
LOGITS_BYTES = ROWS * LENGTH * VOCAB * 4


def peak_bytes(step: Callable[[], None]) -> int:
    """The most memory that ``step`` held at once, by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    changes = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("head", ["frozen", "adapted"])
@pytest.mark.parametrize("stream", [False, True], ids=["resident", "streamed"])
def test_the_logits_of_the_whole_batch_never_exist(head: str, stream: bool) -> None:
    model = with_head(head, num_layers=1, quant=None, vocab_size=VOCAB)
    if stream:
        poros.prepare(model, device="cpu")
    batch = tiny.batch("llama", batch_size=ROWS, seq_len=LENGTH)
    sizes: list[int] = []
    spy = model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: sizes.append(output.numel() // VOCAB)
    )
    with fixed_threads():
        own = peak_bytes(lambda: model(**batch).loss.backward())
        assert sizes == [ROWS * LENGTH]
        sizes.clear()
        mine = peak_bytes(lambda: chunked(SMALL)(model, batch).backward())
    spy.remove()
    assert sizes == [SMALL] * (ROWS * LENGTH // SMALL)  # each once, so the backward makes none
    assert own > 2 * LOGITS_BYTES  # the logits and their gradient
    assert mine < LOGITS_BYTES / 2
    # What is as large as logits: the chunk's own, and what its loss and gradient need; then all else of the step.
    assert own - mine > (2 * ROWS * LENGTH - 5 * SMALL) * VOCAB * 4


def test_a_chunks_logits_are_gone_before_the_next_chunk_is_made() -> None:
    model = tiny.build("llama", quant=None, num_layers=1)
    alive: list[int] = []
    made: list[Any] = []

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        alive.append(sum(reference() is not None for reference in made))
        made.append(weakref.ref(output))

    model.get_output_embeddings().register_forward_hook(note)
    chunked()(model, tiny.batch("llama"))
    assert alive == [0] * 7


# --- refusals


def test_what_cannot_be_done_is_refused_by_name() -> None:
    batch = tiny.batch("llama")
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=tiny.VOCAB))
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        chunked().check(gpt2)
    bare = tiny.build("llama", lora=False, num_layers=1)
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no language-model head"):
        chunked()(bare.model, batch)
    with pytest.raises(UnsupportedModelError, match="Linear is no transformers model"):
        chunked()(nn.Linear(1, 1), batch)
    prompted = peft.get_peft_model(bare, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UnsupportedModelError, match="PromptTuningConfig"):
        chunked()(prompted, batch)


def test_a_loss_that_is_more_than_the_heads_is_refused() -> None:
    moe = tiny.build("qwen3_moe", num_layers=1, output_router_logits=True)
    with pytest.raises(UnsupportedModelError, match="output_router_logits"):
        chunked()(moe, tiny.batch("qwen3_moe"))
    model = tiny.build("llama", num_layers=1)
    model.get_base_model().loss_function = lambda **_: None
    with pytest.raises(UnsupportedModelError, match="loss function of its own"):
        chunked()(model, tiny.batch("llama"))


def test_a_head_that_learns_through_something_else_is_refused() -> None:
    model, outside = tiny.build("llama", num_layers=1), nn.Parameter(torch.ones(tiny.VOCAB))
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: output * outside)
    with pytest.raises(UnsupportedModelError, match="not one of its own parameters"):
        chunked()(model, tiny.batch("llama"))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="chunk_tokens is 0"):
        chunked(0)
    model, batch = tiny.build("llama", num_layers=1), tiny.batch("llama")
    with pytest.raises(DataError, match="logits_to_keep"):
        chunked()(model, {**batch, "logits_to_keep": 1})
    del batch["labels"]
    with pytest.raises(DataError, match="no 'labels'"):
        chunked()(model, batch)


# --- in poros train, and from afar


def test_it_is_announced_before_torch_is_imported() -> None:
    code = "import sys, poros; assert 'nn' in dir(poros) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.model_folder(tmp_path_factory.mktemp("chunked") / "model")


def train(folder: Path, model: Path, /, *options: str, output: str, **sections: dict[str, Any]) -> Any:
    data = tiny_run.write_rows(folder / "rows.jsonl", tiny_run.some_rows())
    sections["train"] = {"loss_chunk_tokens": 16, **sections.get("train", {})}
    run = tiny_run.settings(model, data, folder / output, **sections)
    return tiny_run.poros("train", tiny_run.write_settings(folder / "run.yaml", run), *options)


def adapter(folder: Path, output: str) -> bytes:
    return (folder / output / "adapter" / "adapter_model.safetensors").read_bytes()


def losses(result: Any) -> list[float]:
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stderr.splitlines() if line.startswith("step ")]
    return [float(line[3]) for line in lines if line[2] == "loss"]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")  # PEFT's, of an adapted head
def test_a_run_with_it_is_the_same_streamed_resident_and_resumed(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[int] = []
    compute = trainer.ChunkedCausalLMLoss.forward

    def spied(self: Any, model: Any, *args: Any) -> Any:
        hook = model.get_output_embeddings().register_forward_hook(lambda _, __, out: heads.append(out.shape[1]))
        try:
            return compute(self, model, *args)
        finally:
            hook.remove()

    monkeypatch.setattr(trainer.ChunkedCausalLMLoss, "forward", spied)
    adapted = {"target_modules": ["q_proj", "lm_head"], "dropout": 0.0}  # a head would draw in another order
    own = losses(train(tmp_path, model_folder, output="own", lora=adapted, train={"loss_chunk_tokens": None}))
    assert not heads
    with_eval = {"eval": str(tmp_path / "rows.jsonl")}
    streamed = train(tmp_path, model_folder, output="streamed", lora=adapted, data=with_eval, train={"eval_steps": 2})
    assert losses(streamed) == pytest.approx(own, abs=2e-4)
    assert "evaluation loss" in streamed.stderr
    assert max(heads) == 16
    losses(train(tmp_path, model_folder, output="resident", lora=adapted, model={"stream": False}))
    assert adapter(tmp_path, "streamed") == adapter(tmp_path, "resident")

    broken = tmp_path / "streamed"
    for gone in (broken / "checkpoint-3", broken / "adapter"):
        gone.rename(tmp_path / f"lost {gone.name}")
    resumed = train(tmp_path, model_folder, "--resume", output="streamed", lora=adapted)
    assert "resume from step 2" in resumed.stderr
    assert adapter(tmp_path, "streamed") == adapter(tmp_path, "resident")


def test_a_run_is_not_resumed_with_another_size_of_chunk(tmp_path: Path, model_folder: Path) -> None:
    assert train(tmp_path, model_folder, output="out", train={"steps": 1}).exit_code == 0
    result = train(tmp_path, model_folder, "--resume", output="out", train={"steps": 1, "loss_chunk_tokens": 8})
    assert result.exit_code == 2
    assert "train.loss_chunk_tokens: then 16, now 8" in result.stderr
