"""The reference against Hugging Face's Llama (the same block, here without its causal mask) and hand-worked cases."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.reference.checkpoint import random_checkpoint, random_config, random_state_dict
from tests.reference.model import PREFIX, ReferenceLLaDA
from tests.reference.sampler import Forward, Sample, block_steps, generate_llada, generate_threshold, quotas

MASK, EOS, EOT, VOCAB = 9, 8, 7, 10
SHAPES = {
    "plain": {},
    "grouped": {"n_kv_heads": 2},
    "multi-query": {"n_kv_heads": None, "multi_query_attention": True, "mlp_hidden_size": None},
    "all-heads": {"n_kv_heads": None},
    "biases": {"include_qkv_bias": True, "n_kv_heads": 2},
    "tied": {"weight_tying": True, "embedding_size": 128},
    "scaled-padded": {"scale_logits": True, "embedding_size": 128},
}


def random_model(seed: int, **overrides: Any) -> ReferenceLLaDA:
    config = random_config(**overrides)
    return ReferenceLLaDA(config, random_state_dict(config, seed))


def half_masked(seed: int, length: int, mask_id: int = 95) -> Tensor:
    """Random ids, the second half of them [MASK]: [length]."""
    ids = torch.randint(0, 94, (length,), generator=torch.Generator().manual_seed(seed))
    ids[length // 2 :] = mask_id
    return ids


# --- model ---


def llama(config: dict, weights: dict[str, Tensor]) -> LlamaForCausalLM:
    """The same function as Hugging Face's Llama, given a mask that hides nothing."""
    rows = {name: weights[f"{PREFIX}blocks.0.{name}.weight"].shape[0] for name in ("k_proj", "ff_proj")}
    model = LlamaForCausalLM(
        LlamaConfig.from_dict(
            {
                "vocab_size": weights[f"{PREFIX}wte.weight"].shape[0],
                "hidden_size": config["d_model"],
                "num_hidden_layers": config["n_layers"],
                "num_attention_heads": config["n_heads"],
                "num_key_value_heads": rows["k_proj"] * config["n_heads"] // config["d_model"],
                "intermediate_size": rows["ff_proj"],
                "rms_norm_eps": config["rms_norm_eps"],
                "rope_theta": config["rope_theta"],
                "attention_bias": config["include_qkv_bias"],
            }
        )
    )
    names = {
        "wte": "model.embed_tokens",
        "ln_f": "model.norm",
        "ff_out": "lm_head",
        "blocks": "model.layers",
        "attn_norm": "input_layernorm",
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "attn_out": "self_attn.o_proj",
        "ff_norm": "post_attention_layernorm",
        "ff_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
    }
    renamed = {}
    for name, tensor in weights.items():
        parts = name.removeprefix(PREFIX).split(".")
        in_block = parts[0] == "blocks"
        renamed[".".join("mlp.down_proj" if in_block and p == "ff_out" else names.get(p, p) for p in parts)] = tensor
    if config["include_qkv_bias"]:  # Llama has one on the output projection too
        renamed |= {f"model.layers.{i}.self_attn.o_proj.bias": torch.zeros(64) for i in range(config["n_layers"])}
    if config["weight_tying"]:
        renamed["lm_head.weight"] = weights[f"{PREFIX}wte.weight"]
    model.load_state_dict(renamed)
    return model.eval()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_llama_without_its_causal_mask(shape: str) -> None:
    config = random_config(**SHAPES[shape])
    weights = random_state_dict(config, seed=list(SHAPES).index(shape))
    ids = torch.stack([half_masked(seed, 20) for seed in (1, 2)])
    with torch.inference_mode():
        expected = llama(config, weights)(ids, attention_mask=torch.zeros(2, 1, 20, 20)).logits[..., :96]
    if config["scale_logits"]:
        expected = expected / math.sqrt(config["d_model"])
    actual = ReferenceLLaDA(config, weights)(ids)
    assert actual.shape == (2, 20, 96)
    assert (actual - expected).abs().max() / expected.abs().max() < 5e-6


