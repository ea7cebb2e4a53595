"""Each GPU operation at the LLaDA-8B shape: its time, its error and its floor, beside XLA and the usual libraries.

`python -m benchmarks.kernels` writes results/kernels.json; `--sweep` times other tiles and only prints; `--tiny`
runs small shapes on the CPU. A time is the device's: one program makes many calls, each call's input depends on the
last one's output, and the weights or caches of successive calls do not fit the L2 together. The program is run once
and `LONG` times back to back, and the difference is divided, so that launching and waiting drop out.
"""

import argparse
import dataclasses
import importlib.util
import math
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import report, roofline
from benchmarks.kernel_cases import DTYPE, LARGE, OPS, ROPE_THETA, TINY, Case, Outputs
from benchmarks.roofline import LLADA_8B, Shape
from fdllm_jax import command_line
from pallas_kernels import Implementation, flash, head_statistics_kernel, matmul, qkv_rope_cache_kernel
from pallas_kernels.weight_product import Case as TileCase
from pallas_kernels.weight_product import Tiles

LIMIT = 1e-2  # of the error norm in bf16
LONG = 5
PROGRAM_SECONDS = 2e-3  # of one program, at the floor: far more than the host needs to launch it
ROTATED_BYTES = 300e6  # six times the H200's L2
MOST_SETS = 12
BODY_CALLS = 6  # at least, in a loop's body: a turn of the loop costs some microseconds; each call is compiled anew
ENOUGH_SECONDS = 3.0  # a slow program is repeated less often: until then, but three times at least
WORKERS = 16  # threads that compile
# Of the programs that check errors: autotuning their fp32 products would take longer than all that is measured.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
PYTORCH = "pytorch: 3 projections, RoPE, cache write (CUDA graph)"


Call = Callable[[Any, Any], Outputs]  # (carry, operands) -> outputs

# For --sweep: the table that holds an operation's tiles, and the tiles to try.
PRODUCT_TILES = tuple(
    Tiles(rows=rows, columns=columns, inner=inner, warps=warps, stages=stages)
    for rows in (16, 32, 64, 128)
    for columns, warps in ((64, 4), (128, 4), (128, 8), (256, 8))
    for inner, stages in ((64, 3), (64, 4), (64, 5), (128, 3), (128, 4))
)
SPLIT_TILES = tuple(
    Tiles(rows=rows, columns=columns, inner=inner, warps=warps, stages=stages, splits=splits)
    for rows in (16, 32, 64, 128)
    for columns, splits in ((32, 1), (64, 2), (64, 4), (128, 4))
    for inner, stages, warps in ((64, 4, 4), (64, 5, 4), (64, 5, 8), (128, 3, 4), (128, 4, 4))
)
FLASH_TILES = tuple(
    flash.Tiles(rows=rows, keys=keys, num_warps=warps, num_stages=stages)
    for rows, warps in ((16, 4), (32, 4), (64, 4), (128, 8))
    for keys in (32, 64)
    for stages in (2, 3, 4)
)
SWEEPS: Mapping[str, tuple[ModuleType, str, tuple[Any, ...]]] = {
    "qkv_rope_cache": (qkv_rope_cache_kernel, "CASES", PRODUCT_TILES),
    "qkv_rope_cache_returning": (qkv_rope_cache_kernel, "CASES", PRODUCT_TILES),
    "out": (matmul, "LINEAR_RESIDUAL", SPLIT_TILES),
    "down": (matmul, "LINEAR_RESIDUAL", SPLIT_TILES),
    "gate_up_silu": (matmul, "GATE_UP_SILU", PRODUCT_TILES),
    "head_statistics": (head_statistics_kernel, "CASES", PRODUCT_TILES),
    "scheduled_attention": (flash, "TILES", FLASH_TILES),
    "scheduled_attention_scores": (flash, "TILES", FLASH_TILES),
    "verify_attention": (flash, "TILES", FLASH_TILES),
    "onepass_attention": (flash, "TILES", FLASH_TILES),
}


def program_of(case: Case, call: Call, *, turns: int, rounds: int) -> Callable[..., Any]:
    """(sets, (carry, kept)) -> the same after `turns` of a loop over `rounds` rounds of one call for each set.

    What a call of a turn leaves is kept, or XLA would drop the call.
    """

    def program(sets: tuple[Any, ...], state: Any) -> Any:
        def turn(_: jax.Array, state: Any) -> Any:
            carry, kept = state[0], []
            for operands in sets * rounds:
                carry, keep = case.follow(carry, call(carry, operands))
                kept.append(keep)
            return case.join(carry, tuple(kept)), tuple(kept)

        return jax.lax.fori_loop(0, turns, turn, state)

    return program


