"""Comparing tensors bit by bit where they are, without waiting for the device.

Two tensors are equal when all their bits are: -0.0 is not 0.0, and a NaN equals only the same NaN.

[Note: one wait]
A comparison of a step's thousands of tensors must cost neither memory nor a wait for each. So tensors are laid end to
end in pieces of bounded size, and what there is to say of a piece (how many elements differ, the first one's place, its
bits on both sides, the largest distance) stays on the device as five integers. Those of all comparisons are fetched
together. What was compared may be gone by then: the integers tell the rest.
"""

import math
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

Values = Mapping[str, Tensor | None]

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE_BYTES = 2**25  # laid end to end at a time; a larger tensor is a piece of its own


@dataclass(frozen=True)
class Element:
    """One element that differs: its index, and its value and bits on both sides."""

    index: tuple[int, ...]
    expected: float | int | bool
    found: float | int | bool
    expected_bits: str
    found_bits: str

    def __str__(self) -> str:
        return (
            f"first at {self.index}: {self.expected!r} ({self.expected_bits}) against {self.found!r} "
            f"({self.found_bits})"
        )


@dataclass(frozen=True)
class Difference:
    """The first place where two runs part."""

    step: int
    surface: str
    tensor: str
    detail: str
    element: Element | None = None  # None if the tensors are not of one shape and type

    def __str__(self) -> str:
        return f"step {self.step}, {self.surface} {self.tensor!r}: {self.detail}"


@dataclass(frozen=True)
class Verdict:
    """What a comparison found.

    Attributes:
        num_different: Elements that differ; tensors of another shape or type, or only on one side, count as one.
        tensor: Name of the first tensor that differs.
        element: Its first element that differs.
        detail: How it differs, in words.
        max_abs: Largest distance of two elements, 0.0 if there is none; not finite if one side is not.
    """

    num_different: int = 0
    tensor: str | None = None
    element: Element | None = None
    detail: str | None = None
    max_abs: float = 0.0


@dataclass
class _Piece:
    """Pairs of one type on one device, and the five integers that say how they compare."""

    orders: list[int]  # of each pair among all
    names: list[str]
    shapes: list[torch.Size]
    dtype: torch.dtype
    figures: Tensor


@dataclass
class Comparison:
    """A comparison that the device has been asked for; :func:`fetch` its ``figures`` and :meth:`read` them.

    ``a`` and ``b`` map names to tensors; None stands for a tensor that is absent.
    """

    a: Values
    b: Values
    pieces: list[_Piece] = field(init=False)

    @torch.no_grad()
    def __post_init__(self) -> None:
        self.unlike: list[tuple[int, str, str]] = []  # (order, name, what is wrong): known without the device
        self.pieces = [_piece(pairs) for pairs in _pieces(list(self._pairs()))]
        self.a = self.b = {}  # the tensors may go

    @property
    def figures(self) -> list[Tensor]:
        """Flat int64 tensors, on the devices of what was compared."""
        return [piece.figures for piece in self.pieces]

    def read(self, figures: Sequence[Sequence[int]]) -> Verdict:
        """The verdict, given the values of :attr:`figures`."""
        total, max_abs = len(self.unlike), 0.0
        first: list[tuple[int, str, Element | None, str]] = [
            (order, name, None, detail) for order, name, detail in self.unlike[:1]
        ]
        for piece, (count, at, left, right, distance) in zip(self.pieces, figures, strict=True):
            if count == 0:
                continue
            total += count
            (far,) = as_floats([distance])
            if far > max_abs or math.isnan(far):  # a NaN stays: nothing is larger
                max_abs = far
            order, name, place = _locate(piece, at, left, right)
            first.append((order, name, place, str(place)))
        if total == 0:
            return Verdict()
        _, name, element, detail = min(first, key=lambda found: found[0])
        return Verdict(total, name, element, detail, max_abs)

    def _pairs(self) -> Iterator[tuple[int, str, Tensor, Tensor]]:
        for order, name in enumerate(dict.fromkeys([*self.a, *self.b])):
            a, b = self.a.get(name), self.b.get(name)
            if name not in self.a or name not in self.b:
                self.unlike.append((order, name, f"only in the {'first' if name in self.a else 'second'} run"))
            elif a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
                if a is not b:
                    self.unlike.append((order, name, f"{_brief(a)} against {_brief(b)}"))
            elif a.numel():
                yield order, name, a, b