def test_padding_changes_nothing_on_either_side() -> None:
    model = random_model(3)
    ids, pads = half_masked(3, 14), torch.full((5,), 94)
    alone = model.sequence(ids)
    yes, no = torch.ones(14, dtype=torch.bool), torch.zeros(5, dtype=torch.bool)
    batch = torch.stack([torch.cat([pads, ids]), torch.cat([ids, pads])])
    left, right = model(batch, torch.stack([torch.cat([no, yes]), torch.cat([yes, no])]))
    for padded in (left[5:], right[:14]):
        assert (padded - alone).abs().max() / alone.abs().max() < 1e-5
    other = batch.clone()
    other[0, :5] = other[1, 14:] = 11
    again = model(other, torch.stack([torch.cat([no, yes]), torch.cat([yes, no])]))
    assert torch.equal(again[0, 5:], left[5:]) and torch.equal(again[1, :14], right[:14])


def test_attention_is_bidirectional_and_ordered() -> None:
    model, ids = random_model(4), half_masked(4, 12)
    changed = ids.clone()
    changed[-1] = 5
    assert (model.sequence(changed)[0] - model.sequence(ids)[0]).abs().max() > 0.1
    swapped = ids.clone()
    swapped[[0, 1]] = ids[[1, 0]]
    assert (model.sequence(swapped)[-1] - model.sequence(ids)[-1]).abs().max() > 0.1


def test_bf16_runs_in_bf16_and_stays_near_fp32() -> None:
    config = random_config()
    weights = {name: tensor.bfloat16() for name, tensor in random_state_dict(config, 5).items()}
    ids = half_masked(5, 20)
    exact = ReferenceLLaDA(config, {name: tensor.float() for name, tensor in weights.items()}).sequence(ids)
    actual = ReferenceLLaDA(config, weights).sequence(ids)
    assert actual.dtype == torch.float32
    assert 1e-4 < (actual - exact).abs().max() / exact.abs().max() < 5e-2


# --- checkpoint ---


@pytest.mark.parametrize("shape", SHAPES)
def test_random_weights_give_varied_predictions(shape: str) -> None:
    model = random_model(6, **SHAPES[shape])
    predictions, confidences = [], []
    for seed in range(4):
        confidence, prediction = model.sequence(half_masked(seed, 40)).softmax(-1)[20:].max(-1)
        predictions += prediction.tolist()
        confidences += confidence.tolist()
    assert min(confidences) < 0.3 and max(confidences) > 0.9
    assert len(set(predictions)) >= 8


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    ids = half_masked(7, 16)
    single = random_checkpoint(tmp_path / "single", 7, tokenizer_from=tokenizer)
    sharded = random_checkpoint(tmp_path / "deep" / "sharded", 7, shards=3)
    expected = random_model(7).sequence(ids)
    assert torch.equal(ReferenceLLaDA.from_directory(single).sequence(ids), expected)
    assert torch.equal(ReferenceLLaDA.from_directory(sharded).sequence(ids), expected)
    assert (single / "tokenizer.json").exists() and not (sharded / "tokenizer.json").exists()
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(random_state_dict(random_config(), 7))
    assert all((sharded / file).exists() for file in index["weight_map"].values())
    half = random_checkpoint(tmp_path / "half", 7, dtype=torch.bfloat16)
    assert ReferenceLLaDA.from_directory(half).weights[f"{PREFIX}ln_f.weight"].dtype == torch.bfloat16


# --- samplers ---


class Stub:
    """A model that predicts `tokens` with probabilities `confidences` at the places after the prompt, whatever it sees.

    Both may be functions of the ids instead. The rest of the probability goes to the other ids in equal parts.
    """

    def __init__(self, prompt: list[int], predict: Callable[[list[int]], list[tuple[int, float]]]):
        self.start, self.predict, self.seen = len(prompt), predict, []

    def __call__(self, ids: Tensor) -> Tensor:
        self.seen.append(ids.tolist())
        logits = torch.zeros(len(ids), VOCAB)
        for place, (token, confidence) in enumerate(self.predict(ids.tolist())):
            logits[self.start + place] = math.log((1 - confidence) / (VOCAB - 1))
            logits[self.start + place, token] = math.log(confidence)
        return logits


