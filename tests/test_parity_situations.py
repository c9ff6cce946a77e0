"""Whatever people do around a prepared model in training, the bits stay the resident run's.

Llama mostly, with five layers, so that blocks of two leave a short last one and two slots are always too few.
"""

import copy
import gc
import warnings

import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

import poros
from tests import tiny
from tests.oracle import check_parity, count_layer_runs, run

WINDOWS = ({"slots": 2, "poison": True}, {"block_size": 2, "slots": 2, "poison": True})
STEPS = 3


def make(**options):
    return tiny.build("llama", **{"num_layers": 5, "dropout": 0.1, **options})


def parity(make_model=make, *, count=STEPS, batches=None, settings=WINDOWS, **options):
    return check_parity(make_model, batches or tiny.batches("llama", count, padding="right"), *settings, **options)


def evaluate(model, batch):
    """A validation pass as every trainer does it."""
    training = model.training
    model.eval()
    with torch.no_grad():
        loss = model(**batch).loss
    model.train(training)
    return loss


# ---------------------------------------------------------------------------------------------------------------------
# Forwards, backwards and their order
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulation(accumulation):
    parity(count=2 * accumulation, accumulation=accumulation)


def backward_of_the_sum(model, pair):
    first, second = (model(**batch).loss for batch in pair)
    (first + second).backward()
    return first, second


def backward_in_reverse_order(model, pair):
    losses = [model(**batch).loss for batch in pair]
    for loss in reversed(losses):
        loss.backward()
    return losses


def a_forward_is_dropped(model, pair):
    dropped = model(**pair[0]).loss
    value = dropped.detach()
    del dropped
    kept = model(**pair[1]).loss
    kept.backward()
    return value, kept


def evaluation_between(model, pair):
    loss = model(**pair[0]).loss
    validation = evaluate(model, pair[1])
    loss.backward()
    return loss, validation


def inference_mode_between(model, pair):
    """Tensors made in inference mode must not get into anything that autograd sees later."""
    loss = model(**pair[0]).loss
    with torch.inference_mode():
        validation = model(**pair[1]).loss
    loss.backward()
    return loss, validation.clone()


def inference_mode_first(model, pair):
    with torch.inference_mode():
        validation = model(**pair[1]).loss
    loss = model(**pair[0]).loss
    loss.backward()
    return loss, validation.clone()


def only_some_gradients(model, pair):
    """The backward stops at the lowest layer that was asked for."""
    loss = model(**pair[0]).loss
    wanted = [(n, p) for n, p in model.named_parameters() if p.requires_grad and ".layers.3." in n]
    gradients = torch.autograd.grad(loss, [p for _, p in wanted])
    model(**pair[1]).loss.backward()
    return loss, *gradients


def reference_between(model, pair):
    """A preference loss: the reference is the same model without its adapters."""
    chosen = model(**pair[0]).logits.mean()
    with torch.no_grad(), model.disable_adapter():
        reference = model(**pair[0]).logits.mean()
    rejected = model(**pair[1]).logits.mean()
    loss = -nn.functional.logsigmoid(chosen - rejected - reference)
    loss.backward()
    return loss, reference


def reference_with_gradients_on(model, pair):
    """Nothing requires a gradient in it, but nobody switched gradients off."""
    with model.disable_adapter():
        reference = model(**pair[0]).loss
    loss = model(**pair[1]).loss
    (loss - reference.detach()).backward()
    return loss, reference


def backward_twice(model, pair):
    loss = model(**pair[0]).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return (loss,)


def gradients_asked_for(model, pair):
    loss = model(**pair[0]).loss
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    return (loss,)


def mode_flips_before_backward(model, pair):
    """The recompute must drop what the forward dropped, in whatever mode the model is by then."""
    loss = model(**pair[0]).loss
    model.eval()
    loss.backward()
    second = model(**pair[1]).loss  # without dropout
    model.train()
    second.backward()
    return loss, second


def generation_between(model, pair):
    model.eval()
    tokens = model.generate(
        pair[0]["input_ids"], attention_mask=pair[0]["attention_mask"], max_new_tokens=4, do_sample=False
    )
    model.train()
    loss = model(**pair[1]).loss
    loss.backward()
    return loss, tokens


def adapters_are_off_by_then(model, pair):
    """The recompute must have them on, as the forward had, and leave them off."""
    layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
    loss = model(**pair[0]).loss
    for layer in layers:
        layer._disable_adapters = True
    loss.backward()
    assert all(layer.disable_adapters for layer in layers)
    for layer in layers:
        layer._disable_adapters = False
    return (loss,)


