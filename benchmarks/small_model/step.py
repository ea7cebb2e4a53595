"""The loss of a batch and the update of the weights, jitted for a whole cycle of batches on every local device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt16

from benchmarks.small_model import noise
from benchmarks.small_model.weights import Weights, unpack
from fdllm_jax.config import ModelConfig
from fdllm_jax.model import from_parameters
from pallas_kernels.implementation import precision_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Sequences of one length: `steps` of a cycle's steps, and the most positions of a sequence that are predicted."""

    length: int
    steps: int
    predicted: int

    def batch(self, tokens: int, devices: int) -> int:
        """Sequences in a batch of about `tokens` tokens: the same number, and even, on every device."""
        return max(1, tokens // self.length // (2 * devices)) * 2 * devices


class Pool(NamedTuple):
    """Sequences of one bin to draw from, the first `filled` rows; see `noise.Sequence` for prompt and length."""

    token: UInt16[Array, "rows length"]
    prompt: Int[Array, "rows"]
    length: Int[Array, "rows"]
    filled: Int[Array, ""]


class State(NamedTuple):
    """All that training goes on from."""

    weights: Weights
    optimizer: optax.OptState
    step: Int[Array, ""]


class Batch(NamedTuple):
    """Clean tokens, what the model sees, valid lengths, and the predicted positions as one-hot rows with weights."""

    token: Int[Array, "batch length"]
    seen: Int[Array, "batch length"]
    valid: Int[Array, "batch"]
    place: Array  # bool [batch, predicted, length]
    weight: Float[Array, "batch predicted"]


class Losses(NamedTuple):
    """Mean loss of the two halves of a batch: `noise.anywhere` and `noise.window`."""

    anywhere: Float[Array, ""]
    window: Float[Array, ""]


def draw(key: PRNGKeyArray, pool: Pool, sample: Int[Array, "batch"], batch: int, bin: Bin, mask_id: int) -> Batch:
    """Samples number `sample` of a batch of `batch`, each a function of the key and its number alone.

    Even samples get LLaDA's noise, odd ones windows. A batch's masking rates are evenly spaced from a random start.
    """
    rate_key, sample_key = jax.random.split(key)
    start = jax.random.uniform(rate_key)

    def one(number: Array):
        row_key, valid_key, noise_key, pick_key = jax.random.split(jax.random.fold_in(sample_key, number), 4)
        row = jax.random.randint(row_key, (), 0, pool.filled)
        token = pool.token[row].astype(jnp.int32)
        valid = noise.valid_length(valid_key, pool.length[row], bin.length)
        sequence = noise.Sequence(pool.prompt[row], pool.length[row], valid)
        rate = (start + (number // 2) / (batch // 2)) % 1.0
        noises = (scheme(noise_key, sequence, rate, bin.length) for scheme in (noise.anywhere, noise.window))
        masked, weight = jax.tree.map(partial(jnp.where, number % 2 == 0), *noises)
        place, picked = noise.pick(pick_key, weight, bin.predicted)
        return Batch(token, jnp.where(masked, mask_id, token), valid, place, picked)

    return jax.vmap(one)(sample)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(
    table: Float[Array, "vocab d"], token: Int[Array, "*rows"], common: tuple[int, ...]
) -> Float[Array, "*rows d"]:
    """table[token]. In its gradient the `common` ids are summed by a matrix product, not scattered one by one."""
    return table[token]


def _embed_forward(table: Array, token: Array, common: tuple[int, ...]):
    return table[token], (table, token)


def _embed_backward(common: tuple[int, ...], saved: tuple[Array, Array], gradient: Array):
    table, token = saved[0], saved[1].reshape(-1)
    gradient = gradient.reshape(len(token), -1)
    is_common = token[:, None] == jnp.array(common)[None]
    scattered = jnp.where(jnp.any(is_common, axis=1), len(table), token)  # out of range: dropped
    out = jnp.zeros(table.shape, jnp.float32).at[scattered].add(gradient.astype(jnp.float32), mode="drop")
    sums = jnp.einsum(
        "nc,nd->cd",
        is_common.astype(gradient.dtype),
        gradient,
        precision=precision_of(gradient.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.at[jnp.array(common)].set(sums).astype(table.dtype), None


embed.defvjp(_embed_forward, _embed_backward)


def hidden_states(config: ModelConfig, parameters: dict[str, Array], token: Array, valid: Array) -> Array:
    """Normalised activations [batch, length, d_model] of sequences whose first `valid` positions are attended."""
    x = jnp.asarray(embed(parameters["embedding"], token, (config.mask_token_id, config.eos_token_id)))
    cudnn = jax.default_backend() == "gpu" and x.dtype.itemsize == 2  # it knows no fp32
    attention = partial(
        jax.nn.dot_product_attention, key_value_seq_lengths=valid, implementation="cudnn" if cudnn else "xla"
    )
    return from_parameters(config, parameters).dense(x, attention)


def cross_entropy(logits: Float[Array, "*rows vocab"], target: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    """-log softmax at the target, in fp32, without a gather (whose gradient would be a scatter)."""
    at_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == target[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(at_target, logits, 0.0), axis=-1)


def sequence_losses(config: ModelConfig, weights: Weights, batch: Batch, dtype: jnp.dtype) -> Float[Array, "batch"]:
    """The loss of every sequence, computed in `dtype`; the head sees the predicted positions only."""
    parameters = {name: value.astype(dtype) for name, value in unpack(config, weights).items()}
    hidden = hidden_states(config, parameters, batch.seen, batch.valid)
    rows = jnp.einsum(
        "bpl,bld->bpd",
        batch.place.astype(dtype),
        hidden,
        precision=precision_of(hidden.dtype),
        preferred_element_type=dtype,
    )
    target = jnp.sum(jnp.where(batch.place, batch.token[:, None], 0), axis=-1)
    logits = from_parameters(config, parameters).logits(rows)
    return jnp.sum(batch.weight * cross_entropy(logits, target), axis=-1)


def make_cycle(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    bins: tuple[Bin, ...],
    mesh: Mesh,
    *,
    tokens: int,
    seed: int,
    dtype: jnp.dtype,
) -> Callable[[State, tuple[Pool, ...]], tuple[State, tuple[Losses, ...]]]:
    """(state, pools) -> (state, losses of each bin's steps): the cycle's batches one after another, jitted.

    A batch is about `tokens` tokens, shared out over the mesh's axis "data"; weights and pools are on every device.
    A step's randomness is a function of (seed, step). The state is donated.
    """
    devices = mesh.shape["data"]

    def step(pool: Pool, bin: Bin, state: State) -> tuple[State, Losses]:
        batch = bin.batch(tokens, devices)
        share = batch // devices
        sample = jax.lax.axis_index("data") * share + jnp.arange(share)
        drawn = draw(
            jax.random.fold_in(jax.random.key(seed), state.step), pool, sample, batch, bin, config.mask_token_id
        )

        def loss(weights: Weights) -> tuple[Array, Losses]:
            each = sequence_losses(config, weights, drawn, dtype)
            return jnp.sum(each) / batch, Losses(jnp.sum(each[0::2]) / (batch // 2), jnp.sum(each[1::2]) / (batch // 2))

        gradient, losses = jax.lax.psum(jax.grad(loss, has_aux=True)(state.weights), "data")
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.weights)
        weights = cast(Weights, optax.apply_updates(state.weights, updates))
        return State(weights, optimizer_state, state.step + 1), losses

    def cycle(state: State, pools: tuple[Pool, ...]) -> tuple[State, tuple[Losses, ...]]:
        losses = []
        for pool, bin in zip(pools, bins, strict=True):
            state, of_bin = jax.lax.scan(lambda carry, _, p=pool, b=bin: step(p, b, carry), state, length=bin.steps)
            losses.append(of_bin)
        return state, tuple(losses)

    everywhere = PartitionSpec()
    return jax.jit(
        jax.shard_map(cycle, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False), donate_argnums=0
    )


def held_out_losses(
    config: ModelConfig, bins: tuple[Bin, ...], *, batch: int, dtype: jnp.dtype
) -> Callable[[Weights, tuple[Pool, ...], PRNGKeyArray], tuple[Losses, ...]]:
    """(weights, pools, key) -> the losses of `batch` sequences of each bin, without an update; jitted."""

    def one(weights: Weights, pool: Pool, key: PRNGKeyArray, bin: Bin) -> Losses:
        each = sequence_losses(
            config, weights, draw(key, pool, jnp.arange(batch), batch, bin, config.mask_token_id), dtype
        )
        return Losses(jnp.mean(each[0::2]), jnp.mean(each[1::2]))

    return jax.jit(
        lambda weights, pools, key: tuple(one(weights, pool, key, bin) for pool, bin in zip(pools, bins, strict=True))
    )