def fixed(tokens: list[int], confidences: list[float], prompt: list[int] | None = None) -> Stub:
    return Stub(prompt or [1, 2], lambda ids: list(zip(tokens, confidences, strict=True)))


def llada(model: Forward, prompt: Sequence[int] = (1, 2), **settings: Any) -> Sample:
    return generate_llada(model, prompt, mask_id=MASK, eos_ids=(EOS, EOT), **settings)


def threshold(model: Forward, prompt: Sequence[int] = (1, 2), **settings: Any) -> Sample:
    return generate_threshold(model, prompt, mask_id=MASK, eos_ids=(EOS, EOT), **settings)


def test_quotas_are_spread_evenly() -> None:
    assert quotas(7, 3) == [3, 2, 2]
    assert quotas(2, 4) == [1, 1, 0, 0]
    assert block_steps(10, 4, 8) == [3, 3, 2]
    assert block_steps(10, 4, 3) == [1, 1, 1]
    with pytest.raises(ValueError, match="steps=2 is fewer than the 3 blocks"):
        block_steps(10, 4, 2)


def test_llada_commits_the_most_confident_of_the_block() -> None:
    # Blocks of 4 and 2, 3 + 2 steps: quotas 2 1 1, then 1 1. The last two places are surest but wait for their block.
    model = fixed([3, 4, 5, 6, 0, 1], [0.5, 0.9, 0.7, 0.6, 0.99, 0.98])
    sample = llada(model, gen_length=6, block_length=4, steps=5)
    assert sample.commit_step == [2, 0, 0, 1, 3, 4]
    assert sample.tokens == [3, 4, 5, 6, 0, 1]
    assert sample.confidence == pytest.approx([0.5, 0.9, 0.7, 0.6, 0.99, 0.98])
    assert (sample.steps, sample.forwards) == (5, 5)
    assert model.seen[1] == [1, 2, MASK, 4, 5, MASK, MASK, MASK]


def test_llada_ties_go_to_the_lower_position_and_id() -> None:
    sample = llada(lambda ids: torch.zeros(len(ids), VOCAB), gen_length=5, block_length=5, steps=3)
    assert sample.commit_step == [0, 0, 1, 1, 2]
    assert sample.tokens == [0] * 5


def test_llada_skips_steps_without_quota() -> None:
    # 9 steps over blocks of 2, 2 and 1 places: 3 each, of which one, one and two have no quota.
    model = fixed([3, 4, 5, 6, 0], [0.9, 0.8, 0.7, 0.6, 0.5])
    sample = llada(model, gen_length=5, block_length=2, steps=9)
    assert sample.commit_step == [0, 1, 2, 3, 4]
    assert sample.steps == sample.forwards == len(model.seen) == 5


def test_llada_stops_after_the_block_with_an_eos() -> None:
    for eos in (EOS, EOT):
        model = fixed([3, eos, 5, 6, 0, 1], [0.5, 0.9, 0.7, 0.6, 0.9, 0.9])
        sample = llada(model, gen_length=6, block_length=3, steps=6)
        assert sample.tokens == [3, eos]
        assert sample.steps == 3  # quotas go on after the EOS
        assert sample.ids == [1, 2, 3, eos, 5, MASK, MASK, MASK]
        assert sample.commit_step == [2, 0, 1, -1, -1, -1] and math.isnan(sample.confidence[3])
        # An EOS in the prompt is text.
        assert len(llada(fixed([3, 4], [0.5, 0.5], [eos]), [eos], gen_length=2, block_length=1, steps=2).tokens) == 2


def test_llada_treats_the_mask_token_as_a_token() -> None:
    # In the prompt it is never filled; predicted, it is committed once and stays.
    model = fixed([MASK, 4, 5], [0.9, 0.5, 0.4], [1, MASK])
    sample = llada(model, [1, MASK], gen_length=3, block_length=3, steps=3)
    assert sample.commit_step == [0, 1, 2]
    assert sample.ids == [1, MASK, MASK, 4, 5]