TWICE = [
    backward_of_the_sum,
    backward_in_reverse_order,
    mode_flips_before_backward,
    gradients_asked_for,
]
OFTEN = [
    a_forward_is_dropped,
    evaluation_between,
    inference_mode_between,
    inference_mode_first,
    only_some_gradients,
    reference_between,
    reference_with_gradients_on,
    backward_twice,
    generation_between,
    adapters_are_off_by_then,
]


@pytest.mark.parametrize("learn", [*TWICE, *OFTEN], ids=lambda learn: learn.__name__)
def test_order_of_forwards_and_backwards(learn):
    parity(count=2 * STEPS, accumulation=2, learn=learn, recomputed=learn in TWICE)


def test_anomaly_detection():
    def learn(model, batches):
        with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():
            loss = model(**batches[0]).loss
            loss.backward()
        return (loss,)

    parity(lambda: make(num_layers=3), count=2, learn=learn, settings=WINDOWS[:1])


def test_two_prepared_models_in_turn():
    """Forward A, forward B, backward A, backward B, in one process."""

    def make_two():
        model = make()
        model.__dict__["other"] = make(seed=1)
        return model

    def prepare_two(model, **settings):
        poros.prepare(model.other, **settings)
        return poros.prepare(model, **settings)

    def learn(model, pair):
        losses = [owner(**batch).loss for owner, batch in zip((model, model.other), pair, strict=True)]
        for loss in losses:
            loss.backward()
        others = [p for p in model.other.parameters() if p.requires_grad]
        gradients = torch.cat([p.grad.flatten() for p in others])
        assert gradients.any()
        with torch.no_grad():
            for p in others:
                p -= 0.01 * p.grad
                p.grad = None
        return *losses, gradients

    parity(make_two, count=2 * STEPS, accumulation=2, learn=learn, prepare=prepare_two)


# ---------------------------------------------------------------------------------------------------------------------
# Autocast
# ---------------------------------------------------------------------------------------------------------------------


def autocast(**options):
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


def around_forward(model, batches):
    with autocast():
        loss = model(**batches[0]).loss
    loss.backward()
    return (loss,)


def without_cache(model, batches):
    with autocast(cache_enabled=False):
        loss = model(**batches[0]).loss
    loss.backward()
    return (loss,)


def around_everything(model, batches):
    with autocast():
        loss = model(**batches[0]).loss
        loss.backward()
    return (loss,)


def switched_off_inside(model, batches):
    with autocast(), autocast(enabled=False):
        loss = model(**batches[0]).loss
    loss.backward()
    return (loss,)


@pytest.mark.parametrize(
    "learn", [around_forward, without_cache, around_everything, switched_off_inside], ids=lambda learn: learn.__name__
)
def test_autocast(learn):
    batches = tiny.batches("llama", 2, batch_size=1, seq_len=6)
    parity(lambda: make(num_layers=3), batches=batches, learn=learn, settings=WINDOWS[:1])


def sum_in_one_block(model, pair):
    """Autocast keeps one bf16 copy of each adapter for both forwards, so their gradients meet in bf16."""
    with autocast():
        losses = [model(**batch).loss for batch in pair]
    sum(losses).backward()
    return losses


def sum_over_two_blocks(model, pair):
    losses = []
    for batch in pair:
        with autocast():
            losses.append(model(**batch).loss)
    sum(losses).backward()
    return losses


def reference_in_the_block(model, pair):
    with autocast():
        chosen = model(**pair[0]).loss
        with torch.no_grad(), model.disable_adapter():
            reference = model(**pair[0]).loss
        rejected = model(**pair[1]).loss
        loss = chosen - 0.5 * rejected - reference
    loss.backward()
    return loss, reference


def backwards_in_one_block(model, pair):
    losses = []
    with autocast():
        for batch in pair:
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss)
    return losses


@pytest.mark.parametrize(
    "learn",
    [sum_in_one_block, sum_over_two_blocks, reference_in_the_block, backwards_in_one_block],
    ids=lambda learn: learn.__name__,
)
def test_two_forwards_under_autocast(learn):
    batches = tiny.batches("llama", 4, batch_size=1, seq_len=6)
    recomputed = learn is not reference_in_the_block
    parity(
        lambda: make(num_layers=3),
        batches=batches,
        accumulation=2,
        learn=learn,
        settings=WINDOWS[:1],
        recomputed=recomputed,
    )


