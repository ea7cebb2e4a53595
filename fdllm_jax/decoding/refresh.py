"""Refresh policies: from the state to the query of the next forward."""

import jax.numpy as jnp

from fdllm_jax.decoding.state import DecodeState
from fdllm_jax.query import Query, full_query


def everything(state: DecodeState) -> Query:
    """Every position of every live slot: no cached row outlives the step."""
    return full_query(state.tokens, state.live_kv_length)


def unconditional(state: DecodeState, mask_token_id: int) -> Query:
    """The same with the prompt masked out, for classifier-free guidance."""
    in_prompt = jnp.arange(state.tokens.shape[1])[None] < state.request.prompt_length[:, None]
    return full_query(jnp.where(in_prompt, mask_token_id, state.tokens), state.live_kv_length)