def test_llada_guidance() -> None:
    """z = u + (w + 1)(z - u), u from the sequence with the whole prompt masked and the answer so far kept."""

    def forward(ids: Tensor) -> Tensor:
        seen.append(ids.tolist())
        logits = torch.zeros(len(ids), VOCAB)
        logits[:, 3], logits[:, 4] = (2.0, 1.5) if ids[0] == 1 else (2.0, 1.0)
        return logits

    seen: list[list[int]] = []
    settings: dict[str, Any] = {"gen_length": 2, "block_length": 2, "steps": 2}
    assert llada(forward, **settings).tokens == [3, 3]
    seen.clear()
    sample = llada(forward, cfg_scale=2.0, **settings)  # 3: 2 + 3 * 0 = 2; 4: 1 + 3 * 0.5 = 2.5
    assert sample.tokens == [4, 4]
    assert sample.confidence[0] == pytest.approx(math.exp(2.5) / (math.exp(2.5) + math.exp(2) + 8))
    assert (sample.steps, sample.forwards) == (2, 4)
    assert seen == [[1, 2, MASK, MASK], [MASK] * 4, [1, 2, 4, MASK], [MASK, MASK, 4, MASK]]


def test_llada_logits_eos_inf_forbids_eos_alone() -> None:
    model = fixed([EOS, EOT], [0.9, 0.8])
    sample = llada(model, gen_length=2, block_length=2, steps=1, logits_eos_inf=True)
    assert sample.tokens == [0, EOT]
    assert sample.confidence[0] == pytest.approx(1 / 9)  # softmax over what is left


def test_llada_confidence_eos_eot_inf_commits_them_last() -> None:
    model = fixed([EOT, 3, EOS, 4], [0.6, 0.5, 0.9, 0.4])
    settings: dict[str, Any] = {"gen_length": 4, "block_length": 4, "steps": 4}
    assert llada(model, **settings).commit_step == [1, 2, 0, 3]
    sample = llada(model, confidence_eos_eot_inf=True, **settings)
    assert sample.commit_step == [2, 0, 3, 1]
    assert sample.confidence == pytest.approx([0.6, 0.5, 0.9, 0.4])
    assert sample.tokens == [EOT]


def test_llada_random_order() -> None:
    order = {(0, 2): 0.1, (0, 3): 0.2, (0, 4): 0.9, (1, 2): 0.8, (1, 3): 0.7, (2, 3): 0.0}
    model = fixed([3, 4, 5], [0.9, 0.8, 0.7])
    sample = llada(model, gen_length=3, block_length=3, steps=3, uniform=lambda step, p: order[step, p])
    assert sample.commit_step == [1, 2, 0]
    assert sample.confidence == pytest.approx([0.9, 0.8, 0.7])


def test_llada_temperature_adds_noise_to_the_choice_alone() -> None:
    def noise(step: int, position: int) -> Tensor:
        calls.append((step, position))
        return 2.0 * torch.nn.functional.one_hot(torch.tensor(5), VOCAB) * (position == 2)

    calls: list[tuple[int, int]] = []
    # Token 4 leads token 5 by ln(0.6 / (0.4 / 9)) = 2.6; over temperature 2 that is 1.3, below the noise of 2.
    model = fixed([4, 4], [0.6, 0.6])
    sample = llada(model, gen_length=2, block_length=1, steps=2, temperature=2.0, noise=noise)
    assert sample.tokens == [5, 4]
    assert sample.confidence == pytest.approx([0.4 / 9, 0.6])
    assert calls == [(0, 2), (1, 3)]
    cold = llada(model, gen_length=2, block_length=1, steps=2, temperature=1.0, noise=noise)
    assert cold.tokens == [4, 4]
    with pytest.raises(ValueError, match="temperature"):
        llada(model, gen_length=2, block_length=1, steps=2, temperature=1.0)