def test_autocast_is_switched_off_inside_one_layer():
    """A module that insists on full precision, as some norms and routers do."""

    def make_stubborn():
        model = make(num_layers=3)
        mlp = tiny.text_layers(model)[1].mlp
        forward = mlp.forward

        def full_precision(x):
            with autocast(enabled=False):
                return forward(x.float())

        mlp.forward = full_precision
        return model

    batches = tiny.batches("llama", 2, batch_size=1, seq_len=6)
    parity(make_stubborn, batches=batches, learn=around_forward, settings=WINDOWS[:1])


# ---------------------------------------------------------------------------------------------------------------------
# Inputs and outputs
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["left", "right", None])
def test_padding(padding):
    parity(batches=tiny.batches("llama", STEPS, padding=padding))


@pytest.mark.parametrize(
    "shape", [(1, 1), (2, 1), (1, 2), (3, 16), (2, 300)], ids=lambda shape: "x".join(map(str, shape))
)
def test_numbers_of_tokens(shape):
    """4-bit kernels are chosen by it."""
    batch_size, seq_len = shape

    def learn(model, batches):
        loss = model(input_ids=batches[0]["input_ids"]).logits.square().mean()
        loss.backward()
        return (loss,)

    batches = tiny.batches("llama", 2, batch_size=batch_size, seq_len=seq_len)
    lora = {
        "target_modules": ["v_proj", "o_proj", "up_proj"]
    }  # one token attends to itself alone, whatever q and k say
    parity(lambda: make(lora=lora, num_layers=3), batches=batches, learn=learn, settings=WINDOWS[:1])


def test_packed_sequences():
    """Several samples in a row, told apart by their positions."""
    batches = tiny.batches("llama", STEPS)
    for batch in batches:
        batch["position_ids"] = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, 24)
    parity(batches=batches)


def test_changing_an_adapter_before_its_backward_is_an_error():
    """As it is when resident: autograd sees that what it kept was changed in place."""
    for model in (make(), poros.prepare(make(), device="cpu")):
        loss = model(**tiny.batch("llama")).loss
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "layers.2" in name and "lora_A" in name:
                    parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("use_cache", [True, False])
def test_key_value_cache_in_training(use_cache):
    """On by default in transformers; a recompute must not write to it a second time."""

    def learn(model, batches):
        loss = model(**batches[0], use_cache=use_cache).loss
        loss.backward()
        return (loss,)

    parity(learn=learn)


@pytest.mark.parametrize("learning", [False, True])
def test_embeddings_given(learning):
    """``inputs_embeds`` in place of ids; with ``learning`` their gradient is part of what must agree."""

    def learn(model, batches):
        batch = dict(batches[0])
        embeds = model.get_input_embeddings()(batch.pop("input_ids")).requires_grad_(learning)
        loss = model(**batch, inputs_embeds=embeds).loss
        loss.backward()
        return (loss, embeds.grad) if learning else (loss,)

    parity(learn=learn)


def test_embeddings_made_to_require_gradients():
    def make_kbit():
        model = make()
        model.enable_input_require_grads()
        return model

    parity(make_kbit)


def with_hidden_states(*in_the_loss):
    def learn(model, batches):
        out = model(**batches[0], output_hidden_states=True)
        loss = sum((out.hidden_states[i].square().mean() for i in in_the_loss), out.loss)
        loss.backward()
        return (loss, *out.hidden_states)

    return learn


def test_hidden_states():
    """All of them equal; the last, which no layer reads, may be part of the loss."""
    parity(learn=with_hidden_states(-1))


@pytest.mark.parametrize("taken", [(0,), (2,), (1, 2, 4)], ids=str)
def test_hidden_states_between_layers_are_part_of_the_loss(taken):
    """The gradients of such a state's uses, inside and outside a layer, add up in the resident order."""
    parity(learn=with_hidden_states(*taken))


def test_a_hook_takes_the_hidden_state_into_the_loss():
    def learn(model, batches):
        taken = []
        layer = tiny.text_layers(model)[2]
        hooks = [
            layer.register_forward_pre_hook(lambda module, args: taken.append(args[0])),
            layer.register_forward_hook(lambda module, args, output: taken.append(output)),
        ]
        loss = model(**batches[0]).loss + taken[0].square().mean() + taken[1].square().mean()
        loss.backward()
        for hook in hooks:
            hook.remove()
        return (loss,)

    parity(learn=learn)


