"""The bare loop: which layer is where when, and that its replays come to what the layers give one after another.

There are no CUDA graphs on a CPU, so a stand-in runs what a graph would replay. Copies, slots, adapters and gradients
are the real ones.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from poros.evidence.engines import bare_layers
from poros.evidence.engines.base import CellRequest, Lora
from poros.evidence.engines.qlora import build_resident
from poros.evidence.engines.recorder import Recorder
from poros.evidence.engines.stream_loop import plan_visits
from poros.residency.discover import find_decoder
from tests import tiny_run

SHAPE = Path(__file__).parents[1] / "configs" / "bench" / "shapes" / "qwen3-tiny"


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
def test_no_layer_is_copied_that_is_still_there(num_slots: int) -> None:
    """Every visit finds its layer in its slot, and no copy overwrites what a visit before it still needs."""
    num_layers = 7
    content: tuple[int | None, ...] = (None,) * num_slots
    for step in range(3):
        visits, after = plan_visits(num_layers, content)
        assert [visit.layer for visit in visits] == [*range(num_layers), *reversed(range(num_layers))]
        assert [visit.backward for visit in visits] == [False] * num_layers + [True] * num_layers
        slots, last_use = list(content), [-1] * num_slots
        for position, visit in enumerate(visits):
            assert visit.load == (visit.layer not in slots)
            assert visit.after == last_use[visit.slot]
            slots[visit.slot] = visit.layer
            last_use[visit.slot] = position
        assert tuple(slots) == after
        if step:  # the turns at both ends cost no copies
            assert sum(visit.load for visit in visits) == 2 * num_layers - 2 * num_slots
        content = after


class _Graph:
    """What a CUDA graph is here: the function that it would have captured."""

    def __init__(self) -> None:
        self.replay: Callable[[], None] = lambda: None

    def pool(self) -> None: ...


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Stream:
        def wait_stream(self, _: Any) -> None: ...

    def nothing(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    def capture(layers: Any, index: int) -> Any:
        slot = captured(layers, index)

        def run(body: Callable[[], Any]) -> None:
            """A graph keeps the addresses that it was captured with; here they are bound anew."""
            layer = layers._attachment.layers[0]
            layer.bind(layers._attachment.views(index, layer), layers._attachment.window)
            parameters = bare_layers._trainable(layer.module)
            bare_layers._bind(parameters, slot.adapters)
            bare_layers._bind([parameter.grad for parameter in parameters], slot.gradients)
            body()

        slot.forward.replay = lambda: run(lambda: slot.output.copy_(layers._run_layer().detach()))
        slot.backward.replay = lambda: run(lambda: layers._run_backward(slot))
        return slot

    captured = bare_layers.ReplayedLayers._capture
    monkeypatch.setattr(bare_layers.ReplayedLayers, "_capture", capture)
    fakes: dict[str, Any] = {"CUDAGraph": _Graph, "Stream": Stream, "current_stream": Stream}
    fakes |= dict.fromkeys(("graph", "stream", "synchronize"), nothing)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with tiny_run.one_thread():
        yield


@pytest.mark.parametrize("num_slots", [1, 3])
def test_the_loop_gives_every_layer_the_gradients_of_a_plain_chain(
    num_slots: int, stand_ins: None, tmp_path: Path
) -> None:
    request = a_request(tmp_path, num_slots)
    loop = bare_layers.ReplayedLayers(request, Recorder(request))
    loop.adapters.data.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(5))
    chain = [layer for _, layer in find_decoder(build_resident(request, Recorder(request))).layers]
    for index, layer in enumerate(chain):
        bare_layers._bind(bare_layers._trainable(layer), loop.adapters.data[index].clone())
    start, incoming = loop._x.detach().clone(), loop._grad.clone()
    x = start.clone().requires_grad_()
    hidden = x
    rest = {name: value for name, value in loop._kwargs.items() if name != "hidden_states"}
    for layer in chain:
        hidden = layer(hidden, **rest)
    hidden.backward(incoming)
    expected = [
        torch.cat([p.grad.flatten() for p in bare_layers._trainable(layer) if p.grad is not None]) for layer in chain
    ]
    for _ in range(3):  # the slots begin with what the last step left
        loop._x.data.copy_(start)
        loop._grad.copy_(incoming)
        loop.gradients.zero_()
        loop.forward_and_backward()
        assert torch.equal(loop.gradients, torch.stack(expected))
        assert torch.equal(loop._grad, x.grad)


def a_request(folder: Path, num_slots: int) -> CellRequest:
    fields: dict[str, Any] = {
        "run_id": "r", "cell": "tiny/stream-loop", "number": 1, "method": "stream-loop", "module": None,
        "model": "tiny", "source": str(SHAPE), "weights": "random", "quantization": "nf4", "double_quant": True,
        "dtype": "float32", "seq_len": 16, "batch_size": 1, "accumulation": 1, "steps": 1, "warmup_steps": 0,
        "path": "fast", "lora": Lora(4, 8, 0.0, "all-linear"), "dataset": None, "seed": 1, "learning_rate": 1e-3,
        "max_grad_norm": 1.0, "device": "cpu", "attention": "sdpa", "block_size": None, "slots": num_slots,
        "resident_blocks": None, "replay": None, "options": {}, "folder": None, "cache": str(folder),
        "record": str(folder / "record.json"),
    }  # fmt: skip
    return CellRequest(**fields)
