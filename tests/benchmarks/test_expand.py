"""Grown models against the small ones that they are made of."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import convert
from benchmarks import expand
from benchmarks.expansion import BIAS, FREE, LLADA_8B, Shape, expanded
from convert.interrupts import Interrupted, Interrupts
from fdllm_jax import LLM, Settings
from fdllm_jax.cache import KVCache, allocate
from fdllm_jax.config import ModelConfig
from fdllm_jax.engine import SHIPPED
from fdllm_jax.model import LLaDA, from_parameters, parameter_shapes
from fdllm_jax.query import Query, packed_query
from fdllm_jax.tokenizer import Tokenizer
from tests.decode import decode, empty, load, put, response
from tests.reference.checkpoint import random_checkpoint

QUESTION = "Mina has 6 boxes of 4 cookies and eats 13. How many are left?"
REDUCED = Shape(d_model=1024, n_layers=16, n_heads=8, mlp_size=1536, vocab_size=5000)  # of the shipped model


def grow(config: ModelConfig, parameters: dict[str, jax.Array], shape: Shape, dtype: Any = jnp.float32) -> LLaDA:
    large, stream = expanded(config, parameters, shape, 3, dtype)
    return from_parameters(large, dict(stream))


def forward(model: LLaDA, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a sequence [length, vocab], and the attention that its last half gave each position."""
    length = len(tokens)
    cache = allocate(model.config, slots=1, capacity=length, dtype=model.embedding[...].dtype)
    scored = jnp.arange(length)[None] >= length // 2
    query, _ = packed_query(jnp.asarray(tokens)[None], jnp.array([length]), rows=length, scored=scored)
    graphdef, parameters = nnx.split(model)

    @jax.jit
    def run(parameters: nnx.State, query: Query, cache: KVCache) -> tuple[jax.Array, jax.Array | None]:
        merged = nnx.merge(graphdef, parameters)
        output = merged(query, cache)
        return merged.logits(output.hidden), output.scores

    logits, scores = run(parameters, query, cache)
    assert scores is not None
    return np.asarray(logits), np.asarray(scores)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def probability(logits: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.softmax(jnp.asarray(logits), axis=-1))


def random_model(
    rng: np.random.Generator, n_layers: int = 2, **fields: Any
) -> tuple[ModelConfig, dict[str, jax.Array]]:
    config = ModelConfig(
        n_layers=n_layers, rope_theta=500.0, norm_eps=1e-5, max_sequence_length=64, vocab_size=20, mask_token_id=19,
        eos_token_id=18, pad_token_id=18, **fields,
    )  # fmt: skip
    draws = {path: rng.normal(size=shape) for path, shape in parameter_shapes(config).items()}
    parameters = {
        path: jnp.asarray(1 + x / 4 if path.endswith("norm") else x / x.shape[-1] ** 0.5, jnp.float32)
        for path, x in draws.items()
    }
    return config, parameters


@settings(max_examples=4)
@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.sampled_from([4, 6]),
    layers=st.integers(1, 2),
    mlp=st.sampled_from([2, 4]),
    heads=st.sampled_from([(2, 1), (2, 2), (3, 1)]),
    bias=st.booleans(),
    tied=st.booleans(),
    more=st.integers(0, 30),
)
def test_the_logits_and_the_tracking_scores_are_the_small_models(
    seed: int, width: int, layers: int, mlp: int, heads: tuple[int, int], bias: bool, tied: bool, more: int
) -> None:
    rng = np.random.default_rng(seed)
    config, parameters = random_model(
        rng, n_layers=1, d_model=4 * heads[0], n_heads=heads[0], n_kv_heads=heads[1], mlp_size=6, qkv_bias=bias,
        embedding_size=20 + more % 2, weight_tying=tied, scale_logits=tied,
    )  # fmt: skip
    shape = Shape(width * config.d_model, layers, width * heads[0], 6 * mlp, 20 + more)
    tokens = rng.integers(0, 20, 9, dtype=np.int32)
    logits, scores = forward(from_parameters(config, parameters), tokens)
    large_logits, large_scores = forward(grow(config, parameters, shape), tokens)
    assert relative(large_logits[:, :20], logits) < 1e-4
    assert relative(large_scores / (width * layers), scores) < 1e-4
    assert probability(large_logits)[:, 20:].sum() < 1e-6


