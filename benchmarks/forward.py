"""Forwards of a whole model at LLaDA-8B's shape, with random weights: their time, beside their floor and XLA's.

`python -m benchmarks.forward` writes results/forward.json; `--tiny` runs a small model on the CPU and only prints.
Parts: a draft (tracked and masked rows of each slot, with tracking scores and without), a verify pass, a one-pass
verify pass, and a prefill; each with its head statistics. A forward's tokens depend on the last one's output. Weights
and tokens are random: nothing is decoded, these are forwards of the sizes that decoding has.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from benchmarks import report, roofline
from fdllm_jax.cache import KVCache, allocate
from fdllm_jax.config import ModelConfig
from fdllm_jax.decoding.verify import CONTEXT, DRAFT_VIEW, MASK_VIEW, PLAIN_VIEW, visibility
from fdllm_jax.model import LLaDA, from_parameters, parameter_shapes, parameters_of
from fdllm_jax.query import Query, packed_query, partial_query
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
PROMPT, RESPONSE, CAPACITY = 700, 256, 1024
TRACKED, MASKED, BLOCK = 64, 64, 16
FEW, MANY = 2, 12  # forwards of the two programs of which the difference is timed
SLOW = 0.2  # seconds of FEW forwards from which one more is enough


class Part(NamedTuple):
    """A forward: its query, the rows whose logits are wanted, and what it cannot do without."""

    name: str
    query: Query
    wanted: Int[Array, "wanted"]
    work: roofline.Work


PARTS = ("draft", "draft without scores", "verify", "one-pass", "prefill")


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


def shape_of(config: ModelConfig) -> roofline.Shape:
    """The sizes that decide floors."""
    return roofline.Shape(
        d_model=config.d_model, heads=config.n_heads, head_dim=config.head_dim, mlp=config.mlp_size,
        vocab=config.vocab_size, layers=config.n_layers,
    )  # fmt: skip


def parts(config: ModelConfig, slots: int) -> list[Part]:
    """The forwards of `slots` sequences of PROMPT and RESPONSE tokens."""
    rng = np.random.default_rng(slots)
    length = PROMPT + RESPONSE
    shape = shape_of(config)
    kv_length = jnp.full(slots, length, jnp.int32)
    tracked = np.stack([rng.permutation(PROMPT)[:TRACKED] for _ in range(slots)])
    masked = np.broadcast_to(np.arange(PROMPT, PROMPT + MASKED), (slots, MASKED))

    def work(rows: int, head_rows: int = BLOCK) -> roofline.Work:
        return roofline.forward(shape, rows=rows, slots=slots, kv_length=length, head_rows=head_rows)

    def wanted(first: int, count: int, rows: int) -> Array:
        return (jnp.arange(slots)[:, None] * rows + first + jnp.arange(count)[None]).reshape(-1)

    def query(position: np.ndarray, **more: Any) -> Query:
        rows = position.shape[1]
        token = jnp.asarray(rng.integers(0, config.vocab_size, position.shape), jnp.int32)
        return partial_query(
            token, jnp.asarray(position, jnp.int32), jnp.full(slots, rows, jnp.int32), kv_length, capacity=CAPACITY,
            **more,
        )  # fmt: skip

    def views(*counts: tuple[int, int]) -> tuple[Array, Array]:
        """View and rank of rows given as (view, count)."""
        view = np.concatenate([np.full(count, view) for view, count in counts])
        rank = np.concatenate([np.arange(count) if view != CONTEXT else np.zeros(count) for view, count in counts])
        view, rank = (np.broadcast_to(x, (slots, len(x))) for x in (view, rank))
        return jnp.asarray(view, jnp.int32), jnp.asarray(rank, jnp.int32)

    draft = np.concatenate([tracked, masked], axis=1)
    rows = draft.shape[1]
    in_window = jnp.broadcast_to(jnp.arange(rows)[None] >= TRACKED, (slots, rows))
    block = masked[:, :BLOCK]
    verify = np.concatenate([block, block], axis=1)
    one_pass = np.concatenate([draft, block, block], axis=1)
    view, rank = views((CONTEXT, TRACKED), (MASK_VIEW, BLOCK), (CONTEXT, MASKED - BLOCK), (DRAFT_VIEW, BLOCK),
                       (PLAIN_VIEW, BLOCK))  # fmt: skip
    plain = (view == PLAIN_VIEW) | ((view == CONTEXT) & (jnp.arange(view.shape[1])[None] >= TRACKED))
    window = wanted(TRACKED, BLOCK, rows)
    return [
        Part("draft", query(draft, scored=in_window), window, work(rows)),
        Part("draft without scores", query(draft), window, work(rows)),
        Part(
            "verify",
            query(
                verify,
                visibility=visibility(*views((DRAFT_VIEW, BLOCK), (MASK_VIEW, BLOCK)), "paper"),
                write=jnp.zeros(verify.shape, jnp.bool_),
            ),
            wanted(BLOCK, BLOCK, 2 * BLOCK),
            work(2 * BLOCK),
        ),
        Part(
            "one-pass",
            query(
                one_pass,
                visibility=visibility(view, rank, "paper"),
                write=(view == CONTEXT) | (view == PLAIN_VIEW),
                scored=plain,
            ),
            wanted(TRACKED, 3 * BLOCK, one_pass.shape[1]),
            work(one_pass.shape[1], 3 * BLOCK),
        ),
    ]


def prefill(config: ModelConfig, slots: int) -> Part:
    """The packed pass over whole sequences."""
    token = jax.random.randint(jax.random.key(1), (slots, CAPACITY), 0, config.vocab_size, jnp.int32)
    length = jnp.full(slots, PROMPT + RESPONSE, jnp.int32)
    scored = (jnp.arange(CAPACITY)[None] >= PROMPT) & (jnp.arange(CAPACITY)[None] < PROMPT + MASKED)
    query, first = packed_query(
        token, length, rows=slots * (PROMPT + RESPONSE), scored=jnp.broadcast_to(scored, token.shape)
    )
    wanted = (first[:, None] + PROMPT + jnp.arange(BLOCK)[None]).reshape(-1)
    shape = shape_of(config)
    rows = PROMPT + RESPONSE
    return Part("prefill", query, wanted, roofline.forward(shape, rows=rows, slots=slots, kv_length=rows))


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
    compiled = forwards.lower(*given, cache, jnp.int32(1), graphdef=graphdef).compile()
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
    if not options.tiny and jax.default_backend() != "gpu":
        p.error(f"this needs an NVIDIA GPU and JAX runs on {jax.default_backend()}: use --tiny to try it out")
    config, dtype = (TINY, jnp.float32) if options.tiny else (LLADA_8B, jnp.bfloat16)
    names = ["xla"] if options.tiny else options.kernels
    file = report.file_of("forward", options, p, "tiny", "slots", "kernels", "parts")
    failed = False
    device = roofline.DEVICES.get(report.hardware())
    settings = {"prompt": PROMPT, "response": RESPONSE, "weights": "random", "dtype": jnp.dtype(dtype).name}
    rows: list[dict[str, Any]] = []
    model = random_model(config, dtype, "xla")
    for slots in options.slots:
        wanted = [p for p in (*parts(config, slots), prefill(config, slots)) if p.name in (options.parts or {p.name})]
        for kernels in names:
            chosen = from_parameters(config, parameters_of(model), kernels=choose(kernels))
            cache = allocate(config, slots=slots, capacity=CAPACITY, dtype=jnp.dtype(dtype))
            with ThreadPoolExecutor() as pool:  # done before anything is timed
                programs = [pool.submit(compile, chosen, part, cache) for part in wanted]
            for part, program in zip(wanted, programs, strict=True):
                floor = None if device is None else part.work.floor(device)
                try:
                    figure, cache = measure(program.result(), cache, options.repeats)
                except Exception as error:  # out of memory, a kernel that does not compile: the others still count
                    failed = True
                    print(f"{part.name:22} {kernels:7} batch {slots:3}: FAILED {str(error).splitlines()[0][:120]}")
                    cache = allocate(config, slots=slots, capacity=CAPACITY, dtype=jnp.dtype(dtype))
                    continue
                case = {"part": part.name, "kernels": kernels, "batch": slots}
                rows.append(report.row(case, "time", "s", figure.pop("median"), **figure, floor=floor))
                over = "" if floor is None else f", floor {floor * 1e3:.2f}, x {rows[-1]['median'] / floor:.2f}"
                print(
                    f"{part.name:22} {kernels:7} batch {slots:3}: {rows[-1]['median'] * 1e3:8.2f} ms{over}", flush=True
                )
                if file is not None:
                    report.write_part(file, settings=settings, rows=rows)
            del cache, chosen, programs
    if file is not None and rows:
        report.finish(file)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
