"""What a run learns from: every format of row, and the label of every token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from poros.errors import DataError
from poros.train.collate import PaddingCollator
from poros.train.data import RowDataset, read_rows
from poros.train.encode import IGNORED, Encoder
from tests import tiny, tiny_run

BOS, EOS = 1, 2
CHAT = [
    {"role": "user", "content": "is it?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "no"},
]
# Like Qwen3's: the last turn is written with an empty thought, the turns before it without.
THINKING_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
NO_SYSTEM_TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + tiny_run.CHAT_TEMPLATE
)


def read(
    folder: Path, rows: list[Any], *, tokenizer: Any = None, encoder: dict[str, Any] | None = None, **options: Any
) -> RowDataset:
    """The dataset of ``rows``; a row that is bytes goes into the file as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    file = folder / "rows.jsonl"
    file.write_bytes(b"\n".join(lines) + b"\n")
    tokenizer = tokenizer if tokenizer is not None else tiny_run.tokenizer()
    return read_rows([str(file)], Encoder(tokenizer, **(encoder or {})), **options)


def learnt(dataset: RowDataset, index: int = 0, tokenizer: Any = None) -> list[str]:
    """The stretches of tokens that are learnt, as text; a label is the token's own id wherever it is not ignored."""
    tokenizer = tokenizer or tiny_run.tokenizer()
    stretches: list[list[int]] = [[]]
    for token, label in zip(dataset.examples[index].input_ids, dataset.examples[index].labels, strict=True):
        if label == IGNORED:
            stretches.append([])
        else:
            assert label == token
            stretches[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in stretches if stretch]


def whole(dataset: RowDataset, index: int = 0) -> str:
    return str(tiny_run.tokenizer().decode(list(dataset.examples[index].input_ids)))


# --- formats and masks


def test_text_is_learnt_whole_with_one_bos_and_one_eos(tmp_path: Path) -> None:
    dataset = read(tmp_path, [{"text": "the answer"}])
    assert whole(dataset) == "<s>the answer</s>"
    ids, labels = dataset.examples[0].input_ids, dataset.examples[0].labels
    assert list(labels) == [IGNORED, *ids[1:]]  # nothing predicts the first
    assert dataset.examples[0].num_trained == len(ids) - 1


def test_of_a_prompt_only_the_completion_is_learnt_with_the_prompts_own_tokens(tmp_path: Path) -> None:
    tokenizer = tiny_run.tokenizer()
    # "th" + "e answer" would be tokenised as "the answer" together; the model will be given "th" alone.
    dataset = read(tmp_path, [{"prompt": "is it?", "completion": " yes"}, {"prompt": "th", "completion": "e answer"}])
    assert whole(dataset, 0) == "<s>is it? yes</s>"
    assert learnt(dataset, 0) == [" yes</s>"]
    assert learnt(dataset, 1) == ["e answer</s>"]
    head = tokenizer("th")["input_ids"]
    assert list(dataset.examples[1].input_ids[: len(head)]) == head


@pytest.mark.parametrize("template", [tiny_run.CHAT_TEMPLATE, tiny_run.MARKED_TEMPLATE], ids=["plain", "marked"])
def test_of_a_conversation_every_assistant_turn_is_learnt_up_to_its_end(tmp_path: Path, template: str) -> None:
    dataset = read(tmp_path, [{"messages": CHAT}], tokenizer=tiny_run.tokenizer(template=template))
    assert whole(dataset) == "<s>user\nis it?</s><s>assistant\nyes</s><s>user\nand?</s><s>assistant\nno</s>"
    assert learnt(dataset) == ["yes</s>", "no</s>"]


@pytest.mark.parametrize(
    "template",
    [tiny_run.CHAT_TEMPLATE, tiny_run.MARKED_TEMPLATE, THINKING_TEMPLATE],
    ids=["plain", "marked", "thinking"],
)
def test_only_the_last_assistant_turn_is_learnt_if_asked(tmp_path: Path, template: str) -> None:
    tokenizer = tiny_run.tokenizer(template=template)
    dataset = read(tmp_path, [{"messages": CHAT}], tokenizer=tokenizer, encoder={"assistant_turns": "last"})
    assert learnt(dataset) == ["<think></think>no</s>" if template is THINKING_TEMPLATE else "no</s>"]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_way_out(tmp_path: Path) -> None:
    tokenizer = tiny_run.tokenizer(template=THINKING_TEMPLATE)
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*message 2 differently.*assistant_turns: last"):
        read(tmp_path, [{"messages": CHAT}], tokenizer=tokenizer)


def test_each_row_may_have_a_format_of_its_own(tmp_path: Path) -> None:
    rows = [{"text": "yes"}, {"prompt": "is it?", "completion": " no"}, {"messages": CHAT[:2], "text_id": 3}]
    dataset = read(tmp_path, rows)
    assert [learnt(dataset, i) for i in range(3)] == [["yes</s>"], [" no</s>"], ["yes</s>"]]