@pytest.fixture(scope="module")
def shipped() -> tuple[ModelConfig, dict[str, jax.Array]]:
    return convert.load(SHIPPED)


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    """A question, and an answer of which a part is masked, far and near positions among them."""
    tokenizer = Tokenizer(SHIPPED)
    answer = tokenizer.encode_raw("Because 6 * 4 = 24, Mina has 24 cookies.\nNext, 24 - 13 = 11.\n#### 11")
    masked = [tokenizer.mask_id if i % 3 or i > 20 else token for i, token in enumerate(answer)]
    return np.asarray([*tokenizer.encode_chat(QUESTION), *masked, *[tokenizer.mask_id] * 32], np.int32)


@pytest.fixture(scope="module")
def exact(shipped: tuple[ModelConfig, dict], text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The shipped model's logits and tracking scores on the text, in fp32."""
    config, parameters = shipped
    return forward(from_parameters(config, {k: v.astype(jnp.float32) for k, v in parameters.items()}), text)


def test_the_shipped_model_is_the_same_in_fp32(
    shipped: tuple[ModelConfig, dict], text: np.ndarray, exact: tuple[np.ndarray, np.ndarray]
) -> None:
    logits, scores = forward(grow(*shipped, REDUCED), text)
    vocab = shipped[0].vocab_size
    assert relative(logits[:, :vocab], exact[0]) < 1e-4
    assert np.array_equal(logits.argmax(-1), exact[0].argmax(-1))
    assert np.array_equal(np.argsort(scores), np.argsort(exact[1]))
    # the same for every unused id, so as many as LLaDA-8B has hold as much more
    unused = probability(logits)[:, vocab:].sum(-1) / (REDUCED.vocab_size - vocab)
    assert unused.max() * (LLADA_8B.vocab_size - vocab) < 1e-6


def test_in_bf16_it_is_as_near_to_fp32_as_the_small_model(
    shipped: tuple[ModelConfig, dict], text: np.ndarray, exact: tuple[np.ndarray, np.ndarray]
) -> None:
    small, _ = forward(from_parameters(*shipped), text)
    large, _ = forward(grow(*shipped, REDUCED, jnp.bfloat16), text)
    errors = [np.sqrt(np.mean((x[:, : shipped[0].vocab_size] - exact[0]) ** 2)) for x in (small, large)]
    assert errors[1] < 1.1 * errors[0] < 0.1  # logits have a standard deviation of 6
    assert (large.argmax(-1) == exact[0].argmax(-1)).mean() > 0.97


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random checkpoint with grouped heads, and itself grown and written in shards."""
    folder = tmp_path_factory.mktemp("tiny")
    small = random_checkpoint(
        folder / "small", seed=7, vocab_size=40, n_layers=2, d_model=32, n_heads=2, n_kv_heads=1, mlp_hidden_size=24,
        tokenizer_from=SHIPPED,
    )  # fmt: skip
    shape = Shape(d_model=128, n_layers=4, n_heads=8, mlp_size=96, vocab_size=90)
    expand.write_expanded(small, folder / "large", shape, dtype="float32", seed=5, shard_bytes=50_000)
    return small, folder / "large"


@pytest.mark.parametrize(
    "chosen",
    [
        {"method": "flash-dllm", "mask_window": 8, "track_budget": 6, "threshold": 0.6, "gamma": 0.05},
        {"method": "flash-cache", "mask_window": 8, "track_budget": 6, "threshold": 0.6},
        {"method": "llada"},
    ],
    ids=lambda chosen: chosen["method"],
)
def test_greedy_decodings_are_the_same(tiny: tuple[Path, Path], chosen: dict[str, Any]) -> None:
    settings = Settings(gen_length=15, block_length=5, **chosen)
    answers = []
    for directory in tiny:
        model = load(directory)
        state = empty(model, 4, 32, settings)
        for slot, length in enumerate((1, 6, 11, 17)):  # tokens of a prompt
            prompt = np.random.default_rng(length).integers(0, 39, length).tolist()
            state = put(model, state, slot, prompt, settings)
        state = decode(model, state, settings, (38,))
        answers.append([response(state, slot) for slot in range(4)])
    for small, large in zip(*answers, strict=True):
        np.testing.assert_allclose(large.pop("confidence"), small.pop("confidence"), rtol=1e-4)
        assert large == small  # tokens, rules and steps


def test_what_is_written_is_what_is_made(tiny: tuple[Path, Path]) -> None:
    small, directory = tiny
    config, stream = expanded(*convert.load(small), Shape(128, 4, 8, 96, 90), 5, jnp.float32)
    stored_config, stored = convert.load(directory)
    made = dict(stream)
    assert stored_config == config
    assert list(made) == list(parameter_shapes(config)) == list(stored)
    assert all(np.array_equal(stored[path], value) for path, value in made.items())
    assert len(list(directory.glob("*.safetensors"))) > 3
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (directory / name).read_bytes() == (small / name).read_bytes()


def test_the_engine_writes_the_shipped_models_text(tmp_path: Path) -> None:
    directory = tmp_path / "large"
    given = [str(SHIPPED), str(directory), "--shape", "1024,8,8,768,4200"]
    assert expand.main(given) == 0
    settings = Settings(method="threshold", gen_length=32)
    texts = [LLM(path, dtype="float32").generate(QUESTION, settings)[0].text for path in (None, directory)]
    assert texts[0] == texts[1] != ""


def seen_through(d: int, ratio: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """A model whose embeddings are the unit vectors, the same grown in bf16, and so T (without what free entries hold).

    The small one's matrices are exact in bf16, its norm weights are not.
    """
    config, parameters = random_model(
        np.random.default_rng(0), d_model=d, n_heads=2, n_kv_heads=2, mlp_size=6, qkv_bias=False, embedding_size=20,
        weight_tying=False, scale_logits=False,
    )  # fmt: skip
    exact = {path: x.astype(jnp.bfloat16) if x.ndim > 1 else x for path, x in parameters.items()}
    exact["embedding"] = jnp.eye(20, d)
    made = dict(expanded(config, exact, Shape(ratio * d, 4, 2 * ratio, 24, 30), 1)[1])
    small, large = ({path: np.asarray(x, np.float64) for path, x in model.items()} for model in (exact, made))
    large_stream = large["embedding"][:d].T
    return small, large, np.where(large_stream == BIAS, 0, large_stream)


@pytest.mark.parametrize("ratio", [4, 16])
def test_in_bf16_the_copies_are_exact(ratio: int) -> None:
    small, large, copies = seen_through(8, ratio)
    assert np.array_equal(copies.T @ copies, ratio * np.eye(8))
    assert (np.abs(copies).max(1) == 0).sum() == FREE
    assert np.array_equal(large["embedding"][:, np.abs(copies).max(1) == 0], np.full((30, FREE), BIAS))
    for i, name, repeats in ((0, "attn_out", ratio), (1, "attn_out", ratio), (0, "down", 4), (3, "down", 4)):
        weight = small[f"layers.{i // 2}.{name}"]
        shares = np.where(np.arange(repeats) % 2, -1 if i % 2 == 0 else 1, 1) / repeats
        assert np.array_equal(large[f"layers.{i}.{name}"], np.kron(shares, copies @ weight)), (i, name)
    for i in (0, 3):
        read, weight, gain = large[f"layers.{i}.qkv"], *(small[f"layers.{i // 2}.{x}"] for x in ("qkv", "attn_norm"))
        assert np.array_equal(read[:8], read[8:16])
        error = np.abs(read[:8] @ copies - (weight * gain)[:8]) / np.abs(weight * gain)[:8]
        assert error[:, :-1].max() < 1.05 * 2.0**-8 / ratio  # rounding once would be 2**-8
        assert error[:, -1].max() <= 2.0**-8  # the coordinate with a double copy
    zeros = [(x == 0).mean() for path, x in large.items() if path.startswith("layers")]
    assert max(zeros) <= FREE / (8 * ratio)


def test_the_seed_decides_the_weights() -> None:
    config, parameters = random_model(
        np.random.default_rng(0), d_model=8, n_heads=2, n_kv_heads=2, mlp_size=6, qkv_bias=False, embedding_size=20,
        weight_tying=False, scale_logits=False,
    )  # fmt: skip
    first, again, other = (dict(expanded(config, parameters, Shape(32, 2, 8, 6, 30), seed)[1]) for seed in (0, 0, 1))
    assert all(np.array_equal(first[path], again[path]) for path in first)
    assert [path for path in first if np.array_equal(first[path], other[path])] == [x for x in first if "norm" in x]


def test_one_parameter_is_held_at_a_time() -> None:
    config, parameters = random_model(
        np.random.default_rng(0), d_model=16, n_heads=2, n_kv_heads=2, mlp_size=24, qkv_bias=False, embedding_size=20,
        weight_tying=False, scale_logits=False,
    )  # fmt: skip
    largest = total = most = 0
    before = sum(x.nbytes for x in jax.live_arrays())
    for _, value in expanded(config, parameters, Shape(256, 20, 32, 384, 2000), 0, jnp.float32)[1]:
        largest, total = max(largest, value.nbytes), total + value.nbytes
        most = max(most, sum(x.nbytes for x in jax.live_arrays()) - before)
    assert most < 1.2 * largest < 0.1 * total


@pytest.mark.parametrize(
    ("shape", "faults"),
    [
        ("1000,16,8,1536,5000", ["d_model=1000 is not a multiple of the small model's 256"]),
        ("512,8,4,768,5000", ["d_model=512 is below 4 times"]),
        ("1280,16,10,1536,5000", ["d_model=1280 is 5 times"]),
        ("1024,12,8,1536,5000", ["n_layers=12 is not a multiple of the small model's 8"]),
        ("1024,8,6,1536,5000", ["n_heads=6 is not 8"]),
        ("1024,8,16,1536,5000", ["n_heads=16 is not 8: heads have 128 elements"]),
        ("1024,16,8,768,5000", ["mlp_size=768 is 1 times"]),
        ("1024,0,7,1000,4000", ["n_layers=0", "n_heads=7", "mlp_size=1000", "vocab_size=4000 is below"]),
    ],
)
def test_other_shapes_are_refused_by_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str, faults: list[str]
) -> None:
    assert expand.main([str(SHIPPED), str(tmp_path / "out"), "--shape", shape]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and all(fault in message for fault in faults), message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", ["llada-9b", "1,2,3,4", "1,2,3,4,5,6", "a,b,c,d,e"])
def test_what_is_no_shape_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        expand.main([str(SHIPPED), str(tmp_path / "out"), "--shape", shape])
    assert "expected llada-8b or d_model,n_layers,n_heads,mlp_size,vocab_size" in capsys.readouterr().err


def test_a_seed_is_none_below_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert expand.main([str(SHIPPED), str(tmp_path / "out"), "--seed", "-1"]) == 2
    assert capsys.readouterr().err == "error: --seed -1: expected at least 0\n"


def test_nothing_is_overwritten(tiny: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert expand.main([str(tiny[0]), str(tiny[1]), "--shape", "128,4,8,96,90"]) == 2
    assert "exists" in capsys.readouterr().err


def test_an_interrupted_write_leaves_nothing(
    tiny: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class AfterSome(Interrupts):
        calls = 0

        def check(self) -> None:
            self.calls += 1
            if self.calls == 20:
                assert any(tmp_path.rglob("*.safetensors"))
                raise Interrupted(15)

    given = [str(tiny[0]), str(tmp_path / "made" / "out"), "--shape", "128,4,8,96,90"]
    assert expand.main(given, interrupts=AfterSome()) == 128 + 15
    assert list(tmp_path.iterdir()) == []
    assert "nothing was kept" in capsys.readouterr().err


@pytest.mark.gpu
def test_at_llada_8bs_shape(shipped: tuple[ModelConfig, dict], text: np.ndarray) -> None:
    config, parameters = shipped
    small, _ = forward(from_parameters(config, parameters), text)
    large, _ = forward(grow(config, parameters, LLADA_8B, jnp.bfloat16), text)
    assert relative(large[:, : config.vocab_size], small) < 0.03
    assert (large.argmax(-1) == small.argmax(-1)).mean() > 0.97
    assert probability(large)[:, config.vocab_size :].sum(-1).max() < 1e-6
