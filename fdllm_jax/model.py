"""LLaDA as Flax NNX modules: the forward of a packed query through the flat cache.

Source: the LLaDA model family (arXiv 2502.09992): a pre-norm transformer with RMSNorm, rotary positions, SwiGLU and
bidirectional attention. Weights keep the [out, in] orientation of the checkpoint.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from fdllm_jax.cache import KVCache
from fdllm_jax.config import ModelConfig
from fdllm_jax.query import Query
from pallas_kernels import (
    XLA,
    HeadStatistics,
    Kernels,
    Noise,
    gate_up_silu,
    head_statistics,
    linear_residual_norm,
    project_qkv,
    qkv_rope_cache,
    qkv_rope_cache_returning,
    rms_norm,
    scheduled_attention,
    verify_attention,
)
from pallas_kernels.implementation import precision_of


class Output(NamedTuple):
    """What a forward returns.

    hidden: normalised activations of the query's rows, ready for the head; those of rows in no block mean nothing.
    cache: with the rows written.
    scores: with `score_rows` in the query, the attention probability that its marked rows gave each cache row, summed
        over them, heads and the tracked layers; see `Query.buffered` for the rows that get none.
    """

    hidden: Float[Array, "rows d_model"]
    cache: KVCache
    scores: Float[Array, "cache_rows"] | None


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's path and shape: the one declaration that init, loading and conversion follow."""
    d, heads = config.d_model, config.n_heads + 2 * config.n_kv_heads
    layer = {
        "attn_norm": (d,),
        "qkv": (heads * config.head_dim, d),
        **({"qkv_bias": (heads * config.head_dim,)} if config.qkv_bias else {}),
        "attn_out": (d, config.n_heads * config.head_dim),
        "mlp_norm": (d,),
        "gate_up": (2 * config.mlp_size, d),
        "down": (d, config.mlp_size),
    }
    return {
        "embedding": (config.embedding_size, d),
        **{f"layers.{i}.{name}": shape for i in range(config.n_layers) for name, shape in layer.items()},
        "final_norm": (d,),
        **({} if config.weight_tying else {"head": (config.embedding_size, d)}),
    }


