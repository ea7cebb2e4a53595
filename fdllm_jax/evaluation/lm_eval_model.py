"""The model `fdllm` of lm-evaluation-harness 0.4.13; importing this file registers it there."""

import logging
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from tqdm import tqdm

from fdllm_jax.engine import LLM
from fdllm_jax.evaluation.lm_eval_arguments import Arguments
from fdllm_jax.evaluation.lm_eval_contexts import Conversation, pair_of, prompt_of
from fdllm_jax.job import Refusal
from fdllm_jax.likelihood import likelihoods

_log = logging.getLogger(__name__)


@register_model("fdllm")
class FdllmLM(LM):
    """An `LLM` as the harness sees a model. given: `--model_args`; see `Arguments`."""

    def __init__(self, **given: Any):
        super().__init__()
        self.arguments = its = Arguments.of(given)
        self.llm = LLM(its.model, slots=its.slots, capacity=its.capacity, dtype=its.dtype, kernels=its.kernels)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The responses, without their stop strings. A prompt that does not fit has an empty one, and is told of."""
        if not requests:
            return []
        prompts: list[Any] = [prompt_of(self.llm.tokenizer, request.args[0]) for request in requests]
        settings = [self.arguments.of_request(i, request.args[1]) for i, request in enumerate(requests)]
        texts, refusals = [""] * len(requests), []
        stream = self.llm.stream(prompts, settings, raw=True, longest_first=True)
        for one in tqdm(stream, total=len(requests), desc="Generating", disable=disable_tqdm):
            if isinstance(one, Refusal):
                refusals.append(one)
                continue
            texts[one.index] = one.text
            self.cache_hook.add_partial("generate_until", requests[one.index].args, one.text)
        if refusals:
            _log.warning("%d prompts have an empty response: %s", len(refusals), refusals[0].reason)
        return texts

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """LLaDA's estimate of each continuation's log-likelihood, and whether greedy decoding gives it."""
        pairs = [pair_of(self.llm.tokenizer, *request.args[:2]) for request in requests]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        its = likelihoods(self.llm, pairs, samples=self.arguments.samples, seed=self.arguments.settings.seed)
        for i, likelihood in tqdm(its, total=len(requests), desc="Estimating", disable=disable_tqdm):
            found[i] = (likelihood.log_probability, likelihood.is_greedy)
            self.cache_hook.add_partial("loglikelihood", requests[i].args, found[i])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Raises ValueError: the estimate is of a continuation that the model sees whole."""
        raise ValueError(
            "the task asks for the likelihood of whole documents (loglikelihood_rolling), of which a masked-diffusion "
            "model has no estimate beyond its context: take tasks of generate_until, loglikelihood or multiple_choice"
        )

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> Conversation:
        """The conversation in the checkpoint's chat form; without a generation prompt its last message goes on."""
        return Conversation.of(self.llm.tokenizer, chat_history, begun=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The checkpoint's chat template, for the harness's records. Raises ValueError where another is asked for."""
        if isinstance(chat_template, str):
            raise ValueError(f"--apply_chat_template {chat_template}: the checkpoint's own has no name; give none")
        return (self.llm.tokenizer.chat_template or "") if chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache of requests."""
        return self.llm.name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What decides the results, for the harness's records."""
        its = self.arguments
        return {
            "fdllm": {
                "model": self.llm.name,
                "dtype": str(self.llm.dtype),
                "kernels": its.kernels,
                "samples": its.samples,
                "method": its.settings.method,
                **its.settings.used(),
                "gen_length": its.gen_length,
            }
        }
