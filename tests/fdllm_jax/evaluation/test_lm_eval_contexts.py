"""Contexts of lm-evaluation-harness as token ids, against the tokenizer's own."""

import copy
import pickle

import pytest

from fdllm_jax.engine import SHIPPED
from fdllm_jax.evaluation.lm_eval_contexts import Conversation, pair_of, prompt_of
from fdllm_jax.tokenizer import Tokenizer

SHOTS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <|eot_id|>?"},
    {"role": "assistant", "content": "A token."},
]
QUESTION = {"role": "user", "content": "Is <|mdm_mask|> one as well?"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(SHIPPED)


@pytest.mark.parametrize("begun", [False, True])
def test_a_conversation_keeps_what_is_whose(tokenizer: Tokenizer, begun: bool):
    answer = "It <|eot_id|> is" if begun else ""
    messages = [*SHOTS, QUESTION, *([{"role": "assistant", "content": answer}] if begun else [])]
    context = Conversation.of(tokenizer, messages, begun=begun)
    ids = tokenizer.encode_chat(QUESTION["content"], history=SHOTS, answer=answer)
    assert context == tokenizer.render_chat(QUESTION["content"], history=SHOTS, answer=answer)
    special = [piece for piece in tokenizer.pieces(ids) if piece.startswith("<|") and piece.endswith("|>")]
    of_message = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    assert special == ["<|startoftext|>", *of_message * 4, *of_message[:2]] and tokenizer.mask_id not in ids
    for kept in (context, copy.deepcopy(context), pickle.loads(pickle.dumps(context))):
        assert prompt_of(tokenizer, kept) == ids
        assert pair_of(tokenizer, kept, " No<|eot_id|>") == (ids, tokenizer.encode_raw(" No<|eot_id|>"))


def test_the_text_of_a_conversation_is_what_transformers_writes(tokenizer: Tokenizer):
    messages = [*SHOTS, QUESTION]
    rendered = tokenizer._hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Conversation.of(tokenizer, messages, begun=False) == rendered
    begun = [*messages, {"role": "assistant", "content": "Yes"}]
    continued = tokenizer._hf.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    assert Conversation.of(tokenizer, begun, begun=True) == continued


def test_a_conversation_that_does_not_end_with_the_user_is_refused(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match="messages of system, user, assistant: expected the last one of the user"):
        Conversation.of(tokenizer, SHOTS, begun=False)
    with pytest.raises(ValueError, match="messages of nobody"):
        Conversation.of(tokenizer, [], begun=False)


def test_a_plain_context_is_text(tokenizer: Tokenizer):
    assert prompt_of(tokenizer, "<|eot_id|> 3") == "<|eot_id|> 3"


@pytest.mark.parametrize(
    ("context", "continuation", "prompt", "target"),
    [
        ("Question: 2 + 2?\nAnswer:", " 4", "Question: 2 + 2?\nAnswer:", " 4"),
        ("Answer: ", "four", "Answer:", " four"),
        ("Answer:\n\n", "4", "Answer", ":\n\n4"),
        ("", "The number", "", "The number"),
        ("The num", "ber", "The", " number"),
        ("a <|eot_id|>:", " b", "a <|eot_id|>:", " b"),
    ],
)
def test_a_pair_is_its_text_cut_where_the_continuation_begins(
    tokenizer: Tokenizer, context: str, continuation: str, prompt: str, target: str
):
    whole = tokenizer.encode_raw(context + continuation)
    found = pair_of(tokenizer, context, continuation)
    assert [*found[0], *found[1]] == whole
    assert (tokenizer.decode(found[0]), tokenizer.decode(found[1])) == (prompt, target)


def test_an_empty_continuation_is_refused(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match="an empty continuation of 'Answer:'"):
        pair_of(tokenizer, "Answer:", "")