def test_threshold_commits_all_that_pass_or_the_best() -> None:
    model = fixed([3, 4, 4, 6], [0.9, 0.6, 0.6, 0.95])
    sample = threshold(model, gen_length=4, block_length=4, threshold=0.85)
    assert sample.commit_step == [0, 1, 2, 0]  # then the tie, lower position first
    assert (sample.steps, sample.forwards) == (3, 3)
    assert model.seen[1] == [1, 2, 3, MASK, MASK, 6]
    halves = threshold(lambda ids: torch.zeros(len(ids), 2), gen_length=2, block_length=2, threshold=0.5)
    assert halves.steps == 1  # at least, not above


def test_threshold_window_slides_over_open_places() -> None:
    # Window of 2: {0, 1} commits 1; {0, 2} commits 2; {0, 3} commits 3; then 0 alone.
    model = fixed([3, 4, 5, 6], [0.1, 0.9, 0.9, 0.9])
    sample = threshold(model, gen_length=4, block_length=2, threshold=0.8)
    assert sample.commit_step == [3, 0, 1, 2]
    assert all(len(ids) == 6 for ids in model.seen)


def test_threshold_ends_at_the_leftmost_eos() -> None:
    # The EOS at place 3 commits together with 5; place 4 is then beyond the end. Later an EOS at 1 cuts place 2 off.
    def predict(ids: list[int]) -> list[tuple[int, float]]:
        late = ids[5] == EOS
        return [(3, 0.2), (EOT if late else 4, 0.9 if late else 0.3), (5, 0.1), (EOS, 0.9), (6, 0.5), (0, 0.95)]

    sample = threshold(Stub([1, 2], predict), gen_length=6, block_length=6, threshold=0.8)
    assert sample.commit_step == [2, 1, -1, 0, -1, 0]
    assert sample.tokens == [3, EOT]
    assert sample.steps == 3


def test_threshold_noise_is_keyed_by_position_alone() -> None:
    def noise(position: int) -> Tensor:
        return 9.0 * torch.nn.functional.one_hot(torch.tensor(position), VOCAB)

    model = fixed([0, 0], [0.5, 0.5])
    sample = threshold(model, gen_length=2, block_length=2, threshold=0.9, temperature=1.0, noise=noise)
    assert sample.tokens == [2, 3]
    assert sample.confidence == pytest.approx([0.5 / 9] * 2)
    assert sample.commit_step == [0, 1]


def test_samplers_on_a_random_model() -> None:
    """With one place a step the two samplers are the same, over a window of one and over the whole answer."""
    model = random_model(8)
    prompt = half_masked(8, 16)[:8].tolist()
    settings: dict[str, Any] = {"mask_id": 95, "eos_ids": (94,), "gen_length": 12}
    left_to_right = generate_llada(model.sequence, prompt, block_length=1, steps=12, **settings)
    assert left_to_right.commit_step == list(range(12))
    window_of_one = generate_threshold(model.sequence, prompt, block_length=1, threshold=2.0, **settings)
    assert window_of_one == left_to_right
    whole = generate_llada(model.sequence, prompt, block_length=12, steps=12, **settings)
    assert generate_threshold(model.sequence, prompt, block_length=12, threshold=2.0, **settings) == whole
    assert whole.commit_step != left_to_right.commit_step


def test_llada_on_a_random_model_stops_and_bars_eos() -> None:
    model = random_model(9)
    prompt = half_masked(9, 16)[:8].tolist()
    settings: dict[str, Any] = {"mask_id": 95, "gen_length": 8, "block_length": 4, "steps": 4}
    endless = generate_llada(model.sequence, prompt, eos_ids=(96,), **settings)
    assert len(endless.tokens) == 8
    eos = endless.tokens[3]
    stopped = generate_llada(model.sequence, prompt, eos_ids=(eos,), **settings)
    assert stopped.tokens == endless.tokens[: endless.tokens.index(eos) + 1]
    barred = generate_llada(model.sequence, prompt, eos_ids=(eos,), logits_eos_inf=True, **settings)
    assert eos not in barred.ids[8:]