@pytest.mark.parametrize("tied", [True, False])
def test_loss_that_reads_the_head_without_calling_it(tied):
    """As fused and chunked cross-entropies do: they call the backbone and take ``lm_head.weight``."""

    def learn(model, batches):
        batch = dict(batches[0])
        labels = batch.pop("labels")
        hidden = model.get_base_model().model(**batch).last_hidden_state
        logits = hidden @ model.get_output_embeddings().weight.T
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        return (loss,)

    parity(lambda: make(tied=tied), learn=learn)


def test_batch_without_a_trainable_token():
    """All labels masked: NaN loss and NaN gradients, the same ones."""
    batches = tiny.batches("llama", STEPS)
    batches[1]["labels"].fill_(-100)
    trace = parity(batches=batches, idle_steps=[1])
    assert trace.surface("loss", 1)["0"].isnan()


# ---------------------------------------------------------------------------------------------------------------------
# What is trained
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [[0], [4], [1, 3], [2]], ids=str)
def test_adapters_in_some_layers(layers):
    lora = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": layers, "layers_pattern": "layers"}
    parity(lambda: make(lora=lora))


def test_blocks_below_the_first_adapter_are_not_loaded_for_backward():
    def loads_a_step(layers):
        lora = {"target_modules": ["q_proj"], "layers_to_transform": layers, "layers_pattern": "layers"}
        model = poros.prepare(make(lora=lora, num_layers=7), slots=2, device="cpu")
        batches = tiny.batches("llama", 4)
        run(model, batches[:2])
        before = poros.report(model).num_loads
        run(model, batches[2:])
        return (poros.report(model).num_loads - before) / 2

    # The two slots still hold blocks 5 and 6 at the turn, so the backward loads nothing, and the forward all seven.
    assert loads_a_step([5, 6]) == 7
    # With an adapter in the first layer all seven pass twice; each turn saves the two that are there.
    assert loads_a_step([0]) == 10


def test_some_adapters_are_frozen():
    def make_partly():
        model = make()
        for name, parameter in model.named_parameters():
            if ".layers.1." in name or "lora_A" in name:
                parameter.requires_grad_(False)
        return model

    parity(make_partly)


def test_norms_are_trained():
    def make_norms():
        model = make()
        for name, parameter in model.named_parameters():
            if "layernorm" in name or name.endswith("norm.weight"):
                parameter.requires_grad_(True)
        return model

    reference = parity(make_norms)
    assert "base_model.model.model.layers.3.input_layernorm.weight" in reference.surface("grad")


