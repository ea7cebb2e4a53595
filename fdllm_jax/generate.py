"""Command line: `python -m fdllm_jax.generate "prompt"`."""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fdllm_jax.options import add_settings, settings_of
from fdllm_jax.settings import DTYPES
from fdllm_jax.trace import Trace, check_trace_path, write_trace

if TYPE_CHECKING:
    from fdllm_jax.engine import LLM, Result

PROGRAM = "fdllm_jax.generate"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: {message} (--help lists the options)\n")


def parser() -> argparse.ArgumentParser:
    """The command line's options; those of `Settings` keep their names and defaults."""
    from pallas_kernels.implementation import NAMES  # brings JAX along

    p = _Parser(prog=f"python -m {PROGRAM}", description="Generate text with a masked-diffusion language model.")
    p.add_argument("prompt", nargs="*", help="one or more prompts; - reads one from standard input")
    p.add_argument(
        "--prompt-file", action="append", default=[], metavar="FILE", help="a file that holds one prompt (repeatable)"
    )
    p.add_argument(
        "--model",
        metavar="PATH",
        help="safetensors or Orbax directory, or hub id (default: the small model that ships)",
    )
    p.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    p.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="of weights and activations (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    p.add_argument("--kernels", default="auto", choices=NAMES, help="implementation of the GPU operations")

    add_settings(p)
    o = p.add_argument_group("output")
    o.add_argument("--stats", action="store_true", help="figures of the run, on standard error")
    o.add_argument("--json", action="store_true", help="one JSON object a prompt instead of text")
    o.add_argument("--trace", metavar="FILE.html", help="write a page that replays the denoising")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 2 for a user error, 130 when interrupted."""
    options = parser().parse_args(arguments)
    try:
        return _generate(options)
    except BrokenPipeError:  # the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.strerror is None:
            return _fail(str(error))
        return _fail(f"{error.filename or 'standard output'}: {error.strerror}")
    except ValueError as error:
        return _fail(str(error))
    except RuntimeError as error:  # JAX's own error has no narrower name that lasts
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _fail("out of memory: give fewer prompts at once, shorter ones, or a smaller --gen-length")


def _fail(message: str) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return 2


def _generate(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    prompts = _prompts(options.prompt, options.prompt_file)
    if sys.stdout is None:
        raise ValueError("standard output is closed")
    if options.trace in ("", "-"):
        raise ValueError(f"--trace {options.trace!r}: expected the name of a file")
    if options.trace is not None:
        check_trace_path(Path(options.trace))

    start = time.perf_counter()
    use_compilation_cache()
    check_device()
    from fdllm_jax.engine import LLM

    llm = LLM(options.model, dtype=options.dtype, kernels=options.kernels)
    loaded = time.perf_counter()
    if sys.stdout.isatty() and not options.json:
        from fdllm_jax.display import display

        with display(llm.tokenizer, len(prompts)) as watch:
            results = llm.generate(prompts, settings, raw=options.raw, watch=watch)
    else:
        results = llm.generate(prompts, settings, raw=options.raw)
    done = time.perf_counter()

    for prompt, result in zip(prompts, results, strict=True):
        if options.json:
            print(json.dumps(record(llm, result), ensure_ascii=False))
        else:
            if len(results) > 1 and sys.stdout.isatty():
                print(f"── {' '.join(prompt.split())[:70]}")
            print(result.text)
    sys.stdout.flush()
    if options.trace is not None:
        write_trace(Path(options.trace), [trace_of(llm, p, r) for p, r in zip(prompts, results, strict=True)])
    if options.stats:
        print(_stats(llm, results, load=loaded - start, generate=done - loaded - llm.compile_seconds), file=sys.stderr)
    return 0


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, in $JAX_COMPILATION_CACHE_DIR or the user's cache directory."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fdllm_jax")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        if not folder.is_absolute() or not os.access(folder, os.W_OK):
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def check_device() -> None:
    """Raise ValueError where JAX finds nothing to run on."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        hint = f"JAX_PLATFORMS={platforms} asks for what is not here" if platforms else "see JAX's installation guide"
        raise ValueError(f"JAX finds no device to run on; {hint}") from error


def exit_on_ctrl_c() -> None:
    """From now on Ctrl-C ends the process at once, with code 130; what is on the terminal stays.

    A thread waits for the signal: a Python handler would have to wait until XLA gives the main thread back.
    """

    def wait() -> None:
        number = signal.sigwait({signal.SIGINT})
        cursor = "\x1b[?25h\n" if sys.stdout is not None and sys.stdout.isatty() else ""
        os.write(2, f"{cursor}{PROGRAM}: interrupted\n".encode())
        os._exit(128 + number)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=wait, daemon=True).start()


def _prompts(given: Sequence[str], files: Sequence[str]) -> list[str]:
    if [*given, *files].count("-") > 1:
        raise ValueError("- was given more than once: standard input holds one prompt")
    prompts = [_standard_input() if prompt == "-" else prompt for prompt in given]
    for file in files:
        try:
            prompts.append(_standard_input() if file == "-" else Path(file).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt-file {file}: not UTF-8 text ({error.reason} at byte {error.start})") from error
        except OSError as error:
            raise ValueError(f"--prompt-file {file}: {error.strerror}") from error
    if not prompts:
        raise ValueError('no prompt: give one as an argument, with --prompt-file FILE, or "-" for standard input')
    if blank := [str(i) for i, prompt in enumerate(prompts) if not prompt.strip()]:
        raise ValueError(f"empty prompt: number {', '.join(blank)} (from 0) is blank")
    return prompts


def _standard_input() -> str:
    if sys.stdin is None:
        raise ValueError("- asks for standard input, which is closed")
    return sys.stdin.read()


def record(llm: "LLM", result: "Result") -> dict[str, Any]:
    """What `--json` prints of a result."""
    return {
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
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    lines = {
        "model": f"{llm.name}, {llm.dtype}, on {device.device_kind}",
        "load": f"{load:.2f} s",
        "compile": f"{llm.compile_seconds:.2f} s",
        "generate": f"{generate:.2f} s for {len(results)} prompt{'s' * (len(results) > 1)}",
        "tokens": f"{tokens} in {steps} steps and {sum(r.forwards for r in results)} forwards, "
        f"{tokens / steps:.2f} tokens per step",
        "speed": f"{tokens / generate:.1f} tokens per second, prefill included, compilation not",
        **({"memory": f"{memory / 1e9:.2f} GB at the peak"} if memory else {}),
    }
    return "\n".join(f"{name:>9}: {value}" for name, value in lines.items())


if __name__ == "__main__":
    exit_on_ctrl_c()
    sys.exit(main())
