"""Loading takes the store and two blocks of host memory, and a model that does not fit is refused before it is read."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import poros
from poros.errors import ConfigError
from poros.model import build, options
from poros.model.memory import HostMemory, read_host_memory, require_host_memory
from poros.units import parse_bytes
from tests import checkpoints
from tests.checkpoints import one_thread  # noqa: F401

MIB = 2**20


def save_large(folder: Path, *, hidden_size: int, num_layers: int, dtype: torch.dtype) -> int:
    """Save a model of many layers in small shards; return the bytes of its weights."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM._from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="32MB")
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def memory(kind: str) -> int:
    """``VmRSS`` or ``VmHWM`` (its peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind)).split()[1]) * 1024


def growth_of_the_peak(work: Any) -> int:
    """How far the resident set rises, at its highest, above where it was before ``work``."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def test_the_peak_is_the_store_and_two_blocks_whatever_the_checkpoint_holds(tmp_path: Path) -> None:
    """An unquantised load moves the most bytes: mapping the files, or filling the model first, would double it."""
    num_bytes = save_large(tmp_path, hidden_size=512, num_layers=32, dtype=torch.bfloat16)
    held: list[Any] = []
    peak = growth_of_the_peak(
        lambda: held.append(poros.load(tmp_path, quantization=None, dtype="bfloat16", device="cpu", slots=1))
    )
    report = poros.report(held[0])
    block = report.host_bytes // report.num_blocks
    assert report.host_bytes > 0.99 * num_bytes > 200 * MIB
    assert peak < num_bytes + 2 * block + report.window_bytes + 16 * MIB


def test_a_quantised_load_never_holds_the_checkpoint(tmp_path: Path) -> None:
    num_bytes = save_large(tmp_path, hidden_size=256, num_layers=20, dtype=torch.float32)
    peak = growth_of_the_peak(lambda: poros.load(tmp_path, dtype="float32", device="cpu", slots=1))
    assert num_bytes > 64 * MIB
    assert peak < num_bytes // 2  # an eighth of it is the store; the rest is what quantising one weight takes on a CPU