def test_a_row_with_several_formats_needs_to_be_told_which(tmp_path: Path) -> None:
    row = {"text": "the answer", "messages": CHAT[:2]}
    with pytest.raises(DataError, match=r"several formats \(messages, text\); set data.format"):
        read(tmp_path, [row])
    assert learnt(read(tmp_path, [row], format="messages")) == ["yes</s>"]
    assert learnt(read(tmp_path, [row], format="text")) == ["the answer</s>"]


# --- special tokens


def test_a_padding_token_that_is_also_the_end_hides_no_end(tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/issues/976"""
    tokenizer = tiny_run.tokenizer(pad="</s>")
    assert tokenizer.pad_token_id == EOS
    dataset = read(tmp_path, [{"text": "yes"}, {"text": "the answer is yes and no"}], tokenizer=tokenizer)
    batch = PaddingCollator(tokenizer.pad_token_id)([dataset[0], dataset[1]])
    short, padded = len(dataset[0]["input_ids"]), batch["input_ids"].shape[1]
    assert short < padded
    assert batch["labels"][0, short - 1] == EOS
    assert batch["labels"][0, short:].eq(IGNORED).all()
    assert batch["input_ids"][0, short - 1 :].eq(EOS).all()
    assert batch["attention_mask"].sum(1).tolist() == [short, padded]
    assert {name: value.dtype for name, value in batch.items()} == dict.fromkeys(batch, torch.int64)


@pytest.mark.parametrize(("longest", "width"), [(3, 8), (8, 8), (9, 16), (17, 20), (25, 25)])
def test_batches_are_padded_to_a_multiple_within_the_longest_that_is_allowed(longest: int, width: int) -> None:
    collate = PaddingCollator(0, multiple=8, max_length=20)
    row = {"input_ids": list(range(longest)), "labels": list(range(longest))}
    batch = collate([row, row])
    assert batch["input_ids"].shape == (2, width)
    assert batch["attention_mask"].all()  # nothing to tell apart
    assert batch["labels"][:, longest:].eq(IGNORED).all()
    shorter = {name: values[:2] for name, values in row.items()}
    assert collate([shorter, row])["attention_mask"].sum(1).tolist() == [2, longest]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_padding_without_a_mask_teaches_nothing(family: str) -> None:
    model = tiny.build(family, quant=None, lora=False).eval()
    ids = tiny.batch(family, batch_size=1, seq_len=11)["input_ids"][0].tolist()
    row = {"input_ids": ids, "labels": ids}
    alone, padded = PaddingCollator(0)([row]), PaddingCollator(0, multiple=16)([row])
    assert padded["input_ids"].shape == (1, 16)
    with torch.no_grad():
        assert model(**padded).loss.item() == pytest.approx(model(**alone).loss.item(), rel=1e-5)


def test_special_tokens_that_the_text_brings_are_not_doubled(tmp_path: Path) -> None:
    """https://github.com/huggingface/transformers/issues/22794"""
    rows = [{"text": "<s>yes</s>"}, {"prompt": "<s>is it?", "completion": " no</s>"}, {"messages": CHAT[:2]}]
    dataset = read(tmp_path, rows)
    assert whole(dataset, 0) == "<s>yes</s>"
    assert whole(dataset, 1) == "<s>is it? no</s>"
    assert not whole(dataset, 2).startswith("<s><s>")


def test_a_tokenizer_without_bos_gets_none_and_without_eos_is_refused(tmp_path: Path) -> None:
    assert whole(read(tmp_path, [{"text": "yes"}], tokenizer=tiny_run.tokenizer(bos=False))) == "yes</s>"
    endless = tiny_run.tokenizer()
    endless.eos_token = None
    with pytest.raises(DataError, match="append_eos: false"):
        read(tmp_path, [{"text": "yes"}], tokenizer=endless)
    dataset = read(tmp_path, [{"text": "yes"}], tokenizer=endless, encoder={"append_eos": False})
    assert whole(dataset) == "<s>yes"


# --- truncation and rows that are left out


@pytest.mark.parametrize(("truncation", "kept"), [("keep_start", "<s>aaa"), ("keep_end", "aaa</s>")])
def test_a_longer_row_keeps_the_end_that_the_policy_says(tmp_path: Path, truncation: Any, kept: str) -> None:
    dataset = read(tmp_path, [{"text": "aaa aaa aaa"}], max_length=4, truncation=truncation)
    assert whole(dataset) == kept
    assert [place.line for place in dataset.truncated] == [1]


def test_a_longer_row_is_dropped_or_stops_the_run_if_asked(tmp_path: Path) -> None:
    rows = [{"text": "no"}, {"text": "aaa aaa aaa"}]
    dataset = read(tmp_path, rows, max_length=5, truncation="drop")
    assert len(dataset) == 1
    assert {reason: [p.line for p in places] for reason, places in dataset.dropped.items()} == {
        "longer than 5 tokens": [2]
    }
    with pytest.raises(DataError, match=r"rows.jsonl:2: 13 tokens, and data.max_length is 5"):
        read(tmp_path, rows, max_length=5, truncation="error")


def test_rows_with_nothing_to_learn_are_dropped_and_named(tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/issues/6668"""
    long_question = [{"role": "user", "content": "a" * 50}, {"role": "assistant", "content": "yes"}]
    rows = [
        {"text": "yes"},
        {"messages": long_question},  # truncation removes the answer
        {"messages": []},
        {"messages": CHAT[:1]},  # nobody answers
        {"prompt": "is it?", "completion": ""},
        {"text": ""},
    ]
    dataset = read(tmp_path, rows, max_length=16)
    assert [place.line for place in dataset.places] == [1]
    assert dataset.num_dropped == 5
    summary = "\n".join(dataset.summary())
    assert "1 row, " in summary
    assert "4 rows dropped, nothing to learn in them: " in summary
    assert "1 row dropped, nothing to learn in the 16 tokens kept: " in summary
    assert f"{tmp_path}/rows.jsonl:2" in summary


def test_no_row_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"of 1 row none is left.*nothing to learn in the 4 tokens kept.*max_length"):
        read(tmp_path, [{"prompt": "a" * 50, "completion": " yes"}], max_length=4)


def test_a_line_of_20_mb_is_one_row_like_any_other(tmp_path: Path) -> None:
    """https://github.com/huggingface/datasets/issues/7664"""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))  # quick: a token for 2 KB
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    rows = [{"text": "yes"}, {"text": ("a" * 2047 + " ") * (20 * 2**9)}, {"text": "no"}]
    dataset = read(tmp_path, rows, tokenizer=tokenizer, max_length=256)
    assert [len(example.input_ids) for example in dataset.examples] == [2, 256, 2]
    assert [place.line for place in dataset.truncated] == [2]
    assert dataset.longest == 256


# --- rows that cannot be understood

BAD_ROWS: list[tuple[str, Any, str]] = [
    ("not JSON", b'{"text": "a",}', "not valid JSON: .* column"),
    ("not an object", ["a"], "a JSON list, not an object"),
    ("no known field", {"question": "a", "answer": "b"}, "this one has 'question', 'answer'"),
    ("half a pair", {"prompt": "a"}, "this one has 'prompt'"),
    ("empty object", {}, "this one is empty"),
    ("text of another type", {"text": ["a"]}, "'text' is a JSON list; it must be text"),
    ("completion of another type", {"prompt": "a", "completion": None}, "'completion' is a JSON null"),
    ("messages of another type", {"messages": "a"}, "'messages' is a JSON text; it must be a list"),
    ("message of another type", {"messages": ["a"]}, "message 1 must be an object with a 'role'"),
    ("message without role", {"messages": [{"content": "a"}]}, "message 1 must be an object with a 'role'"),
    ("message without content", {"messages": [{"role": "user"}]}, "content of message 1 is a JSON null"),
    ("message with parts", {"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "is a JSON list"),
    ("Latin-1", b'{"text": "caf\xe9"}', "not UTF-8 \\(byte 14 of the line\\)"),
    ("half a surrogate", b'{"text": "a \\ud800"}', "not Unicode"),
    ("nested too deeply", b"[" * 100_000, "nested too deeply|not valid JSON"),
]


@pytest.mark.parametrize(("row", "says"), [case[1:] for case in BAD_ROWS], ids=[case[0] for case in BAD_ROWS])
def test_a_row_that_cannot_be_understood_is_named_with_its_line(tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl:3: .*({says})"):
        read(tmp_path, [{"text": "yes"}, b"", row, {"text": "no"}])


def test_many_bad_rows_fit_one_screen(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="and more") as error:
        read(tmp_path, [{"wrong": 1}] * 1000)
    assert len(str(error.value).splitlines()) <= 10


def test_a_template_that_refuses_a_conversation_is_an_error_of_its_row(tmp_path: Path) -> None:
    tokenizer = tiny_run.tokenizer(template=NO_SYSTEM_TEMPLATE)
    rows = [{"messages": CHAT}, {"messages": [{"role": "system", "content": "be brief"}, *CHAT]}]
    with pytest.raises(DataError, match=r"rows.jsonl:2: the chat template refused the conversation: no system role"):
        read(tmp_path, rows, tokenizer=tokenizer)


def test_conversations_need_a_chat_template(tmp_path: Path) -> None:
    """https://github.com/huggingface/trl/issues/3927"""
    with pytest.raises(DataError, match=r"no chat template.*data.chat_template"):
        read(tmp_path, [{"messages": CHAT}], tokenizer=tiny_run.tokenizer(template=None))
    assert len(read(tmp_path, [{"text": "yes"}], tokenizer=tiny_run.tokenizer(template=None))) == 1


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    dataset = read(tmp_path, [b'\xef\xbb\xbf{"text": "yes"}', b"", b"  ", {"text": "no"}])
    assert [place.line for place in dataset.places] == [1, 4]


def test_the_digest_tells_rows_and_labels_apart(tmp_path: Path) -> None:
    def digest(*rows: Any) -> str:
        return read(tmp_path, list(rows)).digest()

    first, second = {"text": "yes no"}, {"prompt": "yes", "completion": " no"}
    assert digest(first) == digest(first)
    assert len({digest(first), digest(second), digest(first, second), digest(second, first)}) == 4
