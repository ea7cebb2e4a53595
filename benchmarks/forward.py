"""Forwards of a whole model at LLaDA-8B's shape, with random weights: their time, beside their floor and XLA's.

`python -m benchmarks.forward` writes results/forward.json; `--tiny` runs a small model on the CPU and only prints.
Parts: a draft (tracked and masked rows of each slot, with tracking scores and without), a verify pass, a one-pass
verify pass, and a prefill; each with its head statistics. A forward's tokens depend on the last one's output. Weights
and tokens are random: nothing is decoded, these are forwards of the sizes that decoding has.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from benchmarks import report, roofline
from benchmarks.forward_parts import PARTS, Lengths, Part, parts, prefill
from fdllm_jax import command_line
from fdllm_jax.cache import KVCache, allocate
from fdllm_jax.config import ModelConfig
from fdllm_jax.model import LLaDA, from_parameters, parameter_shapes, parameters_of
from fdllm_jax.query import Query
from pallas_kernels import choose

LLADA_8B = ModelConfig(
    vocab_size=126464, embedding_size=126464, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=32, mlp_size=12288,
    rope_theta=500000.0, norm_eps=1e-5, max_sequence_length=4096, qkv_bias=False, weight_tying=False,
    scale_logits=False, mask_token_id=126336, eos_token_id=126081, pad_token_id=126081,
)  # fmt: skip
TINY = replace(
    LLADA_8B, vocab_size=300, embedding_size=300, d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, mlp_size=96,
    mask_token_id=299, eos_token_id=298, pad_token_id=298,
)  # fmt: skip
FEW, MANY = 2, 12  # forwards of the two programs of which the difference is timed
SLOW = 0.2  # seconds of FEW forwards from which one more is enough


def random_model(config: ModelConfig, dtype: Any, kernels: str) -> LLaDA:
    """Weights that keep activations of about unit size, made on the device."""

    @partial(jax.jit, static_argnums=1)
    def weight(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[1] ** -0.5, dtype)

    keys = iter(jax.random.split(jax.random.key(0), len(parameter_shapes(config))))
    parameters = {name: weight(next(keys), shape) for name, shape in parameter_shapes(config).items()}
    return from_parameters(config, parameters, kernels=choose(kernels))


@partial(jax.jit, static_argnames="graphdef", donate_argnames="cache")
def forwards(
    parameters: nnx.State, query: Query, wanted: Array, cache: KVCache, count: Array, *, graphdef: nnx.GraphDef
) -> tuple[Array, Array, KVCache]:
    """`count` forwards of a query, each with the tokens that the last one predicted in the wanted rows."""
    model = nnx.merge(graphdef, parameters)

    def one(_: Array, carry: tuple) -> tuple:
        token, score, cache = carry
        output = model(replace(query, token=token), cache)
        found = model.statistics(output.hidden[wanted], given=token[wanted])
        score = score if output.scores is None else score + output.scores
        return token.at[wanted].set(found.token), score, output.cache

    score = jnp.zeros(cache.k[0].shape[0], jnp.float32)
    return jax.lax.fori_loop(0, count, one, (query.token, score, cache))


def compile(model: LLaDA, part: Part, cache: KVCache) -> Callable[..., tuple[Array, Array, KVCache]]:
    """The program that `measure` runs: (cache, count) -> what is left and the cache."""
    graphdef, parameters = nnx.split(model)
    given = parameters, part.query, part.wanted
    compiled = forwards.lower(*given, cache, np.int32(1), graphdef=graphdef).compile()
    return lambda cache, count: compiled(*given, cache, count)


def measure(program: Callable[..., tuple], cache: KVCache, repeats: int) -> tuple[dict[str, Any], KVCache]:
    """Seconds of a forward: median, low, high, repeats; and the cache back."""

    def run(count: int) -> float:
        nonlocal cache
        start = time.perf_counter()
        *kept, cache = jax.block_until_ready(program(cache, jnp.int32(count)))
        del kept
        return time.perf_counter() - start

    run(FEW)
    many = MANY if run(FEW) < SLOW else FEW + 1
    return report.spread([(run(many) - run(FEW)) / (many - FEW) for _ in range(repeats)]), cache


def measured(
    model: LLaDA, options: argparse.Namespace, names: Sequence[str], lengths: Lengths
) -> Iterator[dict[str, Any] | None]:
    """The row of each forward, which is printed as well; None for one that failed: the others still count."""
    config, dtype = model.config, model.embedding[...].dtype
    device = roofline.DEVICES.get(report.hardware())
    for slots, kernels in product(options.slots, names):
        every = (*parts(config, slots, lengths), prefill(config, slots, lengths))
        wanted = [part for part in every if part.name in (options.parts or {part.name})]
        chosen = from_parameters(config, parameters_of(model), kernels=choose(kernels))
        cache = allocate(config, slots=slots, capacity=lengths.capacity, dtype=dtype)
        with ThreadPoolExecutor() as pool:  # done before anything is timed
            programs = [pool.submit(compile, chosen, part, cache) for part in wanted]
        for part, program in zip(wanted, programs, strict=True):
            name = f"{part.name:22} {kernels:7} batch {slots:3}:"
            floor = None if device is None else part.work.floor(device)
            try:
                figure, cache = measure(program.result(), cache, options.repeats)
            except Exception as error:  # out of memory, a kernel that does not compile
                print(f"{name} FAILED {str(error).splitlines()[0][:120]}")
                cache = allocate(config, slots=slots, capacity=lengths.capacity, dtype=dtype)
                yield None
                continue
            seconds = figure.pop("median")
            over = "" if floor is None else f", floor {floor * 1e3:.2f}, x {seconds / floor:.2f}"
            print(f"{name} {seconds * 1e3:8.2f} ms{over}", flush=True)
            case = {"part": part.name, "kernels": kernels, "batch": slots}
            yield report.row(case, "time", "s", seconds, **figure, floor=floor)
        del cache, chosen, programs


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.forward", description="Time forwards of a whole model.")
    p.add_argument("--slots", nargs="+", type=int, default=[1, 8, 32])
    p.add_argument("--kernels", nargs="+", choices=("pallas", "xla"), default=["pallas", "xla"])
    p.add_argument("--parts", nargs="+", help=f"of {', '.join(PARTS)} (default: all)")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--tiny", action="store_true", help="a small model on the CPU; writes only where --output says")
    p.add_argument("--output", type=Path, help="results file (default: benchmarks/results/forward.json, of all)")
    options = p.parse_args(given)
    if min(options.repeats, *options.slots) < 1:
        p.error("--slots and --repeats must be at least 1")
    if unknown := set(options.parts or ()) - set(PARTS):
        p.error(f"--parts {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    if options.tiny and options.kernels != p.get_default("kernels"):
        p.error("--tiny runs the XLA references alone: leave --kernels out")
    if not options.tiny and jax.default_backend() != "gpu":
        p.error(f"this needs an NVIDIA GPU and JAX runs on {jax.default_backend()}: use --tiny to try it out")
    config, dtype = (TINY, jnp.float32) if options.tiny else (LLADA_8B, jnp.bfloat16)
    names = ["xla"] if options.tiny else options.kernels
    try:
        file = report.file_of("forward", options, p)
    except ValueError as error:
        p.error(str(error))
    lengths = Lengths()
    settings = {
        "prompt": lengths.prompt,
        "response": lengths.response,
        "weights": "random",
        "dtype": jnp.dtype(dtype).name,
    }
    rows: list[dict[str, Any]] = []
    failed = False
    with report.kept(file, rows):
        for found in measured(random_model(config, dtype, "xla"), options, names, lengths):
            failed |= found is None
            if found is None:
                continue
            rows.append(found)
            if file is not None:
                report.write_part(file, settings=settings, rows=rows)
    if file is not None and rows:
        report.finish(file)
    return 1 if failed else 0


if __name__ == "__main__":
    command_line.exit_on_ctrl_c("benchmarks.forward")
    sys.exit(main())
