"""Replay: a layer's two visits recorded as graphs once, and replayed for every layer of the same form.

Launching a kernel from Python takes longer than running a small one. A recorded graph of a visit launches all of its
kernels at once, and gives the same bits.

[Note: one recording for many layers]
A graph replays over the addresses that it was recorded with. A slot has fixed addresses, so a recording belongs to a
place in the window (slot, and offset of the layer in its block). Everything else that a visit reads is copied into
*static* tensors first: the layer's inputs, its trainable parameters, the incoming gradients. What it gives is copied
out. So the layer that happened to be recorded stands in for every layer of its *form*: equal modules, with equal
attributes and byte plan, called with an equal *signature* (shapes, strides, types and everything that is no tensor).

[Note: when to record]
Recording takes as long as a few visits and some memory, and the first run of a kernel may set up its library. So a
signature is recorded when the layer that met it first meets it twice running, or for the eighth time; lengths that come
and go stay eager. Where there are more signatures than recordings are kept of, each would be recorded again and again;
so every recording that is dropped before it has paid makes the next ones wait for twice as many meetings.

[Note: random numbers]
A replay draws from the device's generator as its kernels would have: it reads the generator's state and moves it on.
So a forward needs no care, and the backward's replay starts from the state that the forward had found.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from poros.residency.casts import cast_only
from poros.residency.form import Forms
from poros.residency.layer import StreamedLayer
from poros.residency.snapshot import RandomState
from poros.residency.stage import EndToEnd, Stage, tensors_of
from poros.residency.transfer import Mark, Transfer, num_broken_recordings, return_cached_memory
from poros.residency.tree import fingerprint
from poros.residency.uses import graph_leaves

if TYPE_CHECKING:
    from poros.residency.block import Call

MAX_PROGRAMS = 64  # signatures to keep recordings of
_MAX_MET = 1024  # signatures to remember having met
_PATIENCE = 7  # meetings before a signature is recorded that does not come twice running
_WORTH_RECORDING = 1000  # replays that make up for a program's recordings
_MAX_PATIENCE = 64  # meetings
_ALIGNMENT = 16  # bytes; kernels may choose their path by it, so a less aligned input stays eager

Work = Callable[[], list[torch.Tensor]]


class Recording(Protocol):
    """Work on the device that can be done again at the same addresses."""

    def record(self, work: Work) -> list[torch.Tensor]:
        """Take down ``work``; what is returned holds its results from a replay to the next one, of any recording."""

    def replay(self) -> None:
        """Do it again, in the current stream."""


class NotReplayableError(Exception):
    """Why a layer's visits cannot be recorded. It never leaves this room."""


