"""A real model, SmolLM2-135M-Instruct in NF4, learns real conversations: the same adapter streamed as resident."""

import json
from pathlib import Path

import pytest
import torch
from scripts import demo
from transformers import AutoTokenizer

import poros
from poros.model.adapter import add_lora
from tests import oracle, tiny

ROOT = Path(__file__).resolve().parent.parent
NUM_CONVERSATIONS = 6
STEPS = 12


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model that the demo uses, unpacked once for all runs of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        demo.prepare()
    return ROOT / demo.MODEL


def test_the_adapter_is_that_of_the_resident_run_and_the_loss_falls(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (ROOT / demo.ROWS).read_text().splitlines()[:NUM_CONVERSATIONS]]
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    encoded = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    batches = [{"input_ids": ids, "labels": ids} for ids in encoded] * (STEPS // NUM_CONVERSATIONS)

    def model() -> torch.nn.Module:
        base = poros.load(folder, stream=False, dtype="float32", device="cpu")
        adapted = add_lora(base, rank=8, alpha=16, dropout=0.1, seed=3)
        with torch.random.fork_rng():
            torch.manual_seed(4)
            tiny.randomise_lora_b(adapted, std=0.01)
        return adapted.train()

    def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    trace = oracle.check_parity(
        model, batches, {"block_size": 5, "slots": 2, "poison": True}, make_optimizer=adamw, seed=5
    )
    losses = [float(step["loss/0"]) for step in trace.steps]
    first, last = losses[:NUM_CONVERSATIONS], losses[-NUM_CONVERSATIONS:]
    assert sum(last) < 0.9 * sum(first), losses
