"""A safetensors checkpoint on disk: an index of its tensors, and reads of exactly those that are asked for.

Nothing is mapped. A mapped view would grow the resident set with the file and is aligned to 8 bytes only, which changes
the bits of some CPU kernels; a read lands in memory that torch allocated. See https://github.com/huggingface/safetensors
for the format: eight bytes of length, a JSON header, the payload.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from poros.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_CHUNK_BYTES = 64 * 2**20  # of host memory that a read to another device passes through


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies, and what it is."""

    file: Path
    dtype: str  # as the format writes it, e.g. "BF16"
    shape: tuple[int, ...]
    offset: int  # of its first byte, from the start of the file
    num_bytes: int


class Checkpoint:
    """The tensors of one model, by name, over however many files.

    Every file's header is read and checked here, so that a missing, truncated or contradictory checkpoint is refused
    before anything is built from it.
    """

    def __init__(self, folder: Path) -> None:
        """Index the checkpoint in ``folder``; raise :class:`CheckpointError` naming the file that is at fault."""
        self.folder = folder
        self._tensors = read_header(folder / SINGLE_FILE) if (folder / SINGLE_FILE).exists() else _read_shards(folder)

    def __getitem__(self, name: str) -> TensorInfo:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"the checkpoint in {self.folder} has no tensor {name!r}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A fresh copy of one tensor on ``device``, in the dtype that the file has.

        Towards another device than the CPU it passes through 64 MiB of host memory, however large it is.
        """
        info = self[name]
        if info.dtype not in _DTYPES:
            raise CheckpointError(f"tensor {name!r} in {info.file} has dtype {info.dtype}, which cannot be loaded")
        tensor = torch.empty(info.shape, dtype=_DTYPES[info.dtype], device=device)
        if info.num_bytes == 0:
            return tensor
        payload = tensor.view(-1).view(torch.uint8)
        with open(info.file, "rb", buffering=0) as file:
            if payload.device.type == "cpu":
                _read_into(payload, file.fileno(), info.offset, info.file)
                return tensor
            staging = torch.empty(min(_CHUNK_BYTES, info.num_bytes), dtype=torch.uint8)
            for start in range(0, info.num_bytes, _CHUNK_BYTES):
                chunk = staging[: info.num_bytes - start]
                _read_into(chunk, file.fileno(), info.offset + start, info.file)
                payload[start : start + len(chunk)].copy_(chunk)
        return tensor

    def lazy(self, name: str, device: torch.device | str = "cpu") -> "LazyTensor":
        """A stand-in for the tensor that reads it when it is indexed."""
        return LazyTensor(self, name, device)


class LazyTensor:
    """A tensor that is still on disk, with the interface of the slices that ``safetensors.safe_open`` hands out."""

    def __init__(self, checkpoint: Checkpoint, name: str, device: torch.device | str) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._device = device

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._checkpoint.read(self._name, self._device)[index]

    def get_shape(self) -> list[int]:
        return list(self._checkpoint[self._name].shape)

    def get_dtype(self) -> str:
        return self._checkpoint[self._name].dtype


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors that one safetensors file holds, checked against the file's length."""
    try:
        num_bytes = file.stat().st_size
        with open(file, "rb") as stream:
            head = stream.read(8)
            header_bytes = int.from_bytes(head, "little")
            if head == b"version ":
                raise _corrupt(file, "it is a Git LFS pointer, not the file itself (`git lfs pull` fetches it)")
            if len(head) < 8 or header_bytes > min(num_bytes - 8, _MAX_HEADER_BYTES):
                raise _corrupt(file, f"its header does not fit in its {num_bytes} bytes")
            header = json.loads(stream.read(header_bytes))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _tensor_info(file, name, entry, 8 + header_bytes, num_bytes) for name, entry in entries.items()}
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(file, f"its header is not that of a safetensors file ({error!r})") from error


def _tensor_info(file: Path, name: str, entry: dict[str, Any], payload_start: int, file_bytes: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if payload_start + end > file_bytes:
        raise _corrupt(file, f"tensor {name!r} ends at byte {payload_start + end}, the file at {file_bytes}")
    dtype = _DTYPES.get(entry["dtype"])
    if begin < 0 or (dtype is not None and prod(shape) * dtype.itemsize != end - begin):
        raise _corrupt(file, f"tensor {name!r} of shape {shape} and dtype {entry['dtype']} has {end - begin} bytes")
    return TensorInfo(file, entry["dtype"], shape, payload_start + begin, end - begin)


def _read_shards(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX_FILE
    if not index.exists():
        raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}. {_what_is_there(folder)}")
    try:
        shard_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        headers = {shard: folder / shard for shard in sorted(set(shard_of.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(index, f"it is not an index of shards ({error!r})") from error
    for name, shard in shard_of.items():
        if not headers[shard].exists():
            raise CheckpointError(
                f"{index} says that tensor {name!r} is in {shard}, but that file is missing. "
                "Download the checkpoint again."
            )
    shards = {shard: read_header(file) for shard, file in headers.items()}
    tensors = {name: info for shard in shards.values() for name, info in shard.items()}
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            raise CheckpointError(
                f"{index} says that tensor {name!r} is in {shard}, but that file does not hold it. "
                "Download the checkpoint again."
            )
        tensors[name] = shards[shard][name]
    return tensors


def _what_is_there(folder: Path) -> str:
    """The way out for a folder that holds weights of another kind, or none."""
    if any(folder.glob("adapter_model.*")):
        return "It holds an adapter: load the base model that adapter_config.json names."
    if ggufs := sorted(path.name for path in folder.glob("*.gguf")):
        return f"It holds GGUF files: pass gguf_file={ggufs[0]!r}."
    if any(folder.glob("pytorch_model*.bin")):
        return "It holds pickled weights: load and save it once with transformers to convert them to safetensors."
    return "Give the folder of a model that was saved with save_pretrained, or a model id of the hub."


def _read_into(payload: torch.Tensor, descriptor: int, offset: int, file: Path) -> None:
    """Fill a contiguous uint8 CPU tensor from ``descriptor``, starting at byte ``offset``."""
    buffer = memoryview(payload.numpy().data)
    while buffer:
        count = os.preadv(descriptor, [buffer], offset)  # at most 2 GiB a call
        if count == 0:
            raise _corrupt(file, f"it ends at byte {offset}, before its last tensor does")
        buffer, offset = buffer[count:], offset + count


def _corrupt(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{file} is corrupt: {reason}. Download or save it again.")
