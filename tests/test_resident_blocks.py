"""Blocks that stay on the device: the same bits, and none of their bytes cross the link."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import poros
from poros.residency.attach import attachment_of
from poros.residency.schedule import spread
from poros.residency.transfer import Transfer
from tests import oracle, tiny


@given(st.integers(1, 200), st.data())
def test_blocks_that_stay_are_spread_evenly(num_blocks: int, data: st.DataObject) -> None:
    num_kept = data.draw(st.integers(1, num_blocks))
    kept = spread(num_blocks, num_kept)
    assert len(set(kept)) == num_kept
    assert all(0 <= block < num_blocks for block in kept)
    gaps = [after - before for before, after in pairwise(kept)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert abs(kept[0] - (num_blocks - 1 - kept[-1])) <= 1  # as much before the first as behind the last


def llama(**changes: object) -> nn.Module:
    return tiny.build("llama", **{"num_layers": 7, "dropout": 0.1, **changes})


@pytest.mark.parametrize("quant", ["nf4-dq", None])
def test_they_change_no_bit(quant: str | None) -> None:
    oracle.check_parity(
        lambda: llama(quant=quant),
        tiny.batches("llama", 3),
        {"resident_blocks": 1, "poison": True},
        {"resident_blocks": 3, "slots": 2},
        {"resident_blocks": 2, "block_size": 2},
        {"resident_blocks": 99, "slots": 2},
    )


def test_their_bytes_do_not_come_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = poros.prepare(llama(), device="cpu", slots=2, resident_blocks=3)
    attachment = attachment_of(model)
    assert attachment is not None
    masters = {block.data_ptr(): index for index, block in enumerate(attachment.store.blocks)}
    loaded, copy = [], Transfer.copy

    def spy(self: Transfer, target: torch.Tensor, source: torch.Tensor, after: object = ()) -> object:
        loaded.append(masters.get(source.data_ptr()))
        return copy(self, target, source, after)

    monkeypatch.setattr(Transfer, "copy", spy)
    oracle.run(model, tiny.batches("llama", 2))
    assert set(loaded) == ({None, *range(7)} - set(spread(7, 3)))


def test_the_report_counts_them() -> None:
    model = poros.prepare(llama(), device="cpu", block_size=2, resident_blocks=2)
    report, attachment = poros.report(model), attachment_of(model)
    assert attachment is not None
    assert report.resident_blocks == 2
    assert report.resident_block_bytes == sum(attachment.store.blocks[block].numel() for block in spread(4, 2))
    assert "2 blocks" in str(report)
    assert "kept" not in str(poros.report(poros.prepare(llama(), device="cpu")))


def test_they_go_with_unprepare_and_belong_to_the_settings() -> None:
    model = poros.prepare(llama(), device="cpu", resident_blocks=2)
    attachment = attachment_of(model)
    assert attachment is not None
    assert poros.prepare(model, resident_blocks=2) is model
    with pytest.raises(poros.ConfigError, match="resident_blocks=2, so not with resident_blocks=3"):
        poros.prepare(model, resident_blocks=3)
    poros.unprepare(model)
    assert not attachment._kept


@pytest.mark.parametrize("value", [-1, 1.5, "all"])
def test_what_is_no_number_of_blocks_is_refused(value: object) -> None:
    with pytest.raises(poros.ConfigError, match=r"resident_blocks is .*at least 0"):
        poros.prepare(llama(), device="cpu", resident_blocks=value)


def test_more_than_the_device_holds_is_refused_and_nothing_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poros.residency.attachment.device_free_bytes", lambda _: 1000)
    model = llama()
    with pytest.raises(poros.ConfigError, match=r"7 resident blocks of .* are free. Lower resident_blocks"):
        poros.prepare(model, device="cpu", resident_blocks=7)
    monkeypatch.undo()
    assert attachment_of(model) is None
    assert (
        oracle.compare(oracle.run(llama(), tiny.batches("llama", 1)), oracle.run(model, tiny.batches("llama", 1)))
        is None
    )
