"""What lm-evaluation-harness gives as contexts, and its pairs of context and continuation, as token ids."""

from collections.abc import Mapping, Sequence
from typing import Self

from fdllm_jax.tokenizer import Tokenizer


class Conversation(str):
    """A conversation as the chat template writes it, which knows its messages.

    The harness passes on what `apply_chat_template` returns as a context. From the text alone nobody could say which of
    its special tokens are the template's, and which were typed in a message and are text.
    """

    messages: Sequence[Mapping[str, str]]
    answer: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], *, begun: bool) -> Self:
        """The conversation up to the answer, which the last message begins if `begun`.

        messages: each with role (system, user or assistant) and content; the last, but for an answer that is begun, is
        the user's. Raises ValueError for others.
        """
        messages, answer = (messages[:-1], messages[-1]["content"]) if begun else (messages, "")
        if not messages or messages[-1].get("role") != "user":
            roles = ", ".join(str(message.get("role")) for message in messages) or "nobody"
            raise ValueError(f"a conversation with messages of {roles}: expected the last one of the user")
        *history, last = messages
        conversation = cls(tokenizer.render_chat(last["content"], history=history, answer=answer))
        conversation.messages, conversation.answer = messages, answer
        return conversation

    def token_ids(self, tokenizer: Tokenizer, continuation: str = "") -> list[int]:
        """Token ids of the conversation and of what the answer goes on with."""
        *history, last = self.messages
        return tokenizer.encode_chat(last["content"], history=history, answer=self.answer + continuation)


def prompt_of(tokenizer: Tokenizer, context: str) -> str | list[int]:
    """A context as a prompt for `LLM.stream(..., raw=True)`."""
    return context.token_ids(tokenizer) if isinstance(context, Conversation) else str(context)


def pair_of(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a context and of its continuation, which are those of the two as one text.

    As in the harness, spaces at the context's end are the continuation's (a conversation keeps its own). A token that
    spans both is the continuation's. The context may be empty. Raises ValueError for an empty continuation.
    """
    if not continuation:
        raise ValueError(f"an empty continuation of {context[-40:]!r}: expected a text")
    if isinstance(context, Conversation):
        before, whole = context.token_ids(tokenizer), context.token_ids(tokenizer, continuation)
    else:
        whole = tokenizer.encode_raw(context + continuation)
        context = context.rstrip()
        before = tokenizer.encode_raw(context) if context else []
    shared = 0
    while shared < min(len(before), len(whole) - 1) and before[shared] == whole[shared]:
        shared += 1
    return whole[:shared], whole[shared:]