def test_only_one_layer_of_the_checkpoint_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    read, pack = build.Checkpoint.read, options.Attachment.pack

    def note_read(self: Any, name: str, device: Any = "cpu") -> torch.Tensor:
        events.append(name)
        return read(self, name, device)

    def note_pack(self: Any, block: int) -> None:
        pack(self, block)
        events.append(f"packed {block}")

    monkeypatch.setattr(build.Checkpoint, "read", note_read)
    monkeypatch.setattr(options.Attachment, "pack", note_pack)
    poros.load(checkpoints.save(tmp_path, "llama"), dtype="float32", device="cpu", block_size=2)
    blocks = [event for event in events if event.startswith("packed")]
    assert blocks == ["packed 0", "packed 1"]
    first, second = events.index("packed 0"), events.index("packed 1")
    assert {name.split(".")[2] for name in events[:first]} == {"0", "1"}
    assert {name.split(".")[2] for name in events[first + 1 : second]} == {"2"}
    assert not any(".layers." in name for name in events[second + 1 :])


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.save(tmp_path, "llama")
    monkeypatch.setattr("poros.model.memory.read_host_memory", lambda root: HostMemory(10**9, 100_000))
    monkeypatch.setattr(build.Checkpoint, "read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ConfigError, match=r"loading .* needs .* of host memory, .* more than is free \(953.7 MiB"):
        poros.load(folder, dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match=r"building llama-3.1-8b needs 5\.\d GiB of host memory"):
        build.from_shape("llama-3.1-8b", device="cpu")


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "qwen3_moe"])
def test_what_is_asked_for_is_what_is_taken(
    family: str, double_quant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(options, "require_host_memory", lambda need, *_: asked.append(need))
    folder = checkpoints.save(tmp_path, family)
    model = poros.load(folder, dtype="float32", device="cpu", double_quant=double_quant)
    report = poros.report(model)
    # The store aligns its entries, the estimate does not; code tables and rotary frequencies are in neither.
    taken = report.host_bytes + report.resident_bytes + report.window_bytes
    assert 0.85 * taken < asked[0] < 1.15 * taken


class Machine:
    """A faked ``/proc`` and ``/sys``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def available(self, amount: str) -> "Machine":
        return self.write("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {parse_bytes(amount) // 1024} kB\n")

    def group(self, version: int, path: str, limit: str, used: str, cache: str = "0B") -> "Machine":
        folder = f"sys/fs/cgroup/{'memory/' if version == 1 else ''}{path}"
        names = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]
        self.write(f"{folder}/memory.{names[0]}", limit if limit == "max" else str(parse_bytes(limit)))
        self.write(f"{folder}/memory.{names[1]}", str(parse_bytes(used)))
        line = {1: "total_inactive_file", 2: "inactive_file"}[version]
        return self.write(f"{folder}/memory.stat", f"anon 1\n{line} {parse_bytes(cache)}\n")

    def inside(self, *lines: str) -> "Machine":
        return self.write("proc/self/cgroup", "\n".join(lines) + "\n")

    def write(self, path: str, text: str) -> "Machine":
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)
        return self


def free(root: Path) -> int:
    found = read_host_memory(root)
    assert found is not None
    return found.free_bytes


def test_without_a_control_group_the_machine_decides(tmp_path: Path) -> None:
    Machine(tmp_path).available("5GiB")
    assert free(tmp_path) == parse_bytes("5GiB")


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limits_and_its_page_cache_is_free(tmp_path: Path, version: int) -> None:
    line = {1: "4:memory:/job", 2: "0::/job"}[version]
    Machine(tmp_path).available("27GiB").inside("3:cpu:/x", line).group(version, "job", "16GiB", "12GiB", cache="5GiB")
    assert free(tmp_path) == parse_bytes("9GiB")


def test_the_tightest_group_above_the_process_decides(tmp_path: Path) -> None:
    machine = Machine(tmp_path).available("64GiB").inside("0::/outer/inner")
    machine.group(2, "outer/inner", "max", "1GiB").group(2, "outer", "8GiB", "6GiB").group(2, "", "32GiB", "6GiB")
    assert free(tmp_path) == parse_bytes("2GiB")


def test_a_group_that_only_the_host_sees_is_looked_for_at_the_mount(tmp_path: Path) -> None:
    """A container's own limit is at the root of its mount, under a path that names the host's group."""
    Machine(tmp_path).available("64GiB").inside("4:memory:/docker/1234").group(1, "", "8GiB", "7GiB")
    assert free(tmp_path) == parse_bytes("1GiB")


def test_no_limit_is_written_as_a_large_number_in_version_1(tmp_path: Path) -> None:
    Machine(tmp_path).available("4GiB").inside("4:memory:/").group(1, "", str(2**63 - 4096), "1GiB")
    assert free(tmp_path) == parse_bytes("4GiB")


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    Machine(tmp_path).available("4GiB").inside("0::/").group(2, "", "1GiB", "2GiB")
    assert free(tmp_path) == 0


def test_a_kernel_without_meminfo_is_not_second_guessed(tmp_path: Path) -> None:
    assert read_host_memory(tmp_path) is None
    require_host_memory(2**60, "loading everything", "", root=tmp_path)


def test_the_refusal_says_what_is_needed_what_is_free_and_what_to_do(tmp_path: Path) -> None:
    Machine(tmp_path).available("27GiB").inside("0::/").group(2, "", "16GiB", "1GiB")
    require_host_memory(15 * 2**30, "loading it", "Take a smaller model.", root=tmp_path)
    with pytest.raises(ConfigError) as refused:
        require_host_memory(16 * 2**30, "loading it", "Take a smaller model.", root=tmp_path)
    assert str(refused.value) == (
        "loading it needs 16.0 GiB of host memory, 1.0 GiB more than is free (27.0 GiB available on the machine, "
        "15.0 GiB left in the control group). Take a smaller model."
    )