def test_biases_of_the_base_are_trained():
    parity(
        lambda: tiny.build("qwen2", num_layers=5, lora={"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}),
        batches=tiny.batches("qwen2", STEPS),
    )


def test_full_training_of_one_layer():
    """An unquantised layer with nothing frozen in it, between streamed ones."""

    def make_unfrozen():
        model = make(quant=None)
        tiny.text_layers(model)[2].requires_grad_(True)
        return model

    parity(make_unfrozen)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("saved", "options"),
    [
        (["lm_head"], {}),
        (["lm_head"], {"tied": True}),
        (["embed_tokens", "lm_head"], {}),
        (["embed_tokens", "lm_head"], {"tied": True, "lora": {"ensure_weight_tying": True}}),
    ],
    ids=["head", "head of a tied pair", "both", "tied copies"],
)
def test_modules_to_save(saved, options):
    lora = {"target_modules": ["q_proj", "up_proj"], "modules_to_save": saved, **options.pop("lora", {})}
    parity(lambda: make(lora=lora, **options))


def test_tied_embeddings_stay_tied():
    model = poros.prepare(make(tied=True), device="cpu")
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    parity(lambda: make(tied=True))


@pytest.mark.parametrize("kind", ["dora", "ia3", "head", "trainable tokens"])
def test_kinds_of_adapters(kind):
    def make_kind():
        if kind == "dora":
            # On a CPU, PEFT replaces each 4-bit weight by an alias in every forward.
            return make(lora={"use_dora": True, "target_modules": ["q_proj", "down_proj"]})
        if kind == "head":
            return make(lora={"target_modules": ["q_proj", "lm_head", "embed_tokens"]}, tied=False)
        if kind == "trainable tokens":
            return make(lora={"target_modules": ["q_proj"], "trainable_token_indices": [3, 4, 5, 6]})
        config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
        model = peft.get_peft_model(make(lora=False), config)
        with torch.no_grad():
            for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
                parameter.mul_(1 + 0.01 * i)
        return model

    parity(make_kind)


def test_prompt_tuning():
    """The gradient crosses all layers, none of which owns anything trainable."""

    def make_prompt():
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        torch.manual_seed(0)
        return peft.get_peft_model(make(lora=False), config)

    parity(make_prompt)


# ---------------------------------------------------------------------------------------------------------------------
# Around prepare: k-bit preparation, checkpointing, casts
# ---------------------------------------------------------------------------------------------------------------------

TINY_BF16 = {"dtype": torch.bfloat16, "num_layers": 3}


def kbit(model, checkpointing=False):
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # it freezes everything, as it is meant to run before the adapters come
            parameter.requires_grad_(True)
    return model


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_kbit_preparation(when, checkpointing):
    """It casts norms, embedding and head to fp32; afterwards that must neither be undone nor reach packed bytes."""

    def prepare(model, **settings):
        if when == "before":
            return poros.prepare(kbit(model, checkpointing), **settings)
        return kbit(poros.prepare(model, **settings), checkpointing)

    def resident(model):
        kbit(model)
        if checkpointing:  # comes with it
            model.enable_input_require_grads()

    batches = tiny.batches("llama", 2, batch_size=1, seq_len=4)
    parity(lambda: make(**TINY_BF16), batches=batches, prepare=prepare, prepare_resident=resident)


@pytest.mark.parametrize("reentrant", [False, True, None], ids=["non-reentrant", "reentrant", "default"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_gradient_checkpointing(when, reentrant):
    """No layer runs a third time, and the bits are those of the resident run without checkpointing."""

    def switch_on(model):
        kwargs = None if reentrant is None else {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(kwargs)
        return model

    def prepare(model, **settings):
        if when == "before":
            return poros.prepare(switch_on(model), **settings)
        return switch_on(poros.prepare(model, **settings))

    def make_for_checkpointing():
        model = make()
        model.enable_input_require_grads()
        return model

    parity(make_for_checkpointing, prepare=prepare)


def test_gradient_checkpointing_switched_on_and_off_on_the_way():
    def prepare(model, **settings):
        model = poros.prepare(model, **settings)
        model.gradient_checkpointing_enable()
        model.gradient_checkpointing_disable()
        return model

    parity(prepare=prepare)


def test_adapters_are_cast_after_prepare():
    """As TRL does to the adapters of a quantised model."""

    def cast(model):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
        return model

    batches = tiny.batches("llama", 2, batch_size=1, seq_len=4)
    parity(
        lambda: make(**TINY_BF16),
        batches=batches,
        settings=WINDOWS[:1],
        prepare=lambda model, **settings: cast(poros.prepare(model, **settings)),
        prepare_resident=cast,
    )


@pytest.mark.parametrize(
    ("make_optimizer", "max_grad_norm"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0),
        (lambda p: torch.optim.AdamW(p, lr=5e-3, foreach=True), 1.0),
        (lambda p: torch.optim.AdamW(p, lr=5e-3, fused=True), 0.01),
    ],
    ids=["sgd", "foreach", "fused, always clipped"],
)
def test_optimizers(make_optimizer, max_grad_norm):
    parity(make_optimizer=make_optimizer, max_grad_norm=max_grad_norm)


# ---------------------------------------------------------------------------------------------------------------------
# Adapters that come and go
# ---------------------------------------------------------------------------------------------------------------------


def add_second(model):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = copy.deepcopy(model.peft_config["default"])
        config.r = 2
        model.add_adapter("second", config)
        tiny.randomise_lora_b(model)
    return model


def parity_of_change(change, **options):
    """``change`` is done to both models, to the streamed one after ``prepare``."""
    return parity(
        prepare=lambda model, **settings: change(poros.prepare(model, **settings)), prepare_resident=change, **options
    )


def test_second_adapter_is_added():
    parity_of_change(add_second)


def test_second_adapter_is_added_and_switched_to():
    def change(model):
        add_second(model).set_adapter("second")
        return model

    reference = parity_of_change(change)
    assert all("second" in name for name in reference.surface("grad"))


def test_adapters_are_switched_between_steps():
    def before_step(model, step):
        model.set_adapter("second" if step % 2 else "default")

    def make_two():
        model = add_second(make())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)  # so that the optimizer learns of both
        return model

    parity(make_two, before_step=before_step, count=5)


def test_first_adapter_is_deleted():
    def change(model):
        add_second(model).set_adapter("second")
        model.delete_adapter("default")
        return model

    parity_of_change(change)


def test_adapter_is_loaded(tmp_path):
    source = make(seed=3)
    source.save_pretrained(tmp_path)

    def change(model):
        model.load_adapter(str(tmp_path), "loaded", is_trainable=True)
        model.set_adapter("loaded")
        return model

    reference = parity_of_change(change)
    wanted = dict(source.named_parameters())["base_model.model.model.layers.2.self_attn.q_proj.lora_B.default.weight"]
    change(model := poros.prepare(make(), device="cpu"))
    loaded = model.get_submodule("base_model.model.model.layers.2.self_attn.q_proj.lora_B.loaded").weight
    assert torch.equal(wanted, loaded)
    assert all("loaded" in name for name in reference.surface("grad"))


def test_both_adapters_at_once():
    def change(model):
        model = add_second(model)
        model.base_model.set_adapter(["default", "second"])
        return model

    reference = parity_of_change(change)
    assert {name.split(".")[-2] for name in reference.surface("grad")} == {"default", "second"}


# ---------------------------------------------------------------------------------------------------------------------
# Hooks
# ---------------------------------------------------------------------------------------------------------------------


def test_noise_on_the_embeddings():
    """NEFTune, as TRL does it."""

    def make_noisy():
        model = make()

        def noise(module, args, output):
            return output + 0.05 * torch.empty_like(output).uniform_(-1, 1) if module.training else output

        model.get_input_embeddings().register_forward_hook(noise)
        return model

    parity(make_noisy)


def test_work_between_the_layers():
    """A model may add something to the stream after some layers (DeepStack does); so may a hook."""

    def make_deep():
        model = make()
        for i, layer in enumerate(list(tiny.text_layers(model))[:3]):
            visual = torch.full((1, 1, 128), 0.1 * (i + 1))
            layer.register_forward_hook(lambda module, args, output, visual=visual: output + visual)
        return model

    parity(make_deep)


def test_hooks_on_inner_modules():
    def make_hooked():
        model = make()
        layers = tiny.text_layers(model)
        layers[1].self_attn.q_proj.register_forward_hook(lambda module, args, output: output * 1.5)
        layers[2].mlp.register_forward_pre_hook(lambda module, args: (args[0] - 0.1,))
        layers[3].register_forward_pre_hook(lambda module, args: (args[0] * 0.9, *args[1:]))
        return model

    parity(make_hooked)


def test_backward_hooks_on_a_layer():
    def make_hooked():
        model = make()
        layer = tiny.text_layers(model)[2]
        layer.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5, *grad_in[1:]))
        layer.register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 2.0,))
        return model

    parity(make_hooked)


