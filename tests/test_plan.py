"""The plan's promise: its bytes are those of the real store, the real adapters and the measured runs."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

import poros
from poros.cli import app
from poros.config import RunConfig
from poros.errors import ConfigError, UnsupportedModelError
from poros.evidence.plan import config_of, hold_to, planned
from poros.evidence.plan_allocator import Allocator
from poros.evidence.plan_cards import CARDS
from poros.evidence.plan_result import Plan
from poros.evidence.plan_work import (
    BLOCKS_ON_THEIR_WAY,
    CONTEXT_BYTES,
    GRAPHS_BYTES,
    LIBRARIES_BYTES,
    RECORDED,
    Run,
    Work,
)
from poros.model.adapter import add_lora
from poros.model.build import from_shape
from poros.model.options import Precision
from poros.residency.attach import attachment_of
from tests import tiny

ROWS = Path(__file__).parents[1] / "docs" / "validation" / "h200_launches_32b.jsonl"
# The plan is of kernels launched one by one.
MEASURED = [
    row
    for row in map(json.loads, ROWS.read_text().splitlines())
    if row["method"] in ("poros", "resident") and row["engine"] != "replay"
]
MIB = 2**20


def test_what_the_plan_takes_from_measurements_is_what_was_measured() -> None:
    replayed = next(row for row in map(json.loads, ROWS.read_text().splitlines()) if row["cell"].endswith("/poros-bs1"))
    assert replayed["process_bytes"] - replayed["reserved_bytes"] == CONTEXT_BYTES[True] + GRAPHS_BYTES
    for row in MEASURED:
        assert row["process_bytes"] - row["reserved_bytes"] == CONTEXT_BYTES[row["method"] == "poros"]
        if row["method"] == "resident":
            assert row["host_peak_bytes"] == LIBRARIES_BYTES


def config(family: str) -> Any:
    return tiny.build(family, quant=None, lora=False).config


def run(family: str, *, quantization: str | None = "nf4", dtype: str = "bfloat16", **changes: Any) -> Run:
    settings: dict[str, Any] = {"seq_len": 32, "batch_size": 2, "rank": 4, "targets": "all-linear", **changes}
    return Run(family, config(family), precision=Precision.of(quantization, True, dtype, None), **settings)


def settings(folder: Path, **model: Any) -> RunConfig:
    tiny.build("llama", quant=None, lora=False).save_pretrained(folder)
    sections = {"model": {"path": str(folder), **model}, "data": {"train": "rows.jsonl", "max_length": 64}}
    return RunConfig.model_validate({**sections, "output": "out"})


def test_a_run_with_a_budget_gets_the_sizes_of_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config, found = planned(settings(tmp_path, vram="2GiB"))
    assert found.process_bytes <= 2 * 2**30
    assert config.model.vram is None
    assert config.model.resident_blocks == found.resident_blocks == found.num_layers
    with pytest.raises(ConfigError, match=r"model\.vram is 100MiB: the least that the process takes on the card is"):
        planned(settings(tmp_path, vram="100MiB"))
    with pytest.raises(ConfigError, match="'much' is not an amount of memory"):
        planned(settings(tmp_path, vram="much"))


def test_a_budget_needs_a_gpu_and_nothing_that_contradicts_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this run has none"):
        planned(settings(tmp_path, vram="2GiB", device="cpu"))
    for other in ({"block_size": 2}, {"slots": 2}, {"resident_blocks": 1}, {"stream": False}, {"gguf_file": "x.gguf"}):
        with pytest.raises(ValidationError, match="vram"):
            settings(tmp_path, vram="2GiB", **other)


def test_the_process_is_held_to_its_budget(small: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    hold_to(small)
    assert not fractions  # there is no budget
    hold_to(replace(small, vram_bytes=4 * 2**30 + small.context_bytes))
    assert fractions == [0.25]


def test_recorded_visits_take_a_pool_and_little_else() -> None:
    eager, replayed = (poros.plan("qwen2.5-0.5b", replay=replay) for replay in (False, True))
    assert eager.pool_bytes == 0 < replayed.pool_bytes
    assert eager.reserved_bytes < replayed.reserved_bytes < eager.reserved_bytes + replayed.pool_bytes + 64 * MIB
    assert sum(replayed.device_terms.values()) == replayed.allocated_bytes
    assert replayed.reserved_bytes >= replayed.allocated_bytes + replayed.pool_bytes
    assert "recorded visits at work" in str(replayed)
    assert RECORDED in poros.plan("qwen2.5-0.5b", seq_len=32).device_terms


@pytest.fixture(scope="module")
def small() -> Plan:
    """The least plan of a small real shape."""
    return poros.plan("qwen2.5-0.5b")


@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_slabs_and_adapters_have_the_bytes_of_a_real_model(family: str, quantization: Any) -> None:
    work = Work(run(family, quantization=quantization))
    for block_size in (3, 1):
        model = from_shape(work.run.config, quantization=quantization, device="cpu", block_size=block_size)
        attachment = attachment_of(model)
        assert attachment is not None
        assert work.blocks(block_size) == [block.numel() for block in attachment.store.blocks]
    adapted = add_lora(model, rank=4, alpha=8)
    assert work.num_trainable == sum(p.nbytes for p in adapted.parameters() if p.requires_grad)
    streamed = {id(tensor) for layer in attachment.layers for tensor in layer.tensors}
    rest = [t for t in (*adapted.parameters(), *adapted.buffers()) if id(t) not in streamed and not t.requires_grad]
    statistics = 2**12  # code tables, and what a quantised tower's weights carry, are no parameters
    assert 0 <= sum(work.fixed) - sum(t.nbytes for t in rest) <= statistics


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_has_a_bill_whose_terms_are_its_total(family: str) -> None:
    work = Work(run(family))
    for replay in (True, False):
        found = work.bill(block_size=1, slots=3, resident_blocks=1, replay=replay)
        assert sum(found.device_terms.values()) == found.allocated_bytes <= found.reserved_bytes < found.process_bytes
        assert sum(found.host_terms.values()) == found.host_bytes
        assert {"window", "blocks that stay", "adapters"} <= {*found.device_terms}
        assert replay == (found.pool_bytes > 0)
    assert {"optimizer state", "saved layer inputs"} <= {*found.device_terms}  # a layer's work in the second step


def test_targets_and_rank_are_pefts() -> None:
    model = add_lora(tiny.build("llama", lora=False), rank=8, alpha=8, target_modules=["q_proj", "down_proj"])
    work = Work(run("llama", rank=8, targets=["q_proj", "down_proj"]))
    assert work.num_trainable == sum(4 * p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['method']}-{row['block_size']}-{row['slots']}")
def test_measured_memory_is_within_five_percent(row: dict[str, Any]) -> None:
    lora = row["lora"]
    precision = Precision.of("nf4", True, "bfloat16", None)
    shape = Run(
        *config_of(row["model"]), row["seq_len"], row["batch_size"], lora["rank"], lora["targets"], precision=precision
    )
    work = Work(shape, stream=row["method"] == "poros")
    window = {"block_size": row["block_size"] or 1, "slots": row["slots"] or 1, "resident_blocks": 0}
    found = work.bill(**window, replay=False, card=CARDS["h200"])
    for name in ("allocated_bytes", "reserved_bytes", "process_bytes"):
        assert getattr(found, name) == pytest.approx(row[name], rel=0.05), name
    if work.stream:
        assert found.locked_bytes == pytest.approx(row["host_locked_bytes"], abs=64)  # and a few scalars of torch's
        # Random weights are made on the card: no block is on its way on the host.
        on_the_way = found.host_terms[BLOCKS_ON_THEIR_WAY]
        assert found.host_bytes - on_the_way == pytest.approx(row["host_peak_bytes"], rel=0.05)
        assert found.seconds_at_least is not None
        assert found.seconds_at_least < min(map(min, row["passes"]))


def test_a_larger_budget_keeps_more_blocks_and_is_never_exceeded(small: Any) -> None:
    budgets = [small.process_bytes + extra * MIB for extra in (0, 40, 4000)]
    plans = [poros.plan("qwen2.5-0.5b", vram=budget) for budget in budgets]
    assert all(found.fits and found.process_bytes <= budget for found, budget in zip(plans, budgets, strict=True))
    kept = [found.resident_blocks for found in plans]
    assert kept == sorted(kept)
    assert kept[0] == 0 < kept[1] < kept[-1] == small.num_blocks
    assert all(less.streamed_bytes >= more.streamed_bytes for less, more in pairwise(plans))


def test_two_slots_when_three_are_too_many() -> None:
    three = poros.plan("qwen2.5-0.5b", replay=False)
    found = poros.plan("qwen2.5-0.5b", vram=three.process_bytes - MIB, replay=False)
    assert (found.slots, found.resident_blocks, found.fits) == (2, 0, True)


def test_what_does_not_fit_is_said_with_a_way_out(small: Any) -> None:
    found = poros.plan("qwen2.5-0.5b", vram=small.process_bytes - 200 * MIB)
    assert not found.fits
    with pytest.raises(ConfigError, match=r"more than vram\. It would fit with loss_chunk_tokens=256"):
        found.require_fit()
    hopeless = poros.plan("qwen2.5-0.5b", vram="1GiB", ram="1GB", seq_len=64)
    assert "give it more, or take a smaller model" in hopeless.problems[0]
    assert "more than ram" in hopeless.problems[1]


def test_longer_rows_and_larger_ranks_take_more(small: Any) -> None:
    assert poros.plan("qwen2.5-0.5b", seq_len=1024).process_bytes > small.process_bytes
    assert poros.plan("qwen2.5-0.5b", rank=64).process_bytes > small.process_bytes
    assert poros.plan("qwen2.5-0.5b", loss_chunk_tokens=128).process_bytes < small.process_bytes


def test_settings_out_of_their_limits_are_refused() -> None:
    for wrong, said in (
        ({"seq_len": 0}, "seq_len is 0"),
        ({"loss_chunk_tokens": 0}, "loss_chunk_tokens is 0"),
        ({"vram": "eleven"}, "'eleven' is not an amount of memory"),
        ({"vram": "0GB"}, "more than nothing"),
        ({"card": "abacus"}, "no card 'abacus'"),
        ({"optimizer": "sgd"}, "only 'adamw'"),
    ):
        with pytest.raises(ConfigError, match=said):
            poros.plan("qwen2.5-0.5b", **wrong)
    with pytest.raises(UnsupportedModelError, match="glm4_moe"):
        poros.plan("glm-4.5-air")


def test_planning_leaves_torch_as_it_was() -> None:
    functional = torch.nn.functional
    before = functional.scaled_dot_product_attention, functional.dropout, torch.autocast
    Work(run("qwen2")).bill(block_size=1, slots=2, resident_blocks=0)
    assert (functional.scaled_dot_product_attention, functional.dropout, torch.autocast) == before


def test_command_prints_one_screen_or_json() -> None:
    said = CliRunner().invoke(app, ["plan", "qwen2.5-0.5b", "--vram", "3GiB", "--card", "rtx4090"])
    assert said.exit_code == 0, said.output
    assert len(said.output.splitlines()) <= 40
    assert max(map(len, said.output.splitlines())) <= 120
    assert "at least" in said.output
    as_json = CliRunner().invoke(app, ["plan", "qwen2.5-0.5b", "--ram", "1GiB", "--json"])
    assert as_json.exit_code == 1
    assert not json.loads(as_json.stdout)["fits"]
    wrong = CliRunner().invoke(app, ["plan", "glm-4.5-air"])
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith("error: model_type 'glm4_moe' is not supported")


def test_allocator_rounds_splits_and_merges_as_torch_does() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(size, "a") for size in (1, 513, 2 * MIB, 3 * MIB, 16 * MIB)]
    assert [block.num_bytes for block in blocks] == [512, 1024, 2 * MIB, 3 * MIB, 16 * MIB]
    assert allocator.reserved_bytes == (2 + 20 + 16) * MIB
    for block in blocks[2:4]:
        allocator.release(block)
    again = allocator.allocate(19 * MIB + 512, "b")  # does not fit the 20 MiB with less than 1 MiB left over: all of it
    assert again.num_bytes == 20 * MIB
    assert allocator.reserved_bytes == (2 + 20 + 16) * MIB
    assert allocator.terms["b"] == 20 * MIB
