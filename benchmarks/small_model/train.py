"""Train the small checkpoint: python -m benchmarks.small_model.train --tokenizer DIR --output DIR

Writes OUTPUT as a checkpoint in LLaDA's Hugging Face form, OUTPUT/train_log.json, and OUTPUT/state/state.npz, from
which --resume goes on. SIGTERM saves the state and ends.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.small_model import pool
from benchmarks.small_model.checkpoint import export, load_state, save_state
from benchmarks.small_model.feed import Build, Feed, Rows
from benchmarks.small_model.step import Bin, Losses, State, held_out_losses, make_cycle
from benchmarks.small_model.weights import initial, make_optimizer, pack, schedule, unpack
from convert import load
from fdllm_jax.config import ModelConfig

BATCH_TOKENS = 256  # of a sequence of `batch`
BINS = (
    Bin(length=128, steps=4, predicted=48),
    Bin(length=256, steps=4, predicted=64),
    Bin(length=768, steps=1, predicted=128),
    Bin(length=2304, steps=1, predicted=192),
)
PART = 5000  # zero-shot sequences made for one part of the pools
PART_ROWS = (4000, 1250, 500, 200)  # rows of one part, a number for each bin
START_PARTS = 40  # before training starts
REPORT_SECONDS = 10.0
SAVE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run: `batch` * 256 tokens a step, `pool` zero-shot sequences in all; the few-shot bins go along."""

    tokenizer: str
    output: str
    steps: int
    batch: int
    learning_rate: float
    optimizer: str
    pool: int
    seed: int
    weights: str | None
    resume: bool

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or self.pool < 1 or not self.learning_rate > 0:
            raise ValueError(
                f"{self.steps=}, {self.batch=}, {self.pool=} and {self.learning_rate=} must all be positive"
            )


def small_config(tokenizer: Path) -> ModelConfig:
    """The small model's shape; the special ids are the tokenizer's. Raises FileNotFoundError or ValueError."""
    file = tokenizer / "tokenizer.json"
    if not file.exists():
        raise FileNotFoundError(f"no tokenizer.json in {tokenizer}: make the tokenizer first")
    added = {token["content"]: token["id"] for token in json.loads(file.read_text(encoding="utf-8"))["added_tokens"]}
    missing = [name for name in ("<|mdm_mask|>", "<|endoftext|>") if name not in added]
    if missing:
        raise ValueError(f"{file} lacks the special tokens {', '.join(missing)}")
    return ModelConfig(
        vocab_size=4096,
        embedding_size=4096,
        d_model=256,
        n_layers=8,
        n_heads=2,
        n_kv_heads=2,
        mlp_size=768,
        rope_theta=500000.0,
        norm_eps=1e-5,
        max_sequence_length=4096,
        qkv_bias=False,
        weight_tying=False,
        scale_logits=False,
        mask_token_id=added["<|mdm_mask|>"],
        eos_token_id=added["<|endoftext|>"],
        pad_token_id=added["<|endoftext|>"],
    )


def build_part(tokenizer: Path, seed: int) -> tuple[Rows, ...]:
    """One part of the pools. Zero-shot sequences: those that fit go to the bin of 128, the rest and as many that fit to
    that of 256, so that the long ones keep about their share of what is drawn."""
    zero_shot = pool.build(256, PART, seed, tokenizer, workers=1)
    fits = zero_shot.length <= BINS[0].length
    short, long = np.flatnonzero(fits), np.flatnonzero(~fits)
    half = PART_ROWS[1] // 2
    both = np.concatenate([np.resize(long, half), np.resize(short[::-1], PART_ROWS[1] - half)])
    few_shot = zip(BINS[2:], PART_ROWS[2:], strict=True)
    return (
        _rows(zero_shot, np.resize(short, PART_ROWS[0]), BINS[0].length),
        _rows(zero_shot, both, BINS[1].length),
        *(
            _rows(pool.build(bin.length, n, seed, tokenizer, workers=1), np.arange(n), bin.length)
            for bin, n in few_shot
        ),
    )


def _rows(built: pool.Pool, chosen: np.ndarray, length: int) -> Rows:
    return built.tokens[chosen, :length], built.prompt_length[chosen], built.length[chosen]


