"""The decode loop: denoising steps as one `lax.while_loop` under one jit."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from fdllm_jax.decoding.methods import Method
from fdllm_jax.decoding.state import DecodeState


@partial(jax.jit, static_argnames=("graphdef", "method"), donate_argnames="state")
def run(
    parameters: nnx.State,
    state: DecodeState,
    max_steps: Int[Array, ""],
    min_ended: Int[Array, ""] | int = 1,
    *,
    graphdef: nnx.GraphDef,
    method: Method,
) -> DecodeState:
    """Step until `min_ended` slots have finished, or none is live, or `max_steps` steps are done.

    The state is donated.
    """
    model = nnx.merge(graphdef, parameters)
    live_at_start = state.live

    def going(carry: tuple[Array, DecodeState]) -> Array:
        done, state = carry
        ended = jnp.sum(state.live != live_at_start)
        return (done < max_steps) & jnp.any(state.live) & (ended < min_ended)

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        done, state = carry
        return done + 1, method.step(model, state)

    return jax.lax.while_loop(going, body, (jnp.int32(0), state))[1]
