"""The decode loop: query, forward, commit, refresh, as one `lax.while_loop` under one jit."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from fdllm_jax.decoding import refresh
from fdllm_jax.decoding.methods import Method, Window
from fdllm_jax.decoding.state import DecodeState, Trace
from fdllm_jax.model import LLaDA
from fdllm_jax.sampling import Prediction, gumbel, predict


def step(model: LLaDA, state: DecodeState, method: Method) -> DecodeState:
    """One denoising step of every live slot."""
    window = method.window(state)
    logits, state = _window_logits(model, state, method, window)
    prediction = _predict(logits, state, method, window)
    committed, rule = method.commit(state, window, prediction)
    state = _write(state, window, prediction, committed & state.live[:, None], rule)
    state = replace(state, step=state.step + state.live.astype(jnp.int32))
    return method.advance(state)


@partial(jax.jit, static_argnames=("graphdef", "method"), donate_argnames="state")
def run(
    parameters: nnx.State, state: DecodeState, max_steps: Int[Array, ""], *, graphdef: nnx.GraphDef, method: Method
) -> DecodeState:
    """Step until a slot has finished or `max_steps` steps are done. The state is donated."""
    model = nnx.merge(graphdef, parameters)
    live_at_start = state.live

    def going(carry: tuple[Array, DecodeState]) -> Array:
        done, state = carry
        return (done < max_steps) & jnp.any(state.live) & jnp.all(state.live == live_at_start)

    def body(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        done, state = carry
        return done + 1, step(model, state, method)

    return jax.lax.while_loop(going, body, (jnp.int32(0), state))[1]


def _window_logits(
    model: LLaDA, state: DecodeState, method: Method, window: Window
) -> tuple[Float[Array, "slots window vocab"], DecodeState]:
    """Logits of the window's rows after a full pass; with guidance, of two."""
    capacity = state.tokens.shape[1]
    slot = jnp.arange(len(state.tokens))[:, None]
    row = slot * capacity + jnp.minimum(window.position, capacity - 1)

    output = model(refresh.everything(state), state.cache)
    logits = model.logits(output.hidden[row])
    if method.guided:
        # The guided method refreshes every row in every pass, so the passes can share the cache.
        output = model(refresh.unconditional(state, model.config.mask_token_id), output.cache)
        unconditional = model.logits(output.hidden[row])
        scale = state.request.cfg_scale[:, None, None]
        logits = unconditional + (scale + 1) * (logits - unconditional)
    passes = 2 if method.guided else 1
    return logits, replace(state, cache=output.cache, forwards=state.forwards + passes * state.live.astype(jnp.int32))


def _predict(logits: Array, state: DecodeState, method: Method, window: Window) -> Prediction:
    if method.banned:
        logits = logits.at[..., jnp.array(method.banned)].set(-jnp.inf)
    request = state.request
    noise_step = state.step if method.stepwise_noise else jnp.zeros_like(state.step)

    def with_noise(logits: Array) -> Prediction:
        noise = gumbel(request.seed, noise_step, window.position, logits.shape[-1])
        return predict(logits, noise, request.temperature)

    def without_noise(logits: Array) -> Prediction:
        return predict(logits, None, request.temperature)

    return jax.lax.cond(jnp.any(state.live & (request.temperature > 0)), with_noise, without_noise, logits)


def _write(state: DecodeState, window: Window, prediction: Prediction, committed: Array, rule: Array) -> DecodeState:
    """Commit rows of the window: their tokens, and their entries in the trace."""
    slot = jnp.arange(len(state.tokens))[:, None]
    position = jnp.where(committed, window.position, state.tokens.shape[1])

    def put(array: Array, value: Array) -> Array:
        return array.at[slot, position].set(value, mode="drop")

    return replace(
        state,
        tokens=put(state.tokens, prediction.token),
        masked=put(state.masked, jnp.zeros_like(committed)),
        trace=Trace(
            step=put(state.trace.step, jnp.broadcast_to(state.step[:, None], position.shape)),
            rule=put(state.trace.rule, rule),
            confidence=put(state.trace.confidence, prediction.confidence),
        ),
    )
