"""Command line: `python -m fdllm_jax.lm_eval --model fdllm ...`: lm-evaluation-harness's own, which knows this model.

The harness has a fixed list of models and no plugins: a model of another package exists once its class is imported.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

from fdllm_jax import command_line

PROGRAM = "fdllm_jax.lm_eval"


def main() -> int:
    """Run the command with the process's arguments; returns the exit code: 0, or 2 for a user's error."""
    return command_line.run(PROGRAM, _evaluate)


def _evaluate() -> None:
    if find_spec("lm_eval") is None:
        raise ValueError("lm-evaluation-harness is not installed: pip install 'fdllm-jax[lm-eval]'")
    command_line.use_compilation_cache()
    command_line.check_device()
    for module in ("lm_eval.models", "fdllm_jax.evaluation.lm_eval_model"):  # they register what they hold
        import_module(module)
    import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    command_line.exit_on_ctrl_c(PROGRAM)
    sys.exit(main())
