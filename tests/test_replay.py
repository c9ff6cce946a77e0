"""Visits that are recorded once and replayed give the bits of the resident run.

There are no CUDA graphs on a CPU, so a stand-in does the recorded work again and leaves its results where a graph
would. Keys, places, copies, random state and gradients are the real ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import poros
from poros.errors import ConfigError
from poros.residency import replay, transfer
from poros.residency.attach import attachment_of
from poros.residency.replay import Replays
from poros.residency.transfer import Transfer
from tests import oracle, tiny
from tests import test_parity_situations as situations

NUM_LAYERS = 5


class Operations(TorchDispatchMode):
    """Notes what is done to tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:  # which launch nothing
            self.names.append(str(function))
        return function(*args, **kwargs or {})


def operations_of(work: Callable[[], Any]) -> list[str]:
    """What ``work`` does. Other kernels may run while somebody watches, so the results are of no use."""
    with torch.random.fork_rng(devices=[]), Operations() as done:
        work()
    return done.names


class Again:
    """Does recorded work again.

    A graph does all that was done while it was recorded, so this must do no less. And what a graph leaves may be
    overwritten by the next one, so it is here.
    """

    latest: "Again | None" = None

    num_replays = 0
    num_recordings = 0

    def record(self, work: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        Again.num_recordings += 1
        self._names = operations_of(work)
        self._work, self._results, self._is_compared = work, work(), False
        return self._results

    def replay(self) -> None:
        Again.num_replays += 1
        if not self._is_compared:
            assert operations_of(self._work) == self._names
            self._is_compared = True
        for result, new in zip(self._results, self._work(), strict=True):
            result.copy_(new)
        if Again.latest not in (None, self):
            for result in Again.latest._results:
                result.fill_(float("nan") if result.is_floating_point() else 0)
        Again.latest = self


class Refused:
    """What a layer that waits for the device would do to a recording."""

    def record(self, _: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    def replay(self) -> None:
        raise AssertionError("nothing was recorded")


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    Again.num_replays = Again.num_recordings = 0
    Again.latest = None


def replayed(model: nn.Module, kind: type = Again, **settings: Any) -> nn.Module:
    model = poros.prepare(model, **{"device": "cpu", **settings})
    attachment = attachment_of(model)
    assert attachment is not None
    attachment.replays = Replays(kind, Transfer(attachment.device))
    return model


def replays_of(model: nn.Module) -> Replays:
    attachment = attachment_of(model)
    assert attachment is not None
    assert attachment.replays is not None
    return attachment.replays


def check(make: Callable[[], nn.Module], batches: Sequence[Any], *settings: Any, **options: Any) -> list[Replays]:
    """Parity with the resident run; returns the replays of each streamed run."""
    found: list[Replays] = []

    def prepare(model: nn.Module, **given: Any) -> nn.Module:
        model = replayed(model, **given)
        found.append(replays_of(model))
        return model

    oracle.check_parity(make, batches, *settings, prepare=prepare, recomputed=False, **options)
    return found


def llama(**changes: Any) -> nn.Module:
    return tiny.build("llama", **{"num_layers": NUM_LAYERS, "dropout": 0.1, **changes})


# Their layers take one hidden state and give one.
PLAIN = {"llama", "mistral", "qwen2", "qwen3", "phi3", "glm4", "gemma3_text"}
WINDOWS = [{"block_size": 1, "slots": 3, "poison": True}, {"block_size": 2, "slots": 2}]


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_every_family_has_the_same_bits(family: str) -> None:
    for replays in check(lambda: tiny.build(family, dropout=0.1), tiny.batches(family, 3), *WINDOWS):
        assert replays.num_programs or family not in PLAIN, replays.eager
    assert Again.num_replays or family not in PLAIN


def test_from_the_second_step_on_every_visit_is_a_replay() -> None:
    model = replayed(llama())
    oracle.run(model, tiny.batches("llama", 4))
    assert Again.num_replays == 2 * NUM_LAYERS * 3
    assert replays_of(model).eager == {}
    assert replays_of(model).num_programs == 2  # the first layer's input needs no gradient


def test_padding_and_accumulation() -> None:
    padding = (None, None, "left", "left", None, None)
    batches = [tiny.batch("llama", seed=i, padding=kind) for i, kind in enumerate(padding)]
    check(llama, batches, *WINDOWS, accumulation=2)
    assert Again.num_replays > 0


UNDER_AUTOCAST = [
    *(situations.around_forward, situations.without_cache, situations.around_everything),
    *(situations.switched_off_inside, situations.sum_in_one_block, situations.sum_over_two_blocks),
    *(situations.reference_in_the_block, situations.backwards_in_one_block),
]


@pytest.mark.parametrize("learn", UNDER_AUTOCAST, ids=lambda learn: learn.__name__)
def test_under_autocast(learn: Any) -> None:
    batches = tiny.batches("llama", 8, batch_size=1, seq_len=6)
    (replays,) = check(llama, batches, WINDOWS[0], learn=learn, accumulation=2)
    assert replays.num_programs
    assert Again.num_replays > 0


def test_a_users_hooks_on_saved_tensors_are_not_recorded() -> None:
    def learn(model: nn.Module, batches: Sequence[Any]) -> Sequence[torch.Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = model(**batches[0]).loss
        loss.backward()
        return (loss,)

    check(llama, tiny.batches("llama", 4), WINDOWS[0], learn=learn)
    assert Again.num_replays > 0


def test_lengths_that_come_once_stay_eager() -> None:
    lengths = (16, 16, 24, 16, 17, 24, 24, 16)
    batches = [tiny.batch("llama", seq_len=length, seed=i) for i, length in enumerate(lengths)]
    (replays,) = check(llama, batches, WINDOWS[0])
    assert replays.num_programs == 4  # of 16 and of 24 tokens, two each
    assert Again.num_replays == 2 * NUM_LAYERS * 4


def test_a_length_that_keeps_coming_back_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_PATIENCE", 3)
    batches = [tiny.batch("llama", seq_len=16 + step % 2, seed=step) for step in range(9)]
    (replays,) = check(llama, batches, WINDOWS[0])
    assert replays.num_programs == 4
    assert Again.num_replays == 2 * NUM_LAYERS * 3  # from the fourth time on


def test_a_recording_that_breaks_off_makes_the_others_void(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replayed(llama())
    oracle.run(model, tiny.batches("llama", 3))
    assert replays_of(model).num_programs == 2
    recordings = Again.num_recordings
    oracle.run(model, [tiny.batch("llama")])
    assert Again.num_recordings == recordings
    monkeypatch.setattr(transfer, "_num_broken", transfer.num_broken_recordings() + 1)
    oracle.run(model, [tiny.batch("llama")])
    assert Again.num_recordings == 2 * recordings


def test_more_lengths_than_recordings_are_kept_of_do_not_record_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_PROGRAMS", 2)
    monkeypatch.setattr(replay, "_PATIENCE", 3)
    model = replayed(tiny.build("llama", num_layers=2))
    for step in range(24):
        oracle.run(model, [tiny.batch("llama", seq_len=16 + step % 3, seed=step)])
    assert 0 < Again.num_recordings < 24  # four a step, as soon as each length has come twice, would be 84


def test_a_report_tells_what_is_replayed() -> None:
    model = replayed(llama())
    assert "recorded as CUDA graphs when a shape of input comes again" in str(poros.report(model))
    oracle.run(model, tiny.batches("llama", 3))
    report = poros.report(model)
    assert report.engine == "replay"
    assert f"replayed from CUDA graphs in {NUM_LAYERS} of {NUM_LAYERS} layers" in str(report)
    tiny.text_layers(model)[1].mlp.register_forward_hook(lambda *_: None)
    oracle.run(model, tiny.batches("llama", 1))
    report = poros.report(model)
    assert report.engine == "eager"
    assert report.replayed_layers == NUM_LAYERS - 1
    assert report.notes[-1].endswith("layers.1 not replayed: a hook inside the layer")


def test_replay_is_a_setting() -> None:
    model = poros.prepare(llama(), device="cpu")
    assert not poros.report(model).replay  # there is nothing to record on a CPU
    with pytest.raises(ConfigError, match="already prepared with replay=True, so not with replay=False"):
        poros.prepare(model, replay=False)
    with pytest.raises(ConfigError, match="replay is 'off'; it must be True or False"):
        poros.prepare(llama(), replay="off")  # type: ignore[arg-type]
    model = poros.prepare(llama(), device="cpu", replay=False)
    attachment = attachment_of(model)
    assert attachment is not None
    assert not attachment.replay


def change_dropout(model: nn.Module, step: int) -> None:
    if step == 2:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3


def scale_up(model: nn.Module, step: int) -> None:
    if step == 2:
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] *= 2


def freeze_one(model: nn.Module, step: int) -> None:
    chosen = tiny.text_layers(model)[2].self_attn.q_proj.lora_A["default"].weight
    chosen.requires_grad_(step < 2)


def listen_inside(model: nn.Module, step: int) -> None:
    if step == 2:
        tiny.text_layers(model)[3].mlp.register_forward_hook(lambda module, args, output: output * 1.5)


def evaluate(model: nn.Module, step: int) -> None:
    model.eval()
    with torch.no_grad():
        model(**tiny.batch("llama", seed=90 + step))
    model.train()


@pytest.mark.parametrize("change", [change_dropout, scale_up, freeze_one, listen_inside, evaluate])
def test_what_a_user_changes_in_between_counts(change: Callable[[nn.Module, int], None]) -> None:
    check(llama, tiny.batches("llama", 5), WINDOWS[0], before_step=change)
    assert Again.num_replays > 0


def test_two_forwards_before_their_backwards() -> None:
    def learn(model: nn.Module, pair: Sequence[Any]) -> list[torch.Tensor]:
        losses = [model(**batch).loss for batch in pair]
        (losses[0] * losses[1]).backward()
        return losses

    check(llama, tiny.batches("llama", 6), *WINDOWS, accumulation=2, learn=learn)
    assert Again.num_replays > 0


def test_a_frozen_adapter_beside_the_learning_one_is_each_layers_own() -> None:
    def make() -> nn.Module:
        model = llama()
        for name, parameter in model.named_parameters():
            if "v_proj" in name and "lora_" in name:
                parameter.requires_grad_(False)
        return model

    check(make, tiny.batches("llama", 4), WINDOWS[0])
    assert Again.num_replays > 0


def test_a_layer_with_another_attribute_has_recordings_of_its_own() -> None:
    def make() -> nn.Module:
        model = llama(dropout=0.0)
        tiny.text_layers(model)[2].input_layernorm.variance_epsilon = 0.1
        return model

    (replays,) = check(make, tiny.batches("llama", 4), WINDOWS[0])
    assert replays.num_programs == 3


def test_two_models_do_not_mix() -> None:
    batches = tiny.batches("llama", 3)
    alone = [oracle.run(llama(dropout=dropout), batches) for dropout in (0.0, 0.3)]
    both = [replayed(llama(dropout=dropout)) for dropout in (0.0, 0.3)]
    for model, reference in zip(both, alone, strict=True):
        assert oracle.compare(reference, oracle.run(model, batches)) is None
        assert replays_of(model).num_programs == 2


def test_the_pieces_of_a_split_batch_are_replayed() -> None:
    batches = tiny.batches("llama", 3, batch_size=4)
    reference = oracle.run(poros.prepare(llama(), device="cpu", micro_batch_size=2), batches)
    model = replayed(llama(), micro_batch_size=2)
    assert oracle.compare(reference, oracle.run(model, batches)) is None
    assert replays_of(model).eager == {}
    assert Again.num_replays == 2 * 2 * NUM_LAYERS * 2


def test_what_cannot_be_recorded_runs_eagerly_and_is_named() -> None:
    batches = tiny.batches("llama", 4)
    model = replayed(llama(), Refused)
    assert oracle.compare(oracle.run(llama(), batches), oracle.run(model, batches)) is None
    reasons = replays_of(model).eager
    assert "operation not permitted when stream is capturing" in reasons.values()
    assert all("\n" not in reason for reason in reasons.values())
    assert replays_of(model).num_programs == 0


def test_a_hook_inside_a_layer_is_named() -> None:
    model = replayed(llama())
    tiny.text_layers(model)[1].mlp.register_forward_hook(lambda module, args, output: output)
    oracle.run(model, tiny.batches("llama", 2))
    (name,) = replays_of(model).eager
    assert name.endswith("layers.1")
    assert replays_of(model).eager[name] == "a hook inside the layer"


def test_only_so_many_signatures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_PROGRAMS", 2)
    batches = [tiny.batch("llama", seq_len=length) for length in (16, 16, 20, 20, 16, 16)]
    (replays,) = check(llama, batches, WINDOWS[0])
    assert replays.num_programs == 2


def test_unprepare_forgets_the_recordings() -> None:
    model = replayed(llama())
    oracle.run(model, tiny.batches("llama", 2))
    attachment = attachment_of(model)
    assert attachment is not None
    poros.unprepare(model)
    assert attachment.replays is None