class Layer(nnx.Module):
    """One transformer layer. Attention itself is given by the caller, so cached and dense passes share the rest."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, Array], kernels: Kernels):
        self.config = config
        self.kernels = kernels
        self.attn_norm = nnx.Param(parameters["attn_norm"])
        self.qkv = nnx.Param(parameters["qkv"])
        self.qkv_bias = nnx.Param(parameters["qkv_bias"]) if config.qkv_bias else None
        self.attn_out = nnx.Param(parameters["attn_out"])
        self.mlp_norm = nnx.Param(parameters["mlp_norm"])
        self.gate_up = nnx.Param(parameters["gate_up"])
        self.down = nnx.Param(parameters["down"])

    @property
    def _bias(self) -> Array | None:
        return None if self.qkv_bias is None else self.qkv_bias[...]

    def attend(
        self, normed: Array, query: Query, cache_row: Array, k_cache: Array, v_cache: Array, capacity: int
    ) -> tuple[Array, Array, Array, list[Array]]:
        """Attended values of the query rows [rows, heads * head_dim], and this layer's caches with the rows written.

        Where attention is counted, also what each cache row got.
        """
        inputs = (normed, self.qkv[...], self._bias, query.position, cache_row, k_cache, v_cache)
        of_heads: dict[str, Any] = {
            "n_heads": self.config.n_heads,
            "rope_theta": self.config.rope_theta,
            "kernels": self.kernels.qkv_rope_cache,
        }
        of_blocks: dict[str, Any] = {
            "capacity": capacity,
            "block_rows": query.block_rows,
            "score_rows": query.score_rows,
        }
        if query.visibility is None:
            q, k_cache, v_cache = qkv_rope_cache(*inputs, **of_heads)
            kernels = self.kernels.scheduled_attention
            of_blocks |= {"aligned": query.aligned, "most_scored": query.most_scored}
            out = scheduled_attention(q, k_cache, v_cache, query.block_table, **of_blocks, kernels=kernels)
        else:
            assert query.buffered is not None
            q, k, v, k_cache, v_cache = qkv_rope_cache_returning(*inputs, **of_heads)
            buffer = (query.block_table, query.buffered, query.visibility)
            out = verify_attention(
                q, k, v, k_cache, v_cache, *buffer, **of_blocks, kernels=self.kernels.verify_attention
            )
        attended, *scores = out if isinstance(out, tuple) else (out,)
        return attended.reshape(len(normed), -1), k_cache, v_cache, scores

    def attend_dense(self, normed: Array, attention: Callable[[Array, Array, Array], Array]) -> Array:
        """The same for whole sequences [batch, length, d_model] without a cache; see `LLaDA.dense`."""
        project = partial(
            project_qkv,
            n_heads=self.config.n_heads,
            head_dim=self.config.head_dim,
            rope_theta=self.config.rope_theta,
        )
        project = jax.vmap(project, in_axes=(0, None, None, None))  # the angles of rope are those of one sequence
        q, k, v = project(normed, self.qkv[...], self._bias, jnp.arange(normed.shape[1]))
        return attention(q, k, v).reshape(*normed.shape[:-1], -1)

    def finish(self, x: Array, attended: Array, next_norm: Array) -> tuple[Array, Array]:
        """Out-projection and MLP, each with its residual: x, and normalised with the weight that comes next."""
        of = {"eps": self.config.norm_eps, "kernels": self.kernels.linear_residual_norm}
        x, normed = linear_residual_norm(attended, self.attn_out[...], x, self.mlp_norm[...], **of)
        activated = gate_up_silu(normed, self.gate_up[...], kernels=self.kernels.gate_up_silu)
        return linear_residual_norm(activated, self.down[...], x, next_norm, **of)


class LLaDA(nnx.Module):
    """A masked-diffusion language model of the LLaDA family."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, Array], kernels: Kernels):
        self.config, self.kernels = config, kernels
        self.embedding = nnx.Param(parameters["embedding"])
        self.layers = nnx.List(
            [Layer(config, _below(parameters, f"layers.{i}."), kernels) for i in range(config.n_layers)]
        )
        self.final_norm = nnx.Param(parameters["final_norm"])
        self.head = None if config.weight_tying else nnx.Param(parameters["head"])

    def __call__(self, query: Query, cache: KVCache) -> Output:
        """Compute the query's rows: write their K and V where the query says so, attend by its block table."""
        x = self.embedding[...][query.token]
        first_norm, *next_norms = self._norms()
        normed = rms_norm(x, first_norm, self.config.norm_eps)
        cache_row = cache.row(query.slot, query.position, query.write)
        ks, vs, counted = [], [], []
        for i, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            tracked = query.track_layers is None or i in query.track_layers
            of_layer = query if tracked else replace(query, score_rows=None)
            with jax.named_scope(f"layer_{i}"):
                inputs = (x, normed, next_norm, of_layer, cache_row, cache.k[i], cache.v[i])
                x, normed, k, v, scores = _through(*nnx.split(layer), *inputs, capacity=cache.capacity)
            ks.append(k)
            vs.append(v)
            counted += scores
        scores = reduce(jnp.add, counted) if counted else None
        return Output(normed, KVCache(k=tuple(ks), v=tuple(vs), capacity=cache.capacity), scores)

    def dense(
        self, embedded: Float[Array, "batch length d_model"], attention: Callable[[Array, Array, Array], Array]
    ) -> Float[Array, "batch length d_model"]:
        """Normalised activations of whole sequences of embedded tokens, without a cache (training).

        attention: maps q, k, v [batch, length, heads, head_dim] to q's shape, and masks what is padding.
        """
        first_norm, *next_norms = self._norms()
        x, normed = embedded, rms_norm(embedded, first_norm, self.config.norm_eps)
        for layer, next_norm in zip(self.layers, next_norms, strict=True):
            x, normed = layer.finish(x, layer.attend_dense(normed, attention), next_norm)
        return normed

    def logits(self, hidden: Float[Array, "*rows d_model"]) -> Float[Array, "*rows vocab"]:
        """fp32 logits over the vocabulary; embedding rows beyond `vocab_size` are padding and no tokens."""
        out = jnp.einsum(
            "...d,vd->...v",
            hidden,
            self._head,
            precision=precision_of(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        return out[..., : self.config.vocab_size] * self._logit_scale

    def statistics(
        self,
        hidden: Float[Array, "rows d_model"],
        *,
        given: Int[Array, "rows"] | None = None,
        banned: tuple[int, ...] = (),
        noise: Noise | None = None,
    ) -> HeadStatistics:
        """Of the rows' logits, which are never an array: argmax, its probability and that of `given`."""
        return head_statistics(
            hidden,
            self._head,
            vocab_size=self.config.vocab_size,
            scale=self._logit_scale,
            given=given,
            banned=banned,
            noise=noise,
            kernels=self.kernels.head_statistics,
        )

    def _norms(self) -> list[Array]:
        """The weights of the norms before the layers, and of the one behind the last."""
        return [*(layer.attn_norm[...] for layer in self.layers), self.final_norm[...]]

    @property
    def _head(self) -> Array:
        return (self.embedding if self.head is None else self.head)[...]

    @property
    def _logit_scale(self) -> float:
        return self.config.d_model**-0.5 if self.config.scale_logits else 1.0


@partial(jax.jit, static_argnames=("graphdef", "capacity"))
def _through(
    graphdef: nnx.GraphDef,
    parameters: nnx.State,
    x: Array,
    normed: Array,
    next_norm: Array,
    query: Query,
    cache_row: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    capacity: int,
) -> tuple[Array, Array, Array, Array, list[Array]]:
    """Through a layer: activations, the same normalised for the next, its caches, and what was counted.

    Jitted so that layers are traced but once.
    """
    layer: Layer = nnx.merge(graphdef, parameters)
    attended, k_cache, v_cache, scores = layer.attend(normed, query, cache_row, k_cache, v_cache, capacity)
    x, normed = layer.finish(x, attended, next_norm)
    return x, normed, k_cache, v_cache, scores


def _below(parameters: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def from_parameters(config: ModelConfig, parameters: Mapping[str, Array], *, kernels: Kernels = XLA) -> LLaDA:
    """A model over `parameters` (paths and shapes of `parameter_shapes`), whose operations run as `kernels` say."""
    expected, given = parameter_shapes(config), {name: value.shape for name, value in parameters.items()}
    if given != expected:
        wrong = sorted(name for name in expected.keys() | given.keys() if given.get(name) != expected.get(name))
        raise ValueError(f"parameters do not fit the config: {', '.join(wrong)}")
    return LLaDA(config, parameters, kernels)


def parameters_of(model: LLaDA) -> dict[str, Array]:
    """The model's parameters by path: the inverse of `from_parameters`."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): value[...] for path, value in flat}