def train(
    settings: Settings,
    config: ModelConfig,
    build: Build,
    executor: Executor,
    *,
    bins: tuple[Bin, ...] = BINS,
    part: int = PART,
    part_rows: tuple[int, ...] = PART_ROWS,
) -> dict:
    """Train, export, and return the log (what train_log.json holds)."""
    began = time.monotonic()
    output = Path(settings.output)
    stop = _stop_on_sigterm()
    mesh = jax.make_mesh((jax.local_device_count(),), ("data",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    parts = -(-settings.pool // part)
    batch_tokens = settings.batch * BATCH_TOKENS
    feed = Feed(build, executor, everywhere, bins, parts=parts, part_rows=part_rows, seed=settings.seed)

    rate = schedule(steps=settings.steps, peak=settings.learning_rate)
    optimizer = make_optimizer(settings.optimizer, rate)

    def start(key: jax.Array) -> State:
        weights = initial(config, key)
        return State(weights, optimizer.init(weights), jnp.int32(0))

    state = jax.jit(start, out_shardings=everywhere)(jax.random.key(settings.seed))
    if settings.weights is not None:
        given_config, parameters = load(Path(settings.weights), dtype=jnp.dtype(jnp.float32))
        if given_config != config:
            raise ValueError(f"--weights {settings.weights}: of another shape or vocabulary than the model to train")
        state = jax.device_put(state._replace(weights=pack(config, parameters)), everywhere)
    saved = output / "state" / "state.npz"
    if settings.resume:
        state = jax.device_put(load_state(saved, state), everywhere)
    cycle = make_cycle(config, optimizer, bins, mesh, tokens=batch_tokens, seed=settings.seed, dtype=dtype)
    cycle = cycle.lower(state, feed.pools).compile()
    compiled = time.monotonic()
    feed.take(at_least=min(parts, START_PARTS))
    log = {
        "settings": asdict(settings),
        "bins": [asdict(bin) | {"batch": bin.batch(batch_tokens, mesh.size)} for bin in bins],
        "hardware": [device.device_kind for device in jax.local_devices()],
        "versions": {"python": sys.version.split()[0], "jax": jax.__version__, "optax": optax.__version__},
        "parameters": sum(x.size for x in jax.tree.leaves(state.weights)),
        "seconds_to_compile": round(compiled - began, 1),
        "seconds_to_first_pools": round(time.monotonic() - began, 1),
        "progress": [],
    }
    print(json.dumps({key: value for key, value in log.items() if key != "progress"}), flush=True)

    per_cycle = sum(bin.steps for bin in bins)
    tokens = sum(bin.steps * bin.length * bin.batch(batch_tokens, mesh.size) for bin in bins)
    step = int(state.step)
    recent: list[tuple[Losses, ...]] = []
    pending: list[tuple[Losses, ...]] = []
    reported, reported_step, kept = time.monotonic(), step, time.monotonic()

    def report() -> None:
        nonlocal reported, reported_step, recent
        now, measured = time.monotonic(), step - per_cycle * len(pending)
        if not recent:
            return
        means = jax.tree.map(lambda *values: round(float(np.mean(values)), 4), *recent)
        speed = (measured - reported_step) / (now - reported)
        line = {
            "step": measured,
            "seconds": round(now - began, 1),
            "steps_per_second": round(speed, 2),
            "tokens_per_second": round(speed * tokens / per_cycle),
            "learning_rate": float(f"{float(np.asarray(rate(measured))):.3g}"),
            "pool": int(feed.pools[0].filled),
            "anywhere": {bin.length: losses.anywhere for bin, losses in zip(bins, means, strict=True)},
            "window": {bin.length: losses.window for bin, losses in zip(bins, means, strict=True)},
        }
        print(json.dumps(line), flush=True)
        log["progress"].append(line)
        reported, reported_step, recent = now, measured, []

    def settle(left: int) -> None:
        while len(pending) > left:
            recent.append(jax.device_get(pending.pop(0)))

    while step < settings.steps and not stop:
        state, losses = cycle(state, feed.pools)
        step += per_cycle
        pending.append(losses)
        settle(2)  # the host runs two cycles ahead of the devices
        feed.take()
        if time.monotonic() - reported > REPORT_SECONDS:
            report()
        if time.monotonic() - kept > SAVE_SECONDS:
            save_state(saved, state)
            kept = time.monotonic()
    settle(0)
    report()
    save_state(saved, state)
    weights = jax.device_put(state.weights, jax.local_devices()[0])
    export(output, config, unpack(config, weights), Path(settings.tokenizer))
    log["finished"] = step >= settings.steps
    if log["finished"]:
        pools = jax.device_put(feed.held_out(), jax.local_devices()[0])
        losses = held_out_losses(config, bins, batch=64, dtype=dtype)(weights, pools, jax.random.key(settings.seed))
        log["held_out"] = {
            bin.length: each._asdict() for bin, each in zip(bins, jax.tree.map(float, losses), strict=True)
        }
        print(json.dumps({"held_out": log["held_out"]}), flush=True)
    feed.cancel()
    log["seconds"] = round(time.monotonic() - began, 1)
    (output / "train_log.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    return log


def _stop_on_sigterm() -> list[int]:
    """A list that is empty until SIGTERM arrives."""
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    return stop


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small_model.train", description="Train the small checkpoint."
    )
    parser.add_argument("--tokenizer", required=True, help="directory with tokenizer.json")
    parser.add_argument("--output", required=True, help="directory for the checkpoint, the log and the state")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--batch", type=int, default=512, help="256-token units in a step")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3, help="at its peak")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--pool", type=int, default=2_000_000, help="zero-shot sequences to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", metavar="DIR", help="start from this checkpoint's weights")
    parser.add_argument("--resume", action="store_true", help="go on from OUTPUT's state")
    try:
        settings = Settings(**vars(parser.parse_args()))
        tokenizer = Path(settings.tokenizer)
        config = small_config(tokenizer)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited by the workers; this process gets a handler below
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.small_model.feed", "benchmarks.small_model.pool"])
        forkserver.ensure_running()
        workers = max(1, (os.cpu_count() or 2) - 1)
        executor = ProcessPoolExecutor(workers, context)
        try:
            train(settings, config, partial(build_part, tokenizer), executor)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
    except (ValueError, FileNotFoundError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
