"""The small model's tokenizer: a byte-level BPE of 4,096 ids, single digits, trained on a sample of the mixture.

python -m benchmarks.small_model.vocabulary OUT
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.small_model.dialogue import BOS, END_HEADER, EOS, EOT, MASK, START_HEADER
from benchmarks.small_model.mixture import ZERO_SHOT, Writer

SIZE = 4096
SPECIAL_TOKENS = (BOS, EOS, START_HEADER, END_HEADER, EOT, MASK)
"""They have the highest ids, in this order."""

PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"  # words with the character before them, single digits
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # punctuation, line ends, other white space
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


def sample_texts(count: int, seed: int) -> Iterator[str]:
    """`count` seeded texts of the mixture, without special tokens."""
    writer, random = Writer(ZERO_SHOT), Random(f"vocabulary {seed}")
    for _ in range(count):
        example = writer.example(random)
        text = f"{example.prompt}{example.answer}"
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "")
        yield text


def train(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE of `SIZE` ids that encodes any text without loss.

    Raises:
        ValueError: the texts have too few distinct words for so many ids.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    size = SIZE - len(SPECIAL_TOKENS)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[])
    )
    if tokenizer.get_vocab_size() != size:
        raise ValueError(
            f"the texts give {tokenizer.get_vocab_size()} ids, expected {size}: train on more varied texts"
        )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "mask_token": MASK}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "additional_special_tokens": [START_HEADER, END_HEADER, EOT],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    special = {**named, "additional_special_tokens": config["additional_special_tokens"]}
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Trains the tokenizer and writes it to a directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the directory to write to")
    parser.add_argument("--texts", type=int, default=60_000, help="texts of the mixture to train on")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    save(train(sample_texts(arguments.texts, arguments.seed)), arguments.out)
    print(f"wrote a tokenizer of {SIZE} ids to {arguments.out}")


if __name__ == "__main__":
    main()