def fetch(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The values of flat int64 tensors; waits once for each device."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        places[tensor.device].append(index)
    found: list[list[int]] = [[]] * len(tensors)
    for indices in places.values():
        values = iter(torch.cat([tensors[index] for index in indices]).tolist())
        for index in indices:
            found[index] = [next(values) for _ in range(tensors[index].numel())]
    return found


def as_integers(values: Tensor) -> Tensor:
    """Numbers as doubles whose bits are read as int64, flat: a form that :func:`fetch` takes."""
    return values.detach().double().reshape(-1).view(torch.int64)


def as_floats(values: Sequence[int]) -> list[float]:
    """The inverse of :func:`as_integers`."""
    return list(struct.unpack(f"{len(values)}d", struct.pack(f"{len(values)}q", *values)))


def compare(a: Values, b: Values) -> Verdict:
    """Compare at once, and wait for it."""
    comparison = Comparison(a, b)
    return comparison.read(fetch(comparison.figures))


def describe_difference(a: Tensor | None, b: Tensor | None) -> str | None:
    """Where two tensors differ first and how, None if all bits are equal; they may be on two devices."""
    if a is not None and b is not None and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b.to(a.device))):
        return None
    verdict = compare({"": a}, {"": b})
    if verdict.element is None or a is None:
        return verdict.detail
    return f"{verdict.num_different} of {a.numel()} differ, {verdict.detail}"


def _pieces(pairs: list[tuple[int, str, Tensor, Tensor]]) -> Iterator[list[tuple[int, str, Tensor, Tensor]]]:
    """Cut pairs into runs of one type and device, of at most ``_PIECE_BYTES`` or of one pair."""
    kinds: dict[object, list[tuple[int, str, Tensor, Tensor]]] = defaultdict(list)
    sizes: dict[object, int] = defaultdict(int)
    for pair in pairs:
        a, b = pair[2:]
        kind, size = (a.dtype, a.device, b.device), a.numel() * a.element_size()
        if sizes[kind] and sizes[kind] + size > _PIECE_BYTES:
            yield kinds.pop(kind)
            sizes[kind] = 0
        kinds[kind].append(pair)
        sizes[kind] += size
    yield from kinds.values()


def _piece(pairs: list[tuple[int, str, Tensor, Tensor]]) -> _Piece:
    orders, names, left, right = zip(*pairs, strict=True)
    dtype, device = left[0].dtype, left[0].device
    a, b = (torch.cat([tensor.reshape(-1) for tensor in side]) for side in (left, right))
    return _Piece(list(orders), list(names), [tensor.shape for tensor in left], dtype, _weigh(a, b.to(device)))


def _weigh(a: Tensor, b: Tensor) -> Tensor:
    """See [Note: one wait]. ``a`` and ``b`` are flat, of one type, and used up."""
    left, right = _bits(a), _bits(b)
    wrong = left != right
    at = wrong.view(torch.uint8).argmax().reshape(1)  # the first of the largest
    figures = [wrong.sum().reshape(1), at, left.gather(0, at).long(), right.gather(0, at).long()]
    if a.is_floating_point() or a.is_complex():
        a, b = (side.float() if side.element_size() < 4 else side for side in (a, b))
        distance = a.sub_(b).abs_() if a.is_floating_point() else (a - b).abs()
        largest = distance.masked_fill_(wrong.logical_not_(), 0).amax()
    else:
        largest = torch.zeros((), device=a.device)
    return torch.cat([*figures, as_integers(largest)])


def _locate(piece: _Piece, at: int, left: int, right: int) -> tuple[int, str, Element]:
    """Order, name and element of the piece's element number ``at``."""
    ends = list(accumulate(shape.numel() for shape in piece.shapes))
    which = bisect_right(ends, at)
    shape, offset = piece.shapes[which], at - (ends[which - 1] if which else 0)
    index: list[int] = []
    for size in reversed(shape):
        offset, rest = divmod(offset, size)
        index.insert(0, rest)
    width = piece.dtype.itemsize
    bits = torch.tensor([left, right])
    expected, found = bits.to(_INTEGER[width]).view(piece.dtype).tolist()
    shown = [f"0x{value & (1 << 8 * width) - 1:0{2 * width}x}" for value in (left, right)]
    return piece.orders[which], piece.names[which], Element(tuple(index), expected, found, shown[0], shown[1])


def _bits(value: Tensor) -> Tensor:
    if value.dtype == torch.bool or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.contiguous().view(_INTEGER[value.element_size()])


def _brief(value: Tensor | None) -> str:
    return "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