class Replays:
    """The recordings of one prepared model, and which visits they serve.

    Hazards handled:
        - All visits share the static tensors. A visit in another stream than the last one waits for that.
        - Recordings that are dropped may still run: the device is waited for first.
        - A recording that breaks off, of whichever model, makes all earlier ones void: they are dropped.

    Args:
        new_recording: makes an empty recording.
        transfer: tells the streams of the computation apart.
    """

    def __init__(self, new_recording: Callable[[], Recording], transfer: Transfer) -> None:
        self._new_recording = new_recording
        self._transfer = transfer
        self._lane = transfer.lane()  # in which the last replay was
        self._mark: Mark = None  # that is reached when it is over
        self._forms = Forms()
        self._stage = Stage()
        self._programs: OrderedDict[Any, Program] = OrderedDict()  # signature -> program, least used first
        self._met: dict[Any, tuple[int, int]] = {}  # signature -> index of the layer that met it first, times it did
        self._latest: dict[int, Any] = {}  # index of a layer -> the signature that it met last
        self._never: set[Any] = set()  # signatures that could not be recorded
        self._patience = _PATIENCE
        self._num_broken = num_broken_recordings()
        self.eager: dict[str, str] = {}  # layer -> why its latest visit could not be replayed
        self.replayed: set[str] = set()  # layers whose latest forward was a replay

    @property
    def num_programs(self) -> int:
        """Signatures that are recorded."""
        return len(self._programs)

    def forward(self, call: "Call", slot: int) -> tuple[list[torch.Tensor], list[bool]] | None:
        """What the layer returns and which of it is differentiable; None if this visit has to run eagerly."""
        found = self._forward(call, slot)
        if found is None:
            self.replayed.discard(call.layer.name)
        else:
            self.replayed.add(call.layer.name)
            self.eager.pop(call.layer.name, None)
        return found

    def _forward(self, call: "Call", slot: int) -> tuple[list[torch.Tensor], list[bool]] | None:
        self._drop_void()
        key = self._key(call)
        if key is None or key in self._never:
            return None
        program = self._programs.get(key)
        if program is None:
            if not self._is_met_again(key, call.layer) or not call.layer.checked:
                return None
            return_cached_memory(call.residency.device)  # of eager visits, which recordings cannot use
            program = Program(call, key, self._stage)
        with self._in_turn():
            place = self._place(program, call, slot, call.tensors)
            if place is None:
                return None
            self._remember(program)
            call.result, call.program = program.result, program
            program.load(call, call.tensors)
            program.num_replays += 1
            place.forward.replay()
            return [output.clone() for output in place.outputs], program.differentiable

    def backward(
        self, call: "Call", slot: int, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None] | None:
        """Gradients of the inputs that need one and of the parameters; None if the visit has to run eagerly."""
        self._drop_void()
        if _autocasts():  # rare: a backward inside the block differentiates under it
            return None
        program = call.program
        if program is None or self._programs.get(program.key) is not program:
            return None
        if not program.takes(grads) or not call.layer.is_as_packed():
            return None
        with self._in_turn():
            place = self._place(program, call, slot, tensors)
            if place is None:
                return None
            program.load(call, tensors)
            program.load_incoming(grads)
            with call.snapshot.random_restored():
                place.backward.replay()
            return program.gradients(place)

    def forget(self) -> None:
        """Drop all recordings."""
        self._transfer.drain()
        self._programs.clear()
        self._met.clear()
        self._latest.clear()
        self.replayed.clear()

    def _drop_void(self) -> None:
        if self._num_broken != num_broken_recordings():
            self._num_broken = num_broken_recordings()
            self._transfer.drain()
            self._programs.clear()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        lane = self._transfer.lane()
        if lane != self._lane:
            self._transfer.wait(self._mark)
            self._lane = lane
        try:
            yield
        finally:
            self._mark = self._transfer.mark()

    def _is_met_again(self, key: Any, layer: StreamedLayer) -> bool:
        """See [Note: when to record]."""
        if len(self._met) >= _MAX_MET:
            self._met.clear()
        first, times = self._met.get(key, (layer.index, 0))
        at_once = self._latest.get(layer.index) == key
        self._latest[layer.index] = key
        if first != layer.index:
            return False
        self._met[key] = first, times + 1
        return times >= self._patience or (at_once and self._patience == _PATIENCE)

    def _key(self, call: "Call") -> Any:
        """What recordings of this visit are kept under; None where there can be none."""
        obstacle = _obstacle(call)
        if obstacle is not None:
            self.eager[call.layer.name] = obstacle
            return None
        num_inputs = len(call.needs_grad)
        return (
            self._forms.number_of(call.layer, call.inventory),
            fingerprint(call.template),
            tuple(map(_signature, call.tensors[:num_inputs])),
            tuple(call.needs_grad),
            call.snapshot.kernel_choice(),
        )

    def _place(self, program: "Program", call: "Call", slot: int, tensors: Sequence[torch.Tensor]) -> "_Place | None":
        """The recordings that serve ``call`` in ``slot``; None if they cannot be made."""
        try:
            return program.place(call, slot, tensors, self._new_recording)
        except (RuntimeError, NotReplayableError) as error:
            self._never.add(program.key)
            self._programs.pop(program.key, None)
            self.eager[call.layer.name] = str(error).strip().splitlines()[0]
            return None

    def _remember(self, program: "Program") -> None:
        self._programs[program.key] = program
        self._programs.move_to_end(program.key)
        if len(self._programs) > MAX_PROGRAMS:
            self._transfer.drain()
            _, dropped = self._programs.popitem(last=False)
            if dropped.num_replays < _WORTH_RECORDING:
                self._patience = min(2 * self._patience, _MAX_PATIENCE)


