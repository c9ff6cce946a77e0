"""What a layer holds is remembered between visits, and every change of it is seen."""

import pytest
from torch import nn

from poros.residency.inventory import Inventory, descendants


def make() -> nn.Module:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2)))
    layer.requires_grad_(False)
    layer[1][0].weight.requires_grad_(True)
    return layer


def inventory(layer: nn.Module) -> Inventory:
    return Inventory(layer, {id(layer[0].weight), id(layer[0].bias)})


def test_finds_what_is_trainable_and_what_streams():
    layer = make()
    found = inventory(layer)
    assert found.modules[0] is layer
    assert set(found.modules) == set(layer.modules())
    assert found.num_frozen == 2
    assert [id(p) for p in found.trainables().parameters] == [id(layer[1][0].weight)]
    assert [(store is layer[1][0]._parameters, name) for store, name, _ in found.trainables().places] == [
        (True, "weight")
    ]


def replace_store(layer: nn.Module) -> None:
    layer[1][0]._parameters = dict(layer[1][0]._parameters)


def rename(layer: nn.Module) -> None:
    layer[1]._modules = {"renamed": layer[1]._modules["0"], "1": layer[1]._modules["1"]}


CHANGES = {
    "a new module": lambda layer: layer[1].append(nn.Linear(2, 2)),
    "a module less": lambda layer: layer[1].pop(1),
    "another module of the same kind": lambda layer: layer[1].__setitem__(0, nn.Linear(2, 2, bias=False)),
    "a new parameter": lambda layer: layer[1].register_parameter("extra", nn.Parameter(layer[0].bias.data)),
    "another parameter": lambda layer: setattr(layer[0], "weight", nn.Parameter(layer[0].weight.data)),
    "a parameter less": lambda layer: setattr(layer[0], "bias", None),
    "a new buffer": lambda layer: layer.register_buffer("extra", layer[0].bias.data),
    "another store": replace_store,
    "a name": rename,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_sees_a_change(change):
    layer = make()
    found = inventory(layer)
    assert found.is_current()
    assert found.is_current()
    change(layer)
    assert not found.is_current()


def test_what_is_trainable_follows_the_flags_and_an_earlier_answer_stays():
    layer = make()
    found = inventory(layer)
    before = found.trainables()
    assert found.trainables() is before
    layer[1][1].requires_grad_(True)
    layer[1][0].weight.requires_grad_(False)
    after = found.trainables()
    assert found.is_current()
    assert [id(p) for p in after.parameters] == [id(layer[1][1].weight), id(layer[1][1].bias)]
    assert [id(p) for p in before.parameters] == [id(layer[1][0].weight)]


def test_names_a_streamed_tensor_that_was_made_trainable():
    layer = make()
    found = inventory(layer)
    assert found.learning_frozen() is None
    layer[0].bias.requires_grad_(True)
    assert found.learning_frozen() == "bias"


def test_a_parameter_that_hangs_twice_has_two_places():
    layer = make()
    layer[1][1].register_parameter("again", layer[1][0].weight)
    found = inventory(layer).trainables()
    assert len(found.parameters) == 1
    assert len(found.places) == 2


def test_a_module_that_hangs_twice_is_found_once():
    layer = make()
    layer.append(layer[0])
    assert len(descendants(layer)) == len(list(layer.modules()))
