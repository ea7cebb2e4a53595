"""A small model grown to a larger shape, computing the same function.

With x the small model's residual stream [d] and D = ratio * d the large one's width:

- The large stream is T x: every coordinate is copied `ratio` times, with random signs in random places. T / sqrt(ratio)
  has orthonormal columns, so RMS and epsilon are unchanged. What writes to the stream is T @ weight; norm weights are
  1; what reads a norm, the head included, is (weight * norm weight) @ T.T / ratio. All of these are dense.
- Heads and MLP units are repeated, and out- and down-projections divided by the number.
- Idle copies of a layer stand before it. Their repeated heads and units have alternating signs in the out- and
  down-projections, and cancel: attention, tracking scores and what a cache holds are the small model's.
- T has entries of +-1 because of bf16. Embeddings, out- and down-projections are then exact where ratios are powers of
  two, a copy rounds as its original does, and idle layers leave the stream as it is, bit for bit. Only weight * norm
  weight is rounded: its copies one after the other, each with the error of those before it, so that their sum has about
  log2(ratio) bits more than one of them. The logits' RMS error at LLaDA-8B's shape in bf16, on text of the shipped
  model, is 0.049; the small model's own in bf16 is 0.056. (A Hadamard T, which averages the stream's rounding, has
  0.040 where this has 0.048, at a ratio of 4. It leaves no entries free for the next point.)
- Ids beyond the small vocabulary have random embeddings, the head row of [MASK], and no probability: at one coordinate
  a copy of +-2 stands for four of +-1, which leaves `FREE` entries of the stream. They hold the constant `BIAS`, too
  small to change a norm, and these ids' head rows alone read it, with the weight `PENALTY`. Without that they would
  matter by their number: 122,368 times the probability of [MASK] is above 1e-3 at one masked position in twenty.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fdllm_jax.config import ModelConfig

FREE = 3
BIAS = 2.0**-10  # beside the 0.3 of the other entries: in the mean square of 4096, less than fp32 can tell
PENALTY = -(2.0**20)  # times FREE * BIAS / RMS of the last layer's output: a logit of -3072 / RMS


class Shape(NamedTuple):
    """Sizes of the large model. Its heads have as many elements as the small one's."""

    d_model: int
    n_layers: int
    n_heads: int
    mlp_size: int
    vocab_size: int


LLADA_8B = Shape(d_model=4096, n_layers=32, n_heads=32, mlp_size=12288, vocab_size=126464)


class Ratios(NamedTuple):
    """How many times the small model's sizes the large one's are; `width` is that of d_model and of the heads."""

    width: int
    layers: int
    mlp: int


class Copies(NamedTuple):
    """T: entry k of the large stream is sign[k] * factor.flat[place[k]] times the coordinate place[k] % d.

    factor: of each copy and coordinate 1, 2 or 0 (free); a coordinate's squares add up to `ratio`.
    """

    factor: Float[Array, "ratio d"]
    place: Int[Array, "large_d"]
    sign: Float[Array, "large_d"]

    @property
    def coordinate(self) -> Int[Array, "large_d"]:
        """What each entry is a copy of."""
        return self.place % self.factor.shape[1]

    @property
    def scale(self) -> Float[Array, "large_d"]:
        """What it is multiplied by: 0 where an entry is free."""
        return self.sign * self.factor.reshape(-1)[self.place]


