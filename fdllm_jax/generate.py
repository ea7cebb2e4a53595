"""Command line: `python -m fdllm_jax.generate "prompt"`."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdllm_jax import command_line
from fdllm_jax.options import add_settings, settings_of
from fdllm_jax.trace import Trace, check_trace_path, write_trace

if TYPE_CHECKING:
    from fdllm_jax.engine import LLM
    from fdllm_jax.job import Result, Watcher

PROGRAM = "fdllm_jax.generate"


def parser() -> argparse.ArgumentParser:
    """The command line's options; those of `Settings` keep their names and defaults."""
    p = command_line.Parser(PROGRAM, "Generate text with a masked-diffusion language model.")
    command_line.add_prompts(p)
    command_line.add_model(p)
    add_settings(p)
    o = p.add_argument_group("output")
    o.add_argument("--stats", action="store_true", help="figures of the run, on standard error")
    o.add_argument("--json", action="store_true", help="one JSON object a prompt instead of text")
    o.add_argument("--trace", metavar="FILE.html", help="write a page that replays the denoising")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for a user's error."""
    return command_line.run(PROGRAM, partial(_generate, parser().parse_args(arguments)))


def _generate(options: argparse.Namespace) -> None:
    settings = settings_of(options)
    prompts = command_line.read_prompts(options.prompt, options.prompt_file)
    if not prompts:
        raise ValueError('no prompt: give one as an argument, with --prompt-file FILE, or "-" for standard input')
    if options.trace in ("", "-"):
        raise ValueError(f"--trace {options.trace!r}: expected the name of a file")
    if options.trace is not None:
        check_trace_path(Path(options.trace))

    start = time.perf_counter()
    command_line.use_compilation_cache()
    command_line.check_device()
    from fdllm_jax.engine import LLM
    from fdllm_jax.job import Refusal

    llm = LLM(options.model, dtype=options.dtype, kernels=options.kernels)
    loaded = time.perf_counter()
    llm.compile(prompts, settings, raw=options.raw)  # refuses prompts that cannot be served
    results: list[Result] = []

    def keep() -> str:
        _print(llm, prompts, list(results), json_lines=options.json)
        return f"{len(results)} of {len(prompts)} responses had finished" if len(prompts) > 1 else ""

    with _display(llm, len(prompts), shown=not options.json) as watch, command_line.at_interrupt(keep):
        for result in llm.stream(prompts, settings, raw=options.raw, watch=watch):
            assert not isinstance(result, Refusal)
            results.append(result)
    done = time.perf_counter()

    _print(llm, prompts, results, json_lines=options.json)
    results.sort(key=lambda result: result.index)
    if options.trace is not None:
        write_trace(Path(options.trace), [trace_of(llm, p, r) for p, r in zip(prompts, results, strict=True)])
    if options.stats:
        print(_stats(llm, results, load=loaded - start, generate=done - loaded - llm.compile_seconds), file=sys.stderr)


def _display(llm: "LLM", prompts: int, *, shown: bool) -> "AbstractContextManager[Watcher | None]":
    """A watcher that shows the texts as they are decoded, on a terminal."""
    if not shown or not sys.stdout.isatty():
        return nullcontext()
    from fdllm_jax.display import display

    return display(llm.tokenizer, prompts)


def _print(llm: "LLM", prompts: Sequence[str], results: "Sequence[Result]", *, json_lines: bool) -> None:
    for result in sorted(results, key=lambda result: result.index):
        if json_lines:
            print(json.dumps(record(llm, result), ensure_ascii=False))
        else:
            if len(prompts) > 1 and sys.stdout.isatty():
                print(f"── {' '.join(prompts[result.index].split())[:70]}")
            print(result.text)
    sys.stdout.flush()


def record(llm: "LLM", result: "Result") -> dict[str, Any]:
    """What `--json` prints of a result."""
    return {
        "index": result.index,
        "text": result.text,
        "tokens": len(result.token_ids),
        "prompt_tokens": len(result.prompt_ids),
        "steps": result.steps,
        "forwards": result.forwards,
        "tokens_per_step": result.tokens_per_step,
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "stop_reason": result.stop_reason,
        "method": result.settings.method,
        "model": llm.name,
        "settings": result.settings.used(),
    }


def trace_of(llm: "LLM", prompt: str, result: "Result") -> Trace:
    """What a trace page shows of a result."""
    return Trace(
        prompt=prompt,
        pieces=llm.tokenizer.pieces(result.token_ids),
        steps=result.step_of,
        confidences=result.confidence_of,
        rules=result.rule_of,
        method=result.settings.method,
        settings=result.settings.used(),
    )


def _stats(llm: "LLM", results: "Sequence[Result]", *, load: float, generate: float) -> str:
    import jax

    tokens = sum(len(r.token_ids) for r in results)
    steps = sum(r.steps for r in results)
    rules = Counter(rule for r in results for rule in r.rule_of)
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    lines = {
        "model": f"{llm.name}, {llm.dtype}, on {device.device_kind}",
        "load": f"{load:.2f} s",
        "compile": f"{llm.compile_seconds:.2f} s",
        "generate": f"{generate:.2f} s for {len(results)} prompt{'s' * (len(results) > 1)}",
        "tokens": f"{tokens} in {steps} steps and {sum(r.forwards for r in results)} forwards, "
        f"{tokens / steps:.2f} tokens per step",
        "by rule": ", ".join(f"{count} {rule}" for rule, count in rules.most_common()),
        "speed": f"{tokens / generate:.1f} tokens per second, prefill included, compilation not",
        "slots": f"{llm.load}; {llm.programs} program{'s' * (llm.programs > 1)} compiled",
        "memory": str(llm.plan) + (f"; {memory / 1e9:.2f} GB at the peak" if memory else ""),
    }
    return "\n".join(f"{name:>9}: {value}" for name, value in lines.items())


if __name__ == "__main__":
    command_line.exit_on_ctrl_c(PROGRAM)
    sys.exit(main())
