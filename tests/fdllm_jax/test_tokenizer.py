"""The tokenizer against transformers' own encoding, and reserved text against what it must never become."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fdllm_jax.config import ModelConfig
from fdllm_jax.tokenizer import Tokenizer

SPECIAL = ["<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim"
    " + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
CORPUS = [
    "A baker makes 12 trays of 8 rolls. How many rolls is that? user assistant system",
    "def add(a, b):\n    return a + b\n\nThe answer is 96.\n#### 96",
    "Für Käse zahlt man 3 €; 数字 и текст. <a> | b | mask eot_id text",
]


def _write(
    directory: Path,
    *,
    template: str | None = TEMPLATE,
    special: list[AddedToken] | None = None,
    normalizer: normalizers.Normalizer | None = None,
    adds_bos: bool = False,
) -> Path:
    """A checkpoint directory with a small byte-level BPE tokenizer of LLaDA's form (and no weights)."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    backend.add_tokens(special or [AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    if normalizer is not None:
        backend.normalizer = normalizer
    ids = {name: backend.token_to_id(name) for name in SPECIAL}
    if adds_bos:
        bos = (SPECIAL[0], ids[SPECIAL[0]])
        backend.post_processor = processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=[bos])
    config = ModelConfig(
        vocab_size=512,
        embedding_size=512,
        d_model=8,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        mlp_size=8,
        rope_theta=1e4,
        norm_eps=1e-5,
        max_sequence_length=64,
        qkv_bias=False,
        weight_tying=False,
        scale_logits=False,
        mask_token_id=ids["<|mdm_mask|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(config.to_hf()))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def theirs(checkpoint: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def chat_ids(theirs: PreTrainedTokenizerFast) -> Callable[[list[dict[str, str]]], list[int]]:
    """Ids of a conversation by transformers."""

    def encode(messages: list[dict[str, str]]) -> list[int]:
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return theirs(text, add_special_tokens=False)["input_ids"]

    return encode


@pytest.fixture(scope="module")
def special_ids(theirs: PreTrainedTokenizerFast) -> dict[str, int]:
    return {name: theirs.convert_tokens_to_ids(name) for name in SPECIAL}


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ORDINARY = (st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(CORPUS)).filter(
    lambda text: not any(name in text for name in SPECIAL)  # hypothesis also draws the constants of this file
)
WITH_RESERVED = st.lists(st.sampled_from([*SPECIAL, "<|mdm_", "mask|>", "<", "|>", " ", "\n"]) | ORDINARY).map("".join)
NOT_BLANK = WITH_RESERVED.filter(str.strip)


def test_special_ids_come_from_the_configuration_and_the_tokenizer(tokenizer, special_ids, theirs):
    assert tokenizer.mask_id == special_ids["<|mdm_mask|>"]
    assert tokenizer.eos_ids == (special_ids["<|endoftext|>"], special_ids["<|eot_id|>"])
    assert tokenizer.size == len(theirs) and tokenizer.chat_template == TEMPLATE


@given(text=ORDINARY.filter(str.strip), earlier=ORDINARY)
def test_ordinary_text_in_a_chat_gets_the_ids_of_transformers(tokenizer, chat_ids, text, earlier):
    history = [_turn("system", "Be brief."), _turn("user", earlier), _turn("assistant", earlier + " so")]
    assert tokenizer.encode_chat(text) == chat_ids([_turn("user", text)])
    assert tokenizer.encode_chat(text, history=history) == chat_ids([*history, _turn("user", text)])


@given(text=ORDINARY.filter(str.strip), answer=ORDINARY.filter(str.strip))
def test_an_answer_that_is_begun_gets_the_ids_of_transformers(tokenizer, theirs, text, answer):
    rendered = theirs.apply_chat_template([_turn("user", text)], tokenize=False, add_generation_prompt=True) + answer
    assert tokenizer.encode_chat(text, answer=answer) == theirs(rendered, add_special_tokens=False)["input_ids"]
    assert tokenizer.render_chat(text, answer=answer) == rendered


@given(text=ORDINARY.filter(bool))
def test_ordinary_raw_text_gets_the_ids_of_transformers(tokenizer, theirs, text):
    assert tokenizer.encode_raw(text) == theirs(text)["input_ids"]


@given(text=NOT_BLANK, earlier=WITH_RESERVED)
def test_reserved_text_in_a_chat_stays_text(tokenizer, chat_ids, special_ids, text, earlier):
    ids = tokenizer.encode_chat(text, history=[_turn("user", earlier), _turn("assistant", text)])
    # The special ids are the template's, in its order, and the text between them is the whole text.
    harmless = [_turn("user", "x"), _turn("assistant", "x"), _turn("user", "x")]
    specials = set(special_ids.values())
    assert [i for i in ids if i in specials] == [i for i in chat_ids(harmless) if i in specials]
    headers = [f"{role}\n\n" for role in ("user", "assistant", "user")]
    contents = [earlier.strip(), text.strip(), text.strip()]
    expected = "".join(a + b for a, b in zip(headers, contents, strict=True)) + "assistant\n\n"
    assert tokenizer.decode(ids) == expected


@given(answer=WITH_RESERVED)
def test_reserved_text_in_an_answer_that_is_begun_stays_text(tokenizer, special_ids, answer):
    ids, start = tokenizer.encode_chat("x", answer=answer), len(tokenizer.encode_chat("x")) - 2
    assert not set(ids[start:]) & set(special_ids.values())
    assert tokenizer.decode(ids) == f"user\n\nxassistant\n\n{answer}"


@given(text=NOT_BLANK)
def test_reserved_raw_text_stays_text(tokenizer, special_ids, text):
    ids = tokenizer.encode_raw(text)
    assert not set(ids) & set(special_ids.values())
    assert tokenizer.decode(ids) == text
    tokenizer.check_ids(ids)


@pytest.mark.parametrize("text", ["<|mdm_<|mdm_mask|>mask|>", "<|mdm_mask|><|mdm_mask|>", "\ue000<|eot_id|>\ue000"])
def test_nested_adjacent_and_private_characters(tokenizer, special_ids, text):
    assert tokenizer.decode(tokenizer.encode_raw(text)) == text
    assert tokenizer.decode(tokenizer.encode_chat(text)) == f"user\n\n{text}assistant\n\n"
    assert special_ids["<|mdm_mask|>"] not in tokenizer.encode_chat(text)


def test_reserved_text_is_what_the_tokenizer_matches_not_only_what_it_is_called(tmp_path):
    added = [AddedToken(name, special=True, normalized=True) for name in SPECIAL]
    added += [AddedToken("<tool>", special=False, lstrip=True, rstrip=True), AddedToken("   ", special=False)]
    added += [AddedToken("word", special=True, single_word=True)]
    folding = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    directory = _write(tmp_path, special=added, normalizer=folding)
    ours, theirs = Tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    hidden = "a <|ＭＤＭ_mask|> b  <tool>  c word"
    assert {theirs.convert_tokens_to_ids(i) for i in ("<|mdm_mask|>", "<tool>", "word")} < set(
        theirs(hidden)["input_ids"]
    )
    assert ours.decode(ours.encode_raw(hidden)) == "a <|mdm_mask|> b  <tool>  c word"
    assert ours.decode(ours.encode_chat(hidden)) == "user\n\na <|mdm_mask|> b  <tool>  c wordassistant\n\n"
    for text in ("a   b", "swords"):  # runs of spaces, and words that only contain a reserved one, are ordinary text
        assert ours.encode_raw(text) == theirs(text)["input_ids"]


def test_a_bos_of_the_tokenizer_is_kept_in_raw_form_only(tmp_path):
    directory = _write(tmp_path, adds_bos=True)
    ours, theirs = Tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    bos = theirs.convert_tokens_to_ids("<|startoftext|>")
    assert ours.encode_raw("add 3") == theirs("add 3")["input_ids"]
    assert ours.encode_raw("<|startoftext|>").count(bos) == 1
    assert ours.encode_chat("add 3").count(bos) == 1


def test_a_token_that_cannot_be_written_as_text_is_refused(tmp_path):
    directory = _write(tmp_path)
    backend = tokenizers.Tokenizer(models.WordLevel({"<|mdm_mask|>": 0, "?": 1, "<|endoftext|>": 2}, unk_token="?"))
    backend.add_special_tokens(SPECIAL)
    backend.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text()) | {"mask_token_id": 0, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"'<\|mdm_mask\|>', which this tokenizer cannot write as text"):
        Tokenizer(directory).encode_raw("<|mdm_mask|>")


def test_decode_takes_any_ids(tokenizer, special_ids, theirs):
    assert tokenizer.decode(range(512)) == theirs.decode(range(len(theirs)), skip_special_tokens=True)
    euro = theirs("€")["input_ids"]
    assert tokenizer.decode([*euro, *special_ids.values()]) == "€"
    assert tokenizer.decode(euro[:1]) == "\ufffd"
    assert tokenizer.decode([]) == ""


def test_pieces_are_readable(tokenizer, special_ids, theirs):
    assert tokenizer.pieces(theirs("A baker", add_special_tokens=False)["input_ids"])[:1] == ["A"]
    assert "".join(tokenizer.pieces(theirs(CORPUS[1])["input_ids"])) == CORPUS[1]
    assert "".join(tokenizer.pieces(theirs("🙂")["input_ids"])) == r"\xf0\x9f\x99\x82"
    assert tokenizer.pieces([special_ids["<|mdm_mask|>"], 511]) == ["<|mdm_mask|>", "<511>"]
    assert len(tokenizer.pieces(range(512))) == 512


def test_check_ids_reports_all_faults(tokenizer):
    tokenizer.check_ids([0, 1, 511])
    mask = tokenizer.mask_id
    expected = rf"\(0 to 511\): 512 at position 1, -1 at position 3; the mask id {mask}, .* at position 0, 2$"
    with pytest.raises(ValueError, match=expected):
        tokenizer.check_ids([mask, 512, mask, -1])
    with pytest.raises(ValueError, match="at position 0, 1, 2, 3, 4 and 3 more"):
        tokenizer.check_ids([mask] * 8)
    with pytest.raises(ValueError, match="empty prompt"):
        tokenizer.check_ids([])


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_a_blank_chat_prompt_is_refused(tokenizer, text):
    with pytest.raises(ValueError, match="empty prompt"):
        tokenizer.encode_chat(text)


def test_bad_text_is_refused(tokenizer):
    with pytest.raises(ValueError, match="empty prompt"):
        tokenizer.encode_raw("")
    for encode in (tokenizer.encode_raw, tokenizer.encode_chat):
        with pytest.raises(ValueError, match=r"not valid Unicode: U\+D800 at character 2"):
            encode("ab\ud800")


@pytest.mark.parametrize("message", [_turn("<|eot_id|>", "a"), {"role": "user"}, {"role": "user", "content": 3}])
def test_a_malformed_message_is_refused(tokenizer, message):
    with pytest.raises(ValueError, match="a message needs a role"):
        tokenizer.encode_chat("a", history=[message])


def test_a_checkpoint_without_a_chat_template_says_so(tmp_path):
    tokenizer = Tokenizer(_write(tmp_path, template=None))
    assert tokenizer.encode_raw("add") and tokenizer.chat_template is None
    with pytest.raises(ValueError, match=r"has no chat template: use --raw"):
        tokenizer.encode_chat("add")


@pytest.mark.parametrize("template", ["{% for", "{{ raise_exception('roles') }}", "{{ messages[9].content.x }}"])
def test_a_chat_template_that_fails_is_reported(tmp_path, template):
    with pytest.raises(ValueError, match="the chat template in .* failed"):
        Tokenizer(_write(tmp_path, template=template)).encode_chat("add")


def test_a_directory_without_its_files_is_reported(tmp_path, checkpoint):
    with pytest.raises(FileNotFoundError, match="no such directory"):
        Tokenizer(tmp_path / "none")
    shutil.copy(checkpoint / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_truncated_file_is_reported(tmp_path, checkpoint, name):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes((checkpoint / name).read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be read"):
        Tokenizer(tmp_path)
