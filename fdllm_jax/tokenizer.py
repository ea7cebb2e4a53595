"""Tokenizer: the checkpoint's own tokenizer and chat template, with reserved text typed by a user kept as text."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from fdllm_jax.config import ModelConfig

TOKENIZER_FILE = "tokenizer.json"
ROLES = ("system", "user", "assistant")

# GPT-2's byte alphabet, in which byte-level vocabularies are written: printable Latin-1 characters stand for their own
# byte, the other bytes for the characters from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHER = sorted(set(range(0x100)) - set(_PRINTABLE))
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHER)}


class Tokenizer:
    """Text to token ids and back, as the checkpoint in `directory` defines it; no code of the checkpoint is run.

    Reserved are all added tokens (`<|mdm_mask|>`, `<|eot_id|>`, ...) and the mask: inside a user's text their strings
    become ordinary text tokens, never their ids. Any other text gets the ids that transformers would give it.

    `mask_id` and `eos_ids` are the ids of the mask and of the tokens that end an answer: the configuration's
    `eos_token_id`, and `<|eot_id|>` where the tokenizer has it.

    Raises FileNotFoundError if the directory, its `config.json` or its `tokenizer.json` is missing, ValueError if one
    of them cannot be used.
    """

    mask_id: int
    eos_ids: tuple[int, ...]

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)
        config = ModelConfig.from_directory(self._directory)
        self._hf = _load(self._directory)
        self._backend: tokenizers.Tokenizer = self._hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._plain = _without_added_tokens(self._backend)
        decoder = self._backend.decoder
        self._byte_level = decoder is not None and decoder.decode(["Ġ"]) == " "
        self._vocab_size = config.vocab_size
        self.mask_id = config.mask_token_id
        end_of_turn = self._backend.token_to_id("<|eot_id|>")
        self.eos_ids = tuple(dict.fromkeys(i for i in (config.eos_token_id, end_of_turn) if i is not None))
        added = self._backend.get_added_tokens_decoder()
        # Some vocabularies keep runs of spaces as added tokens: these are text.
        self._reserved = {self.mask_id, *(i for i, token in added.items() if token.content.strip())}
        special = (i for i, token in added.items() if token.special)
        self._dropped = {self.mask_id, config.pad_token_id, *self.eos_ids, *special}

    @property
    def size(self) -> int:
        """One more than the highest id that the tokenizer can give; a model with a smaller vocabulary cannot run it."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's chat template, in Jinja; None where it has none."""
        return self._hf.get_chat_template() if self._hf.chat_template else None

    def encode_chat(self, text: str, *, history: Sequence[Mapping[str, str]] = (), answer: str = "") -> list[int]:
        """Ids of a conversation in the checkpoint's chat form, up to where the answer to `text` begins.

        `history` holds the earlier messages, each with a `role` (system, user or assistant) and a `content`. `answer`
        is what the answer begins with. Raises ValueError if `text` is blank, a message is malformed, or the checkpoint
        has no chat template that works.
        """
        messages = _messages(text, history)
        (*contents, answer), way_back = self._hide([*(message["content"] for message in messages), answer])
        messages = [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
        rendered = self._render(messages) + answer
        encoding = self._backend.encode(rendered, add_special_tokens=False)
        if not way_back:
            return encoding.ids
        # What is reserved here is the template's own; what lies between is text, once the hidden strings are back.
        ids, end = [], 0
        for token, (start, stop) in self._reserved_tokens(encoding):
            ids += [*self._spell(rendered[end:start].translate(way_back)).ids, token]
            end = stop
        return ids + self._spell(rendered[end:].translate(way_back)).ids

    def render_chat(self, text: str, *, history: Sequence[Mapping[str, str]] = (), answer: str = "") -> str:
        """The same conversation as a text to look at: what is reserved in it may be the template's or a message's."""
        return self._render(_messages(text, history)) + answer

    def encode_raw(self, text: str) -> list[int]:
        """Ids of a text without a chat template, with what the checkpoint's tokenizer puts around any text (a BOS).

        Raises ValueError if the text is empty.
        """
        _check_unicode(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        if self._reserved_tokens(encoding):
            encoding = self._spell(text)
        if not encoding.ids:
            raise ValueError("empty prompt: the text has no token")
        return self._backend.post_process(encoding, add_special_tokens=True).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special tokens, and ids that the tokenizer does not know, have none."""
        kept = [i for i in map(int, ids) if i not in self._dropped]
        return self._backend.decode(kept, skip_special_tokens=False)

    def holding(self, wanted: Collection[int]) -> np.ndarray:
        """Of each token id, as booleans [vocab_size]: whether its text may hold one of some bytes."""
        if not self._byte_level:
            return np.ones(self._vocab_size, np.bool_)
        characters = {character for character, byte in _BYTES.items() if byte in wanted}
        names = self._backend.get_vocab(with_added_tokens=False)
        ids = [i for name, i in names.items() if not characters.isdisjoint(name)]
        holds = np.zeros(max(self._vocab_size, self.size), np.bool_)
        holds[[*ids, *self._backend.get_added_tokens_decoder()]] = True
        return holds

    def pieces(self, ids: Iterable[int]) -> list[str]:
        r"""One readable string for each token: special tokens by name, bytes that are no whole character as \xNN."""
        return [self._piece(int(i)) for i in ids]

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ValueError unless `ids` can be a prompt: not empty, all in the model's vocabulary, none the mask."""
        if not len(ids):
            raise ValueError("empty prompt: give at least one token id")
        faults = []
        if outside := [f"{i} at position {n}" for n, i in enumerate(ids) if not 0 <= i < self._vocab_size]:
            faults.append(f"ids outside the vocabulary (0 to {self._vocab_size - 1}): {_first(outside)}")
        if masks := [str(n) for n, i in enumerate(ids) if i == self.mask_id]:
            faults.append(f"the mask id {self.mask_id}, which only a response may hold, at position {_first(masks)}")
        if faults:
            raise ValueError("these ids cannot be a prompt: " + "; ".join(faults))

    def _reserved_tokens(self, encoding: tokenizers.Encoding) -> list[tuple[int, tuple[int, int]]]:
        """The reserved tokens of an encoding: id, and start and stop in the text."""
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [(token, span) for token, span in pairs if token in self._reserved]

    def _hide(self, texts: Sequence[str]) -> tuple[list[str], dict[int, str]]:
        """Every reserved string in the texts as one character that they do not contain, and the table back.

        A template can move and trim the texts, but it sees nothing reserved in them; nor does the tokenizer, which
        says by its own rules (normalization, stripping) what is.
        """
        spans = []
        for text in texts:
            _check_unicode(text)
            found = self._reserved_tokens(self._backend.encode(text, add_special_tokens=False))
            spans.append([span for _, span in found])
        strings = {text[start:stop] for text, found in zip(texts, spans, strict=True) for start, stop in found}
        taken = set().union(*texts)
        private = (chr(code) for code in range(0xE000, 0x110000) if chr(code) not in taken)
        characters = dict(zip(sorted(strings), private, strict=False))
        hidden = []
        for text, found in zip(texts, spans, strict=True):
            parts, end = [], 0
            for start, stop in found:
                parts += [text[end:start], characters[text[start:stop]]]
                end = stop
            hidden.append("".join([*parts, text[end:]]))
        return hidden, {ord(character): string for string, character in characters.items()}

    def _spell(self, text: str) -> tokenizers.Encoding:
        """Text in ordinary tokens, whatever it contains."""
        encoding = self._plain.encode(text, add_special_tokens=False)
        if found := self._reserved_tokens(encoding):
            names = ", ".join(sorted({repr(self._piece(token)) for token, _ in found}))
            raise ValueError(f"the prompt contains {names}, which this tokenizer cannot write as text: remove it")
        return encoding

    def _render(self, messages: list[dict[str, str]]) -> str:
        if not self._hf.chat_template:
            raise ValueError(f"{self._directory} has no chat template: use --raw (encode_raw) for a model without one")
        try:
            return self._hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of the checkpoint's and can fail in any way
            raise ValueError(f"the chat template in {self._directory} failed: {error}") from error

    def _piece(self, token: int) -> str:
        name = self._backend.id_to_token(token)
        if name is None:
            return f"<{token}>"
        if token in self._reserved or not self._byte_level or not all(character in _BYTES for character in name):
            return name
        return bytes(_BYTES[character] for character in name).decode("utf-8", errors="backslashreplace")


def _load(directory: Path) -> Any:
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(f"no {TOKENIZER_FILE} in {directory}: a checkpoint directory must hold its tokenizer")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else it complains on stderr where torch is absent
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the Rust reader raises a bare Exception
        raise ValueError(
            f"the tokenizer in {directory} cannot be read ({path.name} or its settings; "
            f"{type(error).__name__}: {error})"
        ) from error


def _without_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer with the same model, to which no string is special."""
    plain = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def _messages(text: str, history: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if not text.strip():
        raise ValueError("empty prompt: give a text that is not blank")
    return [*map(_checked, history), {"role": "user", "content": text}]


def _checked(message: Mapping[str, str]) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(f"a message needs a role ({', '.join(ROLES)}) and a text as content, not {dict(message)}")
    return {"role": role, "content": content}


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(f"the prompt is not valid Unicode: U+{code:04X} at character {error.start}") from error


def _first(items: Sequence[str], limit: int = 5) -> str:
    return ", ".join(items[:limit]) + (f" and {len(items) - limit} more" if len(items) > limit else "")
