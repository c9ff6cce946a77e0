"""A large batch, visited a few rows at a time: the bits of a resident model whose layers split it in the same way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poros
from poros.residency.attach import attachment_of
from tests import oracle, tiny

ROWS = 5


def split_layers(model: nn.Module, size: int) -> None:
    """Let the resident twin do what the visits do: split each input by rows, run on the pieces, put them together."""

    def split(value: Any) -> list[Any]:
        if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == ROWS:
            return list(value.split(size))
        if isinstance(value, tuple):
            return list(zip(*map(split, value), strict=True))
        return [value] * -(-ROWS // size)

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def in_pieces(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            names = list(kwargs)
            calls = zip(split(args), *(split(kwargs[name]) for name in names), strict=True)
            return torch.cat([forward(*given, **dict(zip(names, named, strict=True))) for given, *named in calls])

        return in_pieces

    for layer in tiny.text_layers(model):
        layer.forward = wrap(layer.forward)


def make(family: str = "llama", **changes: Any) -> nn.Module:
    return tiny.build(family, **{"num_layers": 4, "dropout": 0.1, **changes})


def batches(family: str = "llama", count: int = 3, **changes: Any) -> list[dict[str, torch.Tensor]]:
    return tiny.batches(family, count, **{"batch_size": ROWS, "seq_len": 12, **changes})


def check(
    make_model: Callable[[], nn.Module], data: Any, *settings: dict[str, Any], size: int = 2, **options: Any
) -> None:
    def twin(model: nn.Module) -> None:
        model.config.use_cache = False
        split_layers(model, size)

    def prepare(model: nn.Module, **given: Any) -> nn.Module:
        model.config.use_cache = False
        return poros.prepare(model, micro_batch_size=size, **given)

    given = settings or ({"block_size": 1, "slots": 2, "poison": True}, {"block_size": 2})
    oracle.check_parity(make_model, data, *given, prepare=prepare, prepare_resident=twin, recomputed=False, **options)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "glm4", "gpt_oss", "qwen3_moe"])
def test_every_plain_family_has_the_bits_of_its_split_twin(family: str) -> None:
    check(lambda: make(family, attention_only=True), batches(family))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_pieces_of_any_size_with_a_short_last_one(size: int) -> None:
    check(make, batches(), size=size)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_rows(padding: str) -> None:
    check(make, batches(padding=padding, seq_len=24))


def test_under_autocast() -> None:
    check(make, batches(), autocast=torch.bfloat16)


def test_accumulation_over_large_batches_and_an_evaluation_in_between() -> None:
    def evaluate(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            model(**batches(seed=50 + step)[0])

    check(make, batches(count=4), accumulation=2, before_step=evaluate)


def test_hidden_states_in_the_loss() -> None:
    def learn(model: nn.Module, data: Any) -> list[torch.Tensor]:
        out = model(**data[0], output_hidden_states=True)
        loss = out.loss + sum(state.float().pow(2).mean() for state in out.hidden_states[1:-1])
        loss.backward()
        return [loss]

    check(make, batches(), learn=learn)


def test_a_batch_that_is_small_enough_is_not_split() -> None:
    data = batches()
    whole = poros.prepare(make(), device="cpu")
    split = poros.prepare(make(), device="cpu", micro_batch_size=ROWS)
    assert oracle.compare(oracle.run(whole, data), oracle.run(split, data)) is None


def test_one_transfer_serves_all_pieces() -> None:
    loads = []
    for size in (None, 1):
        model = poros.prepare(make(), device="cpu", slots=2, micro_batch_size=size)
        oracle.run(model, batches())
        loads.append(poros.report(model).num_loads)
    assert loads[0] == loads[1]


def test_products_keep_the_row_count_of_the_small_batch() -> None:
    model = poros.prepare(make(), device="cpu", micro_batch_size=2)
    seen: set[int] = set()
    forward = tiny.text_layers(model)[1].mlp.forward

    def spy(hidden_states: torch.Tensor) -> torch.Tensor:
        seen.add(hidden_states.shape[0])
        return forward(hidden_states)

    tiny.text_layers(model)[1].mlp.forward = spy
    model(**batches()[0]).loss.backward()
    assert seen == {1, 2}


def test_a_layer_that_cannot_be_split_is_named() -> None:
    model = poros.prepare(tiny.build("gemma4_text"), device="cpu", micro_batch_size=2)
    with pytest.raises(poros.ResidencyError, match=r"layers\.\d+ has .*cannot be split there"):
        model(**batches("gemma4_text")[0])


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_what_is_no_number_of_rows_is_refused(size: object) -> None:
    with pytest.raises(poros.ConfigError, match=r"micro_batch_size is .*at least 1"):
        poros.prepare(make(), device="cpu", micro_batch_size=size)


def test_it_belongs_to_the_settings() -> None:
    model = poros.prepare(make(), device="cpu", micro_batch_size=2)
    assert poros.prepare(model, micro_batch_size=2) is model
    with pytest.raises(poros.ConfigError, match="micro_batch_size=2, so not with micro_batch_size=3"):
        poros.prepare(model, micro_batch_size=3)
    assert attachment_of(model) is not None