def ratios(config: ModelConfig, shape: Shape) -> Ratios:
    """Raises ValueError that names every field in which `config` cannot be grown to `shape`."""
    faults = [
        f"{name}={size} is not a multiple of the small model's {small}"
        for name, size in shape._asdict().items()
        if (small := getattr(config, name)) and name != "vocab_size" and (size < 1 or size % small)
    ]
    if shape.vocab_size < config.vocab_size:
        faults.append(f"vocab_size={shape.vocab_size} is below the small model's {config.vocab_size}")
    found = Ratios(
        shape.d_model // config.d_model, shape.n_layers // config.n_layers, shape.mlp_size // config.mlp_size
    )
    if not faults:
        if found.width <= FREE:
            faults.append(f"d_model={shape.d_model} is below {FREE + 1} times the small model's {config.d_model}")
        if shape.n_heads != found.width * config.n_heads:
            faults.append(
                f"n_heads={shape.n_heads} is not {found.width * config.n_heads}: heads have {config.head_dim} elements"
            )
        faults += [
            f"{name}={getattr(shape, name)} is {ratio} times the small model's: idle layers need an even number"
            for name, ratio in (("d_model", found.width), ("mlp_size", found.mlp))
            if found.layers > 1 and ratio % 2
        ]
    if faults:
        raise ValueError("the model cannot be grown to this shape: " + "; ".join(faults))
    return found


def expanded(
    config: ModelConfig, parameters: Mapping[str, Array], shape: Shape, seed: int, dtype: DTypeLike = jnp.bfloat16
) -> tuple[ModelConfig, Iterator[tuple[str, Array]]]:
    """The large model's configuration, and its parameters in the order of `parameter_shapes`, each made when asked for.

    config, parameters: of the small model. seed: of places, signs and embeddings; it gives the same ones on every
    backend. dtype: bfloat16 or float32. Raises ValueError as `ratios`.
    Besides what the caller keeps, the default device holds the parameter at hand and less than its size more: at
    LLaDA-8B's shape in bf16 1.0 GB for the embedding and for the head, 0.2 GB for any other.
    """
    of = ratios(config, shape)
    large = replace(
        config,
        **shape._asdict(),
        embedding_size=shape.vocab_size,
        n_kv_heads=of.width * config.n_kv_heads,
        weight_tying=False,
        scale_logits=False,
    )
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    return large, _parameters(config, parameters, large, of, rng, dtype)


def _parameters(
    config: ModelConfig,
    parameters: Mapping[str, Array],
    large: ModelConfig,
    of: Ratios,
    rng: np.random.Generator,
    dtype: jnp.dtype,
) -> Iterator[tuple[str, Array]]:
    small = {path: jnp.asarray(value, jnp.float32) for path, value in parameters.items()}
    copies, used = _copies(config.d_model, of.width, rng), config.vocab_size
    unused = large.vocab_size - used
    embedding = small["embedding"][:used]
    fill = jnp.std(embedding) * rng.standard_normal((unused, config.d_model), np.float32)
    yield "embedding", _embedding(jnp.concatenate([embedding, fill]), copies, dtype=dtype)
    del fill
    for i in range(large.n_layers):
        prefix, idle = f"layers.{i // of.layers}.", (i + 1) % of.layers > 0
        layer = {path.removeprefix(prefix): value for path, value in small.items() if path.startswith(prefix)}
        for name, value in _layer(config, layer, of, copies, idle=idle, dtype=dtype):
            yield f"layers.{i}.{name}", value
    yield "final_norm", jnp.ones(large.d_model, dtype)
    head = small.get("head", embedding)[:used] * (config.d_model**-0.5 if config.scale_logits else 1.0)
    row = jnp.concatenate([jnp.arange(used), jnp.full(unused, config.mask_token_id)])
    yield "head", _head(head, small["final_norm"], copies, row, used=used, dtype=dtype)


def _layer(
    config: ModelConfig, small: Mapping[str, Array], of: Ratios, copies: Copies, *, idle: bool, dtype: jnp.dtype
) -> Iterator[tuple[str, Array]]:
    query, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    ends = (query, query + kv, query + 2 * kv)
    norm = jnp.ones(len(copies.sign), dtype)
    yield "attn_norm", norm
    yield "qkv", _repeated(_read(small["qkv"], small["attn_norm"], copies, dtype=dtype), ends, of.width)
    if config.qkv_bias:
        yield "qkv_bias", _repeated(small["qkv_bias"].astype(dtype), ends, of.width)
    yield "attn_out", _write(small["attn_out"], _shares(of.width, idle), copies, dtype=dtype)
    yield "mlp_norm", norm
    gate_up = _read(small["gate_up"], small["mlp_norm"], copies, dtype=dtype)
    yield "gate_up", _repeated(gate_up, (config.mlp_size, 2 * config.mlp_size), of.mlp)
    yield "down", _write(small["down"], _shares(of.mlp, idle), copies, dtype=dtype)


