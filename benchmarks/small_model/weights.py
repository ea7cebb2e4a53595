"""The weights as training holds them: fp32, the layers' stacked, and the packed matrices' parts apart.

Stacked, a step updates a dozen arrays instead of a hundred; apart, an optimiser that works on whole matrices sees q, k,
v, gate and up each on its own.
"""

from typing import cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, PRNGKeyArray

from fdllm_jax.config import ModelConfig
from fdllm_jax.model import parameter_shapes

Weights = dict[str, Array]
PARTS = {"qkv": 3, "gate_up": 2}  # equal matrices in one packed matrix (as many KV heads as heads)
HIDDEN = ("qkv", "attn_out", "gate_up", "down")
INTO_RESIDUAL = ("attn_out", "down")


def pack(config: ModelConfig, parameters: dict[str, Array]) -> Weights:
    """Parameters by path (`parameter_shapes`) -> weights."""
    weights = {name: value for name, value in parameters.items() if not name.startswith("layers.")}
    for name in (path.removeprefix("layers.0.") for path in parameters if path.startswith("layers.0.")):
        stacked = jnp.stack([parameters[f"layers.{i}.{name}"] for i in range(config.n_layers)])
        parts = PARTS.get(name)
        weights[name] = stacked.reshape(len(stacked), parts, -1, stacked.shape[-1]) if parts else stacked
    return weights


def unpack(config: ModelConfig, weights: Weights) -> dict[str, Array]:
    """Weights -> parameters by path: the inverse of `pack`."""
    parameters = {}
    for path, shape in parameter_shapes(config).items():
        if path.startswith("layers."):
            _, i, name = path.split(".")
            parameters[path] = weights[name][int(i)].reshape(shape)
        else:
            parameters[path] = weights[path]
    return parameters


def initial(config: ModelConfig, key: PRNGKeyArray) -> Weights:
    """Norms 1; matrices normal: 0.02 for embedding and head, else 0.5 / sqrt(inputs), less into the residual."""
    parameters = {}
    for i, (path, shape) in enumerate(parameter_shapes(config).items()):
        if len(shape) == 1:
            parameters[path] = jnp.ones(shape)
            continue
        scale = 0.02 if path in ("embedding", "head") else 0.5 * shape[1] ** -0.5
        if path.endswith(INTO_RESIDUAL):
            scale *= (2 * config.n_layers) ** -0.5
        parameters[path] = scale * jax.random.normal(jax.random.fold_in(key, i), shape)
    return pack(config, parameters)


def schedule(*, steps: int, peak: float, warm_up: int = 300) -> optax.Schedule:
    """Learning rate: a linear warm-up, `peak` until half of `steps`, then linear to 0."""
    warm_up = min(warm_up, steps // 4)
    falling = steps - max(steps // 2, warm_up)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warm_up),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, falling),
        ],
        [warm_up, steps - falling],
    )


def make_optimizer(name: str, rate: optax.Schedule) -> optax.GradientTransformation:
    """`adamw`, or `muon` (arXiv 2502.16982) for the layers' matrices and AdamW for the rest; gradients clipped to 1.

    Raises ValueError for another name.
    """

    def decayed(weights: Weights) -> dict[str, bool]:
        return {path: path in (*HIDDEN, "embedding", "head") for path in weights}

    def dimensions(weights: optax.Params) -> optax.Params:
        hidden = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)
        return cast(optax.Params, {path: hidden if path in HIDDEN else None for path in cast(Weights, weights)})

    if name == "adamw":
        update = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed, mu_dtype=jnp.bfloat16)
    elif name == "muon":
        update = optax.contrib.muon(
            rate,
            weight_decay=0.1,
            consistent_rms=0.2,
            adam_b2=0.95,
            mu_dtype=jnp.bfloat16,
            muon_weight_dimension_numbers=dimensions,
        )
    else:
        raise ValueError(f"optimizer={name!r} is unknown: expected adamw or muon")
    return optax.chain(optax.clip_by_global_norm(1.0), update)
