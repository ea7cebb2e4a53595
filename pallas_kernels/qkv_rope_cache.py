"""Project activations to q, k and v, rotate q and k, and write k and v to their cache rows."""

from collections.abc import Sequence
from importlib.util import find_spec

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import qkv_rope_cache_kernel
from pallas_kernels.checks import check_shapes
from pallas_kernels.implementation import Implementation, check_kernels, precision_of
from pallas_kernels.rope_cache_kernel import rope_cache_pallas
from pallas_kernels.weight_product import tiles_for


def rope_frequency(head_dim: int, theta: float) -> Float[Array, "half"]:
    """fp32 radians per position of each pair (i, i + head_dim/2): theta^(-2i/head_dim).

    A constant, so that no device's own power function has a say: an error in it grows with the position.
    """
    half = head_dim // 2
    return jnp.asarray(theta ** (-np.arange(half) / half), jnp.float32)


def rope(
    x: Float[Array, "*rows heads head_dim"], position: Int[Array, "*rows"], theta: float
) -> Float[Array, "*rows heads head_dim"]:
    """Rotary position embedding, rotate-half form, in fp32.

    Pairs (i, i + head_dim/2) turn by `position * theta^(-2i/head_dim)` radians. The result has x's dtype.
    """
    frequency = rope_frequency(x.shape[-1], theta)
    angle = jnp.multiply.outer(position.astype(jnp.float32)[..., None], frequency)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def project_qkv(
    x: Float[Array, "*rows d_model"],
    weight: Float[Array, "qkv d_model"],
    bias: Float[Array, "qkv"] | None,
    position: Int[Array, "*rows"],
    *,
    n_heads: int,
    head_dim: int,
    rope_theta: float,
) -> tuple[
    Float[Array, "*rows heads head_dim"],
    Float[Array, "*rows kv_heads head_dim"],
    Float[Array, "*rows kv_heads head_dim"],
]:
    """Rotated q, rotated k, and v of activations x; `weight` holds the rows of q, then k, then v."""
    packed = _product(x, weight, bias)
    packed = packed.reshape(*packed.shape[:-1], -1, head_dim)
    n_kv_heads = (packed.shape[-2] - n_heads) // 2
    q, k, v = jnp.split(packed, (n_heads, n_heads + n_kv_heads), axis=-2)
    return rope(q, position, rope_theta), rope(k, position, rope_theta), v


def _product(
    x: Float[Array, "*rows d_model"], weight: Float[Array, "qkv d_model"], bias: Float[Array, "qkv"] | None
) -> Float[Array, "*rows qkv"]:
    packed = jnp.einsum("...d,od->...o", x, weight, precision=precision_of(x.dtype), preferred_element_type=x.dtype)
    return packed if bias is None else packed + jnp.broadcast_to(bias, packed.shape)


def qkv_rope_cache(
    x: Float[Array, "rows d_model"],
    weight: Float[Array, "qkv d_model"],
    bias: Float[Array, "qkv"] | None,
    position: Int[Array, "rows"],
    cache_row: Int[Array, "rows"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    v_cache: Float[Array, "cache_rows kv_heads head_dim"],
    *,
    n_heads: int,
    rope_theta: float,
    kernels: Implementation = "xla",
) -> tuple[
    Float[Array, "rows heads head_dim"],
    Float[Array, "cache_rows kv_heads head_dim"],
    Float[Array, "cache_rows kv_heads head_dim"],
]:
    """Q of every row, and the caches with the rows' rotated k and v written in place.

    Besides the usual ones there is `kernels="triton"`: the same kernel in plain Triton, for which jax_triton must be
    installed (ValueError where it is not).

    A `cache_row` at or beyond the number of cache rows writes nothing; none may be negative. No two rows may write the
    same cache row. Of shapes that the kernel's `CASES` do not cover, the product is XLA's.
    """
    q, k_cache, v_cache, *_ = _run(
        x, weight, bias, position, cache_row, k_cache, v_cache,
        n_heads=n_heads, rope_theta=rope_theta, kernels=kernels, returning=False,
    )  # fmt: skip
    return q, k_cache, v_cache


def qkv_rope_cache_returning(
    x: Float[Array, "rows d_model"],
    weight: Float[Array, "qkv d_model"],
    bias: Float[Array, "qkv"] | None,
    position: Int[Array, "rows"],
    cache_row: Int[Array, "rows"],
    k_cache: Float[Array, "cache_rows kv_heads head_dim"],
    v_cache: Float[Array, "cache_rows kv_heads head_dim"],
    *,
    n_heads: int,
    rope_theta: float,
    kernels: Implementation = "xla",
) -> tuple[
    Float[Array, "rows heads head_dim"],
    Float[Array, "rows kv_heads head_dim"],
    Float[Array, "rows kv_heads head_dim"],
    Float[Array, "cache_rows kv_heads head_dim"],
    Float[Array, "cache_rows kv_heads head_dim"],
]:
    """Q, k and v of every row, whether or not it writes, and the caches as `qkv_rope_cache` leaves them."""
    q, k_cache, v_cache, k, v = _run(
        x, weight, bias, position, cache_row, k_cache, v_cache,
        n_heads=n_heads, rope_theta=rope_theta, kernels=kernels, returning=True,
    )  # fmt: skip
    return q, k, v, k_cache, v_cache


def _run(
    x: Array,
    weight: Array,
    bias: Array | None,
    position: Array,
    cache_row: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    n_heads: int,
    rope_theta: float,
    kernels: Implementation,
    returning: bool,
) -> Sequence[Array]:
    """Q and the caches; k and v as well if `returning`, and from the reference in any case."""
    check_kernels(kernels)
    *_, kv_heads, head_dim = k_cache.shape
    of_cache, of_row = "cache_rows kv_heads head_dim", "rows"
    check_shapes(
        {"qkv": (n_heads + 2 * kv_heads) * head_dim},
        {
            "x": (x, "rows d_model"), "weight": (weight, "qkv d_model"), "bias": (bias, "qkv"),
            "position": (position, of_row), "cache_row": (cache_row, of_row),
            "k_cache": (k_cache, of_cache), "v_cache": (v_cache, of_cache),
        },
    )  # fmt: skip
    tiles = tiles_for(qkv_rope_cache_kernel.CASES, rows=x.shape[0], k=x.shape[1])
    if kernels == "xla" or (kernels == "triton" and tiles is None):
        q, k, v = project_qkv(x, weight, bias, position, n_heads=n_heads, head_dim=head_dim, rope_theta=rope_theta)
        k_cache = k_cache.at[cache_row].set(k, mode="drop", unique_indices=True)
        v_cache = v_cache.at[cache_row].set(v, mode="drop", unique_indices=True)
        return q, k_cache, v_cache, k, v
    of_kernel = {"n_heads": n_heads, "returning": returning, "interpret": kernels == "interpret"}
    of_rows = (rope_frequency(head_dim, rope_theta), position, cache_row, k_cache, v_cache)
    if tiles is None:
        return rope_cache_pallas(_product(x, weight, bias), *of_rows, **of_kernel)
    arrays = (x, weight, bias, *of_rows)
    if kernels == "triton":
        if find_spec("jax_triton") is None:
            raise ValueError("kernels='triton' needs jax_triton: install fdllm-jax[triton], or use 'pallas'")
        from pallas_kernels.qkv_rope_cache_triton import qkv_rope_cache_triton

        return qkv_rope_cache_triton(*arrays, returning=returning, tiles=tiles)
    return qkv_rope_cache_kernel.qkv_rope_cache_pallas(*arrays, **of_kernel, tiles=tiles)