def error_of(case: Case, kernels: Implementation) -> Callable[..., jax.Array]:
    """(carry, operands) -> the largest ||out - reference|| / ||reference|| of the outputs, in fp32; NaN stays NaN.

    The reference is XLA's on fp32 copies of the same inputs. Of whole numbers (tokens) it is the share that differs.
    """

    def program(carry: Any, operands: Any) -> jax.Array:
        exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == DTYPE else x, (carry, operands))
        errors = []
        for got, want in zip(case.call(carry, operands, kernels), case.call(exact[0], exact[1], "xla"), strict=True):
            if jnp.issubdtype(want.dtype, jnp.integer):
                errors.append(jnp.mean((got != want).astype(jnp.float32)))
            else:
                difference = got.astype(jnp.float32) - want
                errors.append(jnp.sqrt(jnp.sum(difference**2) / jnp.sum(want**2)))
        return jnp.max(jnp.stack(errors))

    return program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """How things are measured. tiny: as few calls as possible."""

    repeats: int
    seed: int
    device: roofline.Device | None
    tiny: bool
    pool: ThreadPoolExecutor

    def floor(self, case: Case) -> float | None:
        return None if self.device is None else case.work.floor(self.device)

    def inputs(self, case: Case, *, sets: int) -> tuple[Any, tuple[Any, ...]]:
        return case.make(jax.random.key(self.seed), sets)

    def sets(self, case: Case) -> int:
        """How many sets of operands the calls rotate over, so that none finds its own in the L2."""
        return 2 if self.tiny else max(2, min(MOST_SETS, math.ceil(ROTATED_BYTES / case.operand_bytes)))

    def loop(self, case: Case) -> dict[str, int]:
        """The turns of a program's loop, and how often each goes through the sets."""
        rounds = 1 if self.tiny else math.ceil(BODY_CALLS / self.sets(case))
        a_turn = case.work.floor(self.device or roofline.H200) * rounds * self.sets(case)
        return {"turns": 1 if self.tiny else math.ceil(PROGRAM_SECONDS / a_turn), "rounds": rounds}

    def compile(self, case: Case, call: Call) -> Future:
        """The timed program of one implementation, compiled in another thread; traced in this one."""
        carry, sets = jax.eval_shape(lambda key: case.make(key, self.sets(case)), jax.random.key(0))
        state = carry, (kept_shapes(case, call, carry, sets[0]),) * (len(sets) * self.loop(case)["rounds"])
        program = jax.jit(program_of(case, call, **self.loop(case)), donate_argnums=1)
        return self.pool.submit(program.trace(sets, state).lower().compile)

    def compile_check(self, case: Case, kernels: Implementation) -> Future:
        """The program of `error_of`, compiled in another thread."""
        carry, sets = jax.eval_shape(lambda key: case.make(key, 1), jax.random.key(0))
        lowered = jax.jit(error_of(case, kernels)).trace(carry, sets[0]).lower()
        return self.pool.submit(lowered.compile, UNTUNED)

    def time(self, case: Case, call: Call, compiled: Any, inputs: Any = None) -> dict[str, float]:
        """median, low and high seconds of a call, and repeats. inputs: for `sets(case)` sets, if they are there."""
        carry, sets = inputs or self.inputs(case, sets=self.sets(case))
        kept = kept_shapes(case, call, carry, sets[0])
        calls = self.loop(case)["rounds"] * len(sets)
        state = carry, tuple(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept) for _ in range(calls))

        def run(times: int) -> float:
            now = jax.block_until_ready(jax.tree.map(jnp.copy, state))
            start = time.perf_counter()
            for _ in range(times):
                now = compiled(sets, now)
            jax.block_until_ready(now)
            return time.perf_counter() - start

        run(LONG)
        calls *= (LONG - 1) * self.loop(case)["turns"]
        samples, start = [], time.perf_counter()
        while len(samples) < self.repeats and (len(samples) < 3 or time.perf_counter() - start < ENOUGH_SECONDS):
            samples.append((run(LONG) - run(1)) / calls)
        return report.spread(samples)


