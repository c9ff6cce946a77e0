"""A checkpoint on disk is read exactly, and refused by name when it is damaged."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from poros.errors import CheckpointError
from poros.model import checkpoint as module
from poros.model.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, read_header
from poros.model.hub import locate

TENSORS = {
    "odd": torch.arange(3, dtype=torch.uint8),  # shifts what follows off every alignment
    "half": torch.randn(5, 7).to(torch.bfloat16),
    "single": torch.randn(4, 3),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "flags": torch.tensor([True, False, True]),
    "ids": torch.arange(6).reshape(2, 3),
}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    names = sorted(TENSORS)
    shards = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, held in shards.items():
        save_file({name: TENSORS[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_every_tensor_is_read_as_it_was_written(layout: str, request: pytest.FixtureRequest) -> None:
    checkpoint = Checkpoint(request.getfixturevalue(layout))
    assert set(checkpoint) == set(TENSORS)
    for name, expected in TENSORS.items():
        tensor = checkpoint.read(name)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
        assert tensor.data_ptr() % 16 == 0 or tensor.numel() == 0  # fresh memory, not a view into the file
        assert torch.equal(checkpoint.lazy(name)[...], expected)


def test_the_index_agrees_with_safetensors(single: Path) -> None:
    checkpoint = Checkpoint(single)
    with safe_open(single / SINGLE_FILE, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            lazy, piece = checkpoint.lazy(name), opened.get_slice(name)
            assert (lazy.get_dtype(), lazy.get_shape()) == (piece.get_dtype(), piece.get_shape())


def test_a_read_to_another_device_needs_a_bounded_buffer(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 16)
    checkpoint = Checkpoint(single)
    offsets: list[tuple[int, int]] = []
    read_into = module._read_into

    def count(payload: torch.Tensor, descriptor: int, offset: int, file: Path) -> None:
        offsets.append((offset - checkpoint["half"].offset, len(payload)))
        read_into(payload, descriptor, offset, file)

    monkeypatch.setattr(module, "_read_into", count)
    assert checkpoint.read("half", "meta").shape == (5, 7)  # the meta device stands for the GPU: it is not the CPU
    assert offsets == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 6)]


def test_a_tensor_that_is_not_there_is_named(single: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor 'nowhere'"):
        Checkpoint(single).read("nowhere")


@pytest.mark.parametrize("missing_bytes", [1, 60, 10_000])
def test_a_truncated_file_is_refused_with_its_length(single: Path, missing_bytes: int) -> None:
    file = single / SINGLE_FILE
    kept = max(3, file.stat().st_size - missing_bytes)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE} is corrupt.*{kept}.*again"):
        Checkpoint(single)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x08\0\0\0\0\0\0\0garbage!", b"\x02\0\0\0\0\0\0\0[]", b'\x0d\0\0\0\0\0\0\0{"a": {"b":1}', b"\xff" * 64],
    ids=["empty", "not-json", "not-a-map", "no-offsets", "endless-header"],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match="is corrupt: its header"):
        Checkpoint(tmp_path)


def test_a_git_lfs_pointer_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        Checkpoint(tmp_path)


def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 20)
    with pytest.raises(CheckpointError, match=r"'weight' of shape \(2, 3\) and dtype F32 has 20 bytes"):
        Checkpoint(tmp_path)


def test_a_dtype_that_torch_lacks_is_refused_when_it_is_read(tmp_path: Path) -> None:
    header = json.dumps({"weight": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(CheckpointError, match=r"'weight' in .* has dtype F4"):
        Checkpoint(tmp_path).read("weight")


def test_a_file_that_shrinks_after_it_was_indexed_is_noticed(single: Path) -> None:
    checkpoint = Checkpoint(single)
    file = single / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="before its last tensor"):
        [checkpoint.read(name) for name in checkpoint]


def test_a_missing_shard_is_named_with_a_tensor_that_is_in_it(sharded: Path) -> None:
    (sharded / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"'.*' is in b.safetensors, but that file is missing"):
        Checkpoint(sharded)


def test_a_shard_that_lacks_a_tensor_of_the_index_is_named(sharded: Path) -> None:
    held = load_file(sharded / "b.safetensors")
    del held["single"]
    save_file(held, sharded / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"'single' is in b.safetensors, but that file does not hold it"):
        Checkpoint(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["a"]}'])
def test_an_index_of_another_kind_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} is corrupt"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "way_out"),
    [
        ("adapter_model.safetensors", "load the base model"),
        ("pytorch_model.bin", "convert them to safetensors"),
        ("model.Q4_0.gguf", "gguf_file='model.Q4_0.gguf'"),
        ("notes.txt", "save_pretrained, or a model id"),
    ],
)
def test_a_folder_without_safetensors_gets_the_way_out_for_what_it_holds(
    tmp_path: Path, file: str, way_out: str
) -> None:
    (tmp_path / file).touch()
    with pytest.raises(CheckpointError, match=way_out):
        Checkpoint(tmp_path)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere.safetensors cannot be read: No such file"):
        read_header(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(model: str) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        locate(model)


def test_a_name_that_the_hub_does_not_give_says_so() -> None:
    with pytest.raises(CheckpointError, match="'no-such/model' is not a folder, and the hub does not give it"):
        locate("no-such/model")  # the tests run without network


def test_only_what_is_needed_of_a_repository_is_fetched(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        fetched.append((repository, revision, allow_patterns))
        return str(sharded)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    files = locate("some/model", "main")
    files.fetch_weights()
    assert [patterns for *_, patterns in fetched] == [
        ["config.json", "generation_config.json", INDEX_FILE],
        ["a.safetensors", "b.safetensors"],
    ]
    # The weights come from the commit that the configuration came from, whatever the branch points to by then.
    assert [revision for _, revision, _ in fetched] == ["main", sharded.name]