class Program:
    """The visits of all layers of one form with one signature.

    Args:
        call: A forward that is about to run; its layer stands in for the others.
        key: What it is kept under.
        stage: Where its static tensors are.
    """

    def __init__(self, call: "Call", key: Any, stage: Stage) -> None:
        self.key = key
        self._stage = stage
        self._template = call.template  # alive, as the key has ids of what is in it
        num_inputs = len(call.needs_grad)
        self._needs_grad = call.needs_grad
        self._inputs = stage.like("inputs", call.tensors[:num_inputs])
        self._parameters = tensors_of(stage.like("parameters", call.tensors[num_inputs:]))
        self._parameter_grads = EndToEnd(self._parameters, stage)
        self._fixed = tensors_of(stage.like("fixed", call.trainables.fixed))
        self._incoming: list[torch.Tensor] = []  # gradients of the differentiable outputs
        self._used: list[bool] = []  # which of the inputs that need a gradient, then of the parameters, get one
        self._places: dict[tuple[int, int], _Place] = {}  # (slot, offset) -> recordings
        self.cast: list[bool] = []  # which of the parameters are used as autocast's copies only
        self.num_replays = 0
        self.result: Any = None  # template of what the layer returns
        self.differentiable: list[bool] = []

    def place(
        self, call: "Call", slot: int, tensors: Sequence[torch.Tensor], new_recording: Callable[[], Recording]
    ) -> "_Place":
        """The recordings over the place of ``call``'s layer, which is in ``slot``; made if there are none yet."""
        key = slot, call.layer.offset
        if key not in self._places:
            random = RandomState.now(call.residency.device)
            try:
                self.load(call, tensors)
                forward, backward = new_recording(), new_recording()
                outputs = forward.record(lambda: self._run_forward(call, slot))
                if not self._incoming:  # made here, as a recording would take down that they are zeroed
                    learning = [output for output, learns in zip(outputs, self.differentiable, strict=True) if learns]
                    self._incoming = tensors_of(self._stage.like("incoming", learning))
                grads = backward.record(lambda: self._run_backward(call, slot))
            finally:
                random.restore(call.residency.device)
            self._places[key] = _Place(forward, outputs, backward, grads)
        return self._places[key]

    def load(self, call: "Call", tensors: Sequence[torch.Tensor]) -> None:
        """Copy what a visit reads to where the recordings read it.

        Args:
            tensors: The visit's inputs, then its trainable parameters.
        """
        for static, tensor in zip(self._inputs, tensors, strict=False):
            static.load(tensor)
        if self._parameters:
            torch._foreach_copy_(self._parameters, [tensor.data for tensor in tensors[len(self._inputs) :]])
        if self._fixed:
            torch._foreach_copy_(self._fixed, [tensor.data for tensor in call.trainables.fixed])

    def takes(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether the recorded backward is the one that these incoming gradients need."""
        wanted = [grad for grad, differentiable in zip(grads, self.differentiable, strict=True) if differentiable]
        return all(
            grad is not None and grad.dtype == static.dtype and grad.stride() == static.stride()
            for grad, static in zip(wanted, self._incoming, strict=True)
        )

    def load_incoming(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy the gradients of the outputs to where the recordings read them."""
        wanted = [grad for grad, differentiable in zip(grads, self.differentiable, strict=True) if differentiable]
        for static, grad in zip(self._incoming, wanted, strict=True):
            assert grad is not None
            static.copy_(grad)

    def gradients(self, place: "_Place") -> list[torch.Tensor | None]:
        """Copies of what the latest backward's replay has left."""
        left = iter([*[grad.clone() for grad in place.grads], *self._parameter_grads.copies(self._used_parameters)])
        return [next(left) if used else None for used in self._used]

    @property
    def _used_parameters(self) -> list[bool]:
        return self._used[len(self._used) - len(self._parameters) :]

    def _leaves(self) -> list[torch.Tensor]:
        return [
            static.tensor.detach().requires_grad_() if needed else static.tensor
            for static, needed in zip(self._inputs, self._needs_grad, strict=True)
        ]

    @contextmanager
    def _as_recorded(self, call: "Call") -> Iterator[None]:
        """The layer of ``call`` runs with gradients, as its forward ran, over static tensors.

        A user's hooks on saved tensors are for the forward that is going on, not for what is recorded in it.
        """
        surroundings = call.snapshot.surroundings_restored(call.residency.cleanup)
        unhooked = saved_tensors_hooks(_as_it_is, _as_it_is)
        with surroundings, unhooked, torch.enable_grad(), call.fixed_in(self._fixed):
            yield

    def _run_forward(self, call: "Call", slot: int) -> list[torch.Tensor]:
        with call.bound(slot), self._as_recorded(call), call.stand_ins(self._parameters):
            outputs = call.compute(self._leaves())
        self.result = call.result
        self.differentiable = [output.requires_grad for output in outputs]
        return [output.data for output in outputs]

    def _run_backward(self, call: "Call", slot: int) -> list[torch.Tensor]:
        leaves = self._leaves()
        with call.bound(slot):
            with self._as_recorded(call), call.stand_ins(self._parameters) as stand_ins:
                outputs = call.compute(leaves)
            roots = [output for output in outputs if output.requires_grad]
            needed = [leaf for leaf, needs in zip(leaves, self._needs_grad, strict=True) if needs]
            known = {id(leaf) for leaf in (*needed, *stand_ins)}
            if any(id(leaf) not in known for leaf in graph_leaves(outputs)):
                raise NotReplayableError("it uses a tensor that learns and is neither its parameter nor its argument")
            self.cast = cast_only(outputs, stand_ins)
            with ExitStack() as stack:
                for kind in _autocasts():  # of the forward that is about to run; the backward runs outside of it
                    stack.enter_context(torch.autocast(kind, enabled=False))
                found = torch.autograd.grad(roots, [*needed, *stand_ins], self._incoming, allow_unused=True)
        self._used = [grad is not None for grad in found]
        of_parameters = found[len(needed) :]
        for static, grad in zip(self._parameter_grads.views, of_parameters, strict=True):
            if grad is not None:
                static.copy_(grad)
        return [grad for grad in found[: len(needed)] if grad is not None]


@dataclass
class _Place:
    """The recordings over one place in the window, and the tensors that hold their results after a replay."""

    forward: Recording
    outputs: list[torch.Tensor]
    backward: Recording
    grads: list[torch.Tensor]  # of the inputs that need one and get one


def _obstacle(call: "Call") -> str | None:
    """Why a visit has to run eagerly; None if nothing is in the way."""
    snapshot = call.snapshot
    if snapshot.states.hooked:
        return "a hook inside the layer"
    if call.shared:
        return "a hidden state that is used outside the layer too, or several inputs that need gradients"
    if call.num_mappings:
        return "a mapping among its arguments that it may write to"
    if call.residency.checksum:
        return "checksums"
    if not call.trainables.parameters and not any(call.needs_grad):
        return "nothing to differentiate"
    if not call.layer.is_as_packed():
        return "a frozen tensor that was replaced"
    if any(type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in call.trainables.fixed):
        return "a tensor of a kind of its own that does not stream"
    if any(tensor.data_ptr() % _ALIGNMENT for tensor in call.tensors):
        return f"an input that does not start at a multiple of {_ALIGNMENT} bytes"
    if any(tensor.device != call.residency.device for tensor in call.tensors):
        return "an input on another device"
    return None


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _autocasts() -> list[str]:
    """Types of devices for which autocast is on in this thread."""
    return [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]


def _signature(tensor: torch.Tensor) -> Any:
    return tensor.dtype, tuple(tensor.shape), tensor.stride()