def kept_shapes(case: Case, call: Call, carry: Any, operands: Any) -> Any:
    """Shapes of what a call leaves to be kept."""
    return jax.eval_shape(lambda carry, operands: case.follow(carry, call(carry, operands))[1], carry, operands)


def cudnn_attention(case: Case) -> Call:
    """The same queries and keys through cuDNN's flash attention, one sequence a slot."""
    slots, rows = case.at["slots"], case.at["rows"]

    def call(q: Any, operands: Any) -> Outputs:
        q4, k4, v4 = (x.reshape(slots, -1, *x.shape[1:]) for x in (q, operands[0], operands[1]))
        out = jax.nn.dot_product_attention(q4, k4, v4, implementation="cudnn")
        return (out.reshape(slots * rows, *q.shape[1:]),)

    return call


def torch_qkv(shape: Shape, rows: int, repeats: int) -> dict[str, Any]:
    """Seconds of three projections, RoPE and the cache write as separate PyTorch operations, from a replayed graph.

    The cosines and sines are computed beforehand, and a graph has no launch gaps: both favour this baseline.
    """
    import torch  # only here: nothing else needs it, and its import takes seconds

    width, half, sets = shape.heads * shape.head_dim, shape.head_dim // 2, 3
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(rows, shape.d_model, **on_gpu)
    weights = [[torch.randn(width, shape.d_model, **on_gpu) * shape.d_model**-0.5 for _ in "qkv"] for _ in range(sets)]
    caches = [torch.randn(rows + 64, shape.heads, shape.head_dim, **on_gpu) for _ in "kv"]
    row = torch.randperm(rows + 64, device="cuda")[:rows]
    frequency = ROPE_THETA ** (-torch.arange(half, device="cuda", dtype=torch.float32) / half)
    angle = (torch.randint(0, 4096, (rows, 1), device="cuda") * frequency)[:, None]
    cos, sin = torch.cos(angle), torch.sin(angle)

    def rotated(flat: Any) -> Any:
        low, high = flat.view(rows, shape.heads, shape.head_dim).float().chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(torch.bfloat16)

    def a_round() -> None:
        for w_q, w_k, w_v in weights:
            q, k, v = (torch.nn.functional.linear(x, weight) for weight in (w_q, w_k, w_v))
            rotated(q)
            caches[0].index_copy_(0, row, rotated(k))
            caches[1].index_copy_(0, row, v.view(rows, shape.heads, shape.head_dim))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a_round()
        a_round()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a_round()
    work = roofline.qkv_rope_cache(shape, rows=rows)
    replays = max(1, math.ceil(PROGRAM_SECONDS / (work.floor(roofline.H200) * sets)))
    samples = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e-3 / (replays * sets))
    return report.spread(samples[2:])


def torch_has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