def _copies(d: int, ratio: int, rng: np.random.Generator) -> Copies:
    factor = np.ones((ratio, d), np.float32)
    factor[: 1 + FREE, -1] = [2] + [0] * FREE
    place, sign = rng.permutation(ratio * d), rng.choice([-1.0, 1.0], ratio * d)
    return Copies(jnp.asarray(factor), jnp.asarray(place, jnp.int32), jnp.asarray(sign, jnp.float32))


def _shares(ratio: int, idle: bool) -> Float[Array, "ratio"]:
    """What each repetition of a head or unit has of its contribution to the stream; an idle layer's add up to 0."""
    return jnp.where(idle & (jnp.arange(ratio) % 2 == 1), -1.0, 1.0) / ratio


def _repeated(rows: Array, ends: Sequence[int], ratio: int) -> Array:
    """The rows up to the first of `ends` `ratio` times, then those up to the next, and so on."""
    pieces = [rows[start:end] for start, end in zip((0, *ends), ends, strict=False)]
    return jnp.concatenate([repeated for piece in pieces for repeated in [piece] * ratio])


@partial(jax.jit, static_argnames="dtype")
def _embedding(rows: Float[Array, "ids d"], copies: Copies, *, dtype: jnp.dtype) -> Float[Array, "ids large_d"]:
    scale = copies.scale.astype(dtype)[None]
    return jnp.where(scale == 0, jnp.asarray(BIAS, dtype), rows.astype(dtype)[:, copies.coordinate] * scale)


@partial(jax.jit, static_argnames="dtype")
def _write(
    weight: Float[Array, "d columns"], shares: Float[Array, "ratio"], copies: Copies, *, dtype: jnp.dtype
) -> Float[Array, "large_d large_columns"]:
    repeated = (weight[:, None] * shares[None, :, None]).reshape(len(weight), -1).astype(dtype)
    return repeated[copies.coordinate] * copies.scale.astype(dtype)[:, None]


@partial(jax.jit, static_argnames="dtype")
def _read(
    weight: Float[Array, "rows d"], gain: Float[Array, "d"], copies: Copies, *, dtype: jnp.dtype
) -> Float[Array, "rows large_d"]:
    """Columns whose products with the copies of x add up to (weight * gain) @ x."""
    limits = jnp.finfo(dtype)
    share = weight * gain[None] / len(copies.factor)

    def next_copy(error: Array, factor: Array) -> tuple[Array, Array]:
        exact = factor * share
        rounded = jax.lax.reduce_precision(exact + factor * error, limits.nexp, limits.nmant)  # a cast is optimised out
        return error + factor * (exact - rounded), rounded.astype(dtype)

    _, entries = jax.lax.scan(next_copy, jnp.zeros_like(share), copies.factor[:, None])
    return jnp.moveaxis(entries, 0, 1).reshape(len(weight), -1)[:, copies.place] * copies.sign.astype(dtype)[None]


@partial(jax.jit, static_argnames=("used", "dtype"))
def _head(
    weight: Float[Array, "used d"],
    gain: Float[Array, "d"],
    copies: Copies,
    row: Int[Array, "ids"],
    *,
    used: int,
    dtype: jnp.dtype,
) -> Float[Array, "ids large_d"]:
    penalty = (jnp.arange(len(row)) >= used)[:, None] & (copies.scale == 0)[None]
    return jnp.where(penalty, jnp.asarray(PENALTY, dtype), _read(weight, gain, copies, dtype=dtype)[row])