def test_gradient_hooks_on_adapters_run_once():
    calls = []

    def make_hooked():
        model = make()
        calls.clear()
        for name, parameter in model.named_parameters():
            if ".layers.2." in name and "lora_B" in name:

                def halve(grad, name=name):
                    calls.append(("hook", name))
                    return grad * 0.5

                def count(parameter, name=name):
                    calls.append(("accumulated", name))

                parameter.register_hook(halve)
                parameter.register_post_accumulate_grad_hook(count)
        return model

    parity(make_hooked)
    assert len(calls) == STEPS * 2 * 7


def test_optimizer_in_the_backward():
    """A step taken where the gradient is accumulated, before the layers below have run backward."""

    def make_fused():
        model = make()
        for parameter in model.parameters():
            if parameter.requires_grad:

                def step(p):
                    p.data.add_(p.grad, alpha=-0.1)

                parameter.register_post_accumulate_grad_hook(step)
        return model

    parity(make_fused)


def test_saved_tensor_hooks():
    """Offloading what autograd keeps: the inputs of the layers pass through, unchanged."""

    def learn(model, batches):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = model(**batches[0]).loss
        loss.backward()
        return (loss,)

    parity(learn=learn)


# ---------------------------------------------------------------------------------------------------------------------
# What a step leaves behind
# ---------------------------------------------------------------------------------------------------------------------


def test_each_layer_runs_exactly_twice_a_step():
    model = poros.prepare(make(), device="cpu")
    with count_layer_runs(model) as runs:
        model(**tiny.batch("llama")).loss.backward()
        assert runs == [2] * 5
        evaluate(model, tiny.batch("llama"))
        assert runs == [3] * 5


def test_a_dropped_graph_is_freed():
    model = poros.prepare(make(), device="cpu")
    batch = tiny.batch("llama")

    def live_tensors():
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    model(**batch).loss.backward()
    before = live_tensors()
    for _ in range(3):
        loss = model(**batch).loss
        del loss
    assert live_tensors() <= before