class Measurements:
    """The rows and the lines of a run: each line is printed when it is known, and a failure is a line too."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failures = 0

    def say(self, case: Case, kernels: str, text: str) -> None:
        print(f"{case.name:52} {kernels:10} {text}", flush=True)

    def fail(self, case: Case, kernels: str, what: object) -> None:
        self.failures += 1
        name = f"{type(what).__name__}: " if isinstance(what, Exception) else ""
        self.say(case, kernels, f"FAILED {name}{' '.join(str(what).split())[:300]}")

    def attempt(self, case: Case, kernels: str, action: Callable[[], Any]) -> Any:
        """What the action returns; None, and a line, if it raises (a compile error, out of shared memory, ...)."""
        try:
            return action()
        except Exception as error:
            self.fail(case, kernels, error)
            return None


def ours(case: Case, kernel: Implementation) -> tuple[Implementation, ...]:
    """What to time and check beside XLA: `kernel`, and the kernel in plain Triton where jax_triton is installed."""
    if not case.tiled:
        return ()
    with_triton = kernel == "pallas" and case.triton and importlib.util.find_spec("jax_triton") is not None
    return (kernel, "triton") if with_triton else (kernel,)


def measure(cases: Sequence[Case], bench: Bench, kernel: Implementation, to: Measurements) -> None:
    """Time and check the cases of one operation; `kernel` is "pallas" or "interpret"."""
    gpu = jax.default_backend() == "gpu"
    calls: list[dict[str, Call]] = []
    compiled: list[dict[str, Future]] = []
    checks: list[dict[str, Future]] = []
    for case in cases:
        mine: dict[str, Call] = {"xla": partial(call_of, case, "xla")}
        if case.op == "scheduled_attention" and gpu:
            mine["cudnn"] = cudnn_attention(case)
        mine |= {name: partial(call_of, case, name) for name in ours(case, kernel)}
        calls.append(mine)
        traced = {
            name: to.attempt(case, name, lambda name=name, case=case, mine=mine: bench.compile(case, mine[name]))
            for name in mine
        }
        compiled.append({name: future for name, future in traced.items() if future is not None})
        traced = {
            name: to.attempt(case, name, partial(bench.compile_check, case, name))
            for name in ours(case, kernel)
            if name in compiled[-1]
        }
        checks.append({name: future for name, future in traced.items() if future is not None})
    for programs, check in zip(compiled, checks, strict=True):
        for future in (*programs.values(), *check.values()):
            future.exception()  # waits: nothing compiles while something is timed
    for case, mine, programs, check in zip(cases, calls, compiled, checks, strict=True):
        baseline = None
        if case.op == "qkv_rope_cache" and gpu and torch_has_cuda():
            figure = to.attempt(case, "pytorch", lambda case=case: torch_qkv(LLADA_8B, case.at["rows"], bench.repeats))
            if figure:
                baseline = {
                    "name": PYTORCH,
                    "median": figure["median"],
                }
                to.say(case, "pytorch", times(figure, bench.floor(case)))
        for name, future in programs.items():
            figure = to.attempt(
                case, name,
                lambda name=name, future=future, case=case, mine=mine: bench.time(case, mine[name], future.result()),
            )  # fmt: skip
            if figure is None:
                continue
            floor = bench.floor(case)
            if floor is not None and figure["median"] < 0.8 * floor:
                to.fail(case, name, f"{figure['median'] * 1e6:.1f} us is below the floor: XLA removed or moved work")
                continue
            to.say(case, name, times(figure, floor))
            if name == "cudnn":
                baseline = {"name": "cuDNN (jax.nn.dot_product_attention)", "median": figure["median"]}
                continue
            if name == "xla" and baseline is None:
                baseline = {"name": "xla", "median": figure["median"]}
            against = baseline if name != "xla" else None
            at = {"op": case.op, **case.at, "kernels": name}
            value = figure.pop("median")
            to.rows.append(report.row(at, "time", "s", value, **figure, floor=floor, baseline=against))
        if not case.tiled:
            to.say(case, kernel, "no tiles for this shape: XLA's own runs")
        for name, future in check.items():
            error = to.attempt(case, name, partial(checked, case, bench, future))
            if error is None:
                continue
            if math.isfinite(error):
                at = {"op": case.op, **case.at, "kernels": name}
                to.rows.append(report.row(at, "error", "fraction", error))
            if error <= LIMIT:
                to.say(case, name, f"error {error:.1e}")
            else:
                to.fail(case, name, f"error {error:.1e} against the fp32 reference, over {LIMIT:.0e}")


def checked(case: Case, bench: Bench, program: Future) -> float:
    carry, sets = bench.inputs(case, sets=1)
    return float(program.result()(carry, sets[0]))


def times(figure: Mapping[str, float], floor: float | None) -> str:
    median, low, high = (figure[name] * 1e6 for name in ("median", "low", "high"))
    over = "" if floor is None else f"  floor {floor * 1e6:8.1f}  x {figure['median'] / floor:.2f}"
    return f"{median:9.1f} us ({low:.1f} to {high:.1f}){over}"


def fits(tiles: Any, rows: int) -> bool:
    """Whether tiles compute less than half as many rows again as there are."""
    return math.ceil(rows / tiles.rows) * tiles.rows < 1.5 * rows


def call_of(case: Case, kernels: Implementation, carry: Any, operands: Any) -> Outputs:
    return case.call(carry, operands, kernels)


def sweep(op: str, cases: Sequence[Case], bench: Bench, kernel: Implementation, to: Measurements) -> None:
    """Time every candidate of an operation at each shape, and XLA, and print the best; errors are not checked here."""
    module, table, candidates = SWEEPS[op]
    for case in cases:
        started: list[tuple[str, Call, Future | None]] = []

        def start(name: str, kernels: Implementation, case: Case = case, started: list = started) -> None:
            call: Call = partial(call_of, case, kernels)
            started.append((name, call, to.attempt(case, name, partial(bench.compile, case, call))))

        start("xla", "xla")
        for tiles in [tiles for tiles in candidates if fits(tiles, case.at["rows"])] or candidates[:1]:
            choice = {2: ((math.inf, math.inf, tiles),)} if module is flash else (TileCase(tiles=tiles),)
            # both are read while the program is traced
            with mock.patch.object(module, table, choice), mock.patch.object(flash, "CUDNN_PROGRAMS", math.inf):
                start(str(tiles), kernel)
        for _, _, future in started:
            if future is not None:
                future.exception()
        found, inputs = [], bench.inputs(case, sets=bench.sets(case))
        for name, call, future in started:
            if future is None:
                continue

            def timed(call: Call = call, future: Future = future, case: Case = case, inputs: Any = inputs) -> Any:
                return bench.time(case, call, future.result(), inputs)

            figure = to.attempt(case, name, timed)
            if figure:
                found.append((figure["median"], name))
                to.say(case, "sweep", f"{times(figure, bench.floor(case))}  {name}")
        if found:
            median, name = min(found)
            to.say(case, "BEST", f"{median * 1e6:9.1f} us  {name}")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description="Time and check the GPU kernels.")
    parser.add_argument("--ops", nargs="+", choices=tuple(OPS), default=tuple(OPS), metavar="OP", help=", ".join(OPS))
    parser.add_argument("--rows", nargs="+", type=int, help="rows of the products")
    parser.add_argument(
        "--slots", nargs="+", type=int, help="slots of the attention, 128 queries (verify: 32, one pass: 96) each"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="of the inputs; by default a fresh one")
    parser.add_argument("--sweep", action="store_true", help="time other tiles of the operations; writes nothing")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU; writes only where --output says")
    parser.add_argument("--output", type=Path, help="results file (default: benchmarks/results/kernels.json, of all)")
    chosen = parser.parse_args(given)
    numbers = [chosen.repeats, *(chosen.rows or ()), *(chosen.slots or ())]
    if min(numbers) < 1:
        parser.error("--rows, --slots and --repeats must be at least 1")
    if not 0 <= chosen.seed < 2**63:
        parser.error(f"--seed {chosen.seed}: expected 0 to 2^63 - 1")
    if chosen.sweep and chosen.output:
        parser.error("--sweep only prints: leave --output out")
    if not chosen.tiny and jax.default_backend() != "gpu":
        parser.error(f"this needs an NVIDIA GPU and JAX runs on {jax.default_backend()}: use --tiny to try it out")
    try:
        chosen.output = report.file_of("kernels", chosen, parser)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print and write the results; 1 if anything failed."""
    options = arguments(given)
    sizes = TINY if options.tiny else LARGE
    sizes = dataclasses.replace(
        sizes, rows=tuple(options.rows or sizes.rows), slots=tuple(options.slots or sizes.slots)
    )
    kernel: Implementation = "interpret" if options.tiny else "pallas"
    device = roofline.DEVICES.get(report.hardware())
    settings = {
        **dataclasses.asdict(sizes), "dtype": jnp.dtype(DTYPE).name, "seed": options.seed, "limit": LIMIT,
        "programs_back_to_back": LONG,
    }  # fmt: skip
    print(f"{report.hardware()}, jax {jax.__version__}, {settings}, {options.repeats} repeats: median (low to high)")
    if device is None:
        print("no measured ceilings for this device in benchmarks/roofline.py: no floors")
    file = options.output
    to, started = Measurements(), time.perf_counter()
    written: list[dict[str, Any]] = []
    with ThreadPoolExecutor(WORKERS) as pool, report.kept(file, written):
        bench = Bench(repeats=options.repeats, seed=options.seed, device=device, tiny=options.tiny, pool=pool)
        if options.sweep:
            for op in options.ops:
                sweep(op, OPS[op](sizes), bench, kernel, to)
        else:
            for op in options.ops:
                measure(OPS[op](sizes), bench, kernel, to)
                if file is not None and to.rows:  # after each operation: a run that is cut off has what it measured
                    report.write_part(file, settings=settings, rows=to.rows)
                    written[:] = to.rows
    if file is not None and to.rows and not options.sweep:
        report.finish(file)
        print(f"wrote {file}")
    print(f"{time.perf_counter() - started:.0f} s, {to.failures} failed", flush=True)
    return 1 if to.failures else 0


if __name__ == "__main__":
    command_line.exit_on_ctrl_c("benchmarks.kernels")
    sys.exit(main())
