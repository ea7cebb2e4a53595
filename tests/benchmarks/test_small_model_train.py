"""The small model's training: noise by its statistics, the loss and the update against plain ones, files by reading."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from benchmarks.small_model import noise, step, train, weights
from benchmarks.small_model.checkpoint import load_state, save_state
from fdllm_jax.config import ModelConfig
from fdllm_jax.model import from_parameters, parameter_shapes

FULL = 64
CONFIG = ModelConfig(
    vocab_size=48,
    embedding_size=48,
    d_model=32,
    n_layers=1,
    n_heads=2,
    n_kv_heads=2,
    mlp_size=48,
    rope_theta=500000.0,
    norm_eps=1e-5,
    max_sequence_length=128,
    qkv_bias=False,
    weight_tying=False,
    scale_logits=False,
    mask_token_id=47,
    eos_token_id=46,
    pad_token_id=46,
)
BIN = step.Bin(length=24, steps=4, predicted=12)


def sequence(prompt: int, length: int, valid: int) -> noise.Sequence:
    return noise.Sequence(*(jnp.int32(x) for x in (prompt, length, valid)))


def many(scheme, of: noise.Sequence, count: int, seed: int) -> noise.Noise:
    """`count` draws at evenly spaced rates."""
    keys, rates = jax.random.split(jax.random.key(seed), count), (jnp.arange(count) + 0.5) / count
    return jax.jit(jax.vmap(lambda key, rate: scheme(key, of, rate, FULL)))(keys, rates)


def build(seed: int) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]:
    """32 sequences whose answers repeat the prompt's one token."""
    random = np.random.default_rng(seed)
    token = np.full((32, BIN.length), CONFIG.eos_token_id, np.uint16)
    prompt, length = random.integers(2, 6, 32), random.integers(10, 16, 32)
    for row in range(32):
        token[row, : length[row] - 1] = random.integers(0, 40)
    return ((token, prompt, length),)


def pool_of(seed: int) -> step.Pool:
    ((token, prompt, length),) = build(seed)
    return step.Pool(jnp.asarray(token), jnp.asarray(prompt, jnp.int32), jnp.asarray(length, jnp.int32), jnp.int32(32))


initial = jax.jit(partial(weights.initial, CONFIG))


def draw(seed: int, sample: jax.Array, batch: int) -> step.Batch:
    drawn = jax.jit(lambda key, pool: step.draw(key, pool, sample, batch, BIN, CONFIG.mask_token_id))
    return drawn(jax.random.key(seed), pool_of(seed))


def test_valid_lengths_cover_the_range() -> None:
    keys = jax.random.split(jax.random.key(1), 8000)
    valid = np.asarray(jax.jit(jax.vmap(lambda key: noise.valid_length(key, jnp.int32(20), 200)))(keys))
    assert valid.min() == 20 and valid.max() == 200
    assert abs(np.mean(valid > 20 + noise.NEAR_RANGE) - noise.FULL_RANGE * 148 / 181) < 0.02


def test_llada_noise_masks_answers_at_the_rate_and_weighs_to_one() -> None:
    drawn = many(noise.anywhere, sequence(10, 30, 50), 8000, seed=2)
    assert not np.any(drawn.masked[:, :10]) and not np.any(drawn.masked[:, 50:])
    np.testing.assert_allclose(np.mean(drawn.masked[:, 10:50]), 0.5, atol=0.01)
    weight = np.asarray(drawn.weight)
    assert np.all(drawn.masked[weight > 0])
    answer, fill = weight[:, 10:30].mean(), weight[:, 30:50].mean()
    np.testing.assert_allclose(fill / answer, noise.FILL_WEIGHT, rtol=0.2)
    np.testing.assert_allclose(weight.sum(1).mean(), 1.0, atol=0.05)


@pytest.mark.parametrize(("prompt", "length", "valid"), [(10, 30, 50), (10, 30, 30), (5, 6, 7), (40, 60, 64)])
def test_window_noise_has_a_clean_past_and_a_masked_future(prompt: int, length: int, valid: int) -> None:
    drawn = many(noise.window, sequence(prompt, length, valid), 4000, seed=3)
    masked, weight = np.asarray(drawn.masked), np.asarray(drawn.weight)
    assert not masked[:, :prompt].any() and not masked[:, valid:].any()
    np.testing.assert_allclose(weight.sum(1), 1.0, rtol=1e-5)
    assert masked[weight > 0].all()
    first = np.argmax(weight > 0, axis=1)
    last = FULL - 1 - np.argmax(weight[:, ::-1] > 0, axis=1)
    assert np.all(last - first < noise.WINDOW[1])
    for row in range(0, 4000, 97):
        assert not masked[row, : first[row]].any()
        after = np.flatnonzero(~masked[row, last[row] : valid]) + last[row]
        assert np.all(after < first[row] + noise.WINDOW[1]), "every position past the window is masked"
    assert weight[:, prompt:length].sum(1).mean() > 0.6


def test_picked_positions_carry_the_whole_weight_or_an_unbiased_share() -> None:
    weight = jnp.where(jnp.arange(FULL) % 3 == 0, jnp.arange(FULL) + 1.0, 0.0)  # 22 positions
    place, picked = jax.jit(noise.pick, static_argnums=2)(jax.random.key(4), weight, 30)
    np.testing.assert_array_equal(np.asarray(place).sum(0), np.asarray(weight) > 0)
    np.testing.assert_allclose(np.asarray(picked) @ np.asarray(place), weight, rtol=1e-6)
    keys = jax.random.split(jax.random.key(5), 4000)
    places, shares = jax.jit(jax.vmap(lambda key: noise.pick(key, weight, 8)))(keys)
    assert np.all(np.asarray(places).sum((1, 2)) == 8)
    np.testing.assert_allclose(np.einsum("np,npl->l", shares, places) / 4000, weight, rtol=0.12)


@jax.default_matmul_precision("highest")  # of the attention's products; the model names its own
def test_the_loss_equals_the_full_cross_entropy() -> None:
    """Against logits of every position of each sequence alone, cut at its valid length."""
    held = initial(jax.random.key(6))
    batch = draw(7, jnp.arange(4), 4)
    got = jax.jit(lambda held: step.sequence_losses(CONFIG, held, batch, jnp.float32))(held)

    @jax.jit
    def losses(held: weights.Weights, seen: jax.Array, token: jax.Array) -> jax.Array:
        model = from_parameters(CONFIG, weights.unpack(CONFIG, held))
        logits = model.logits(model.dense(model.embedding[...][seen[None]], jax.nn.dot_product_attention))[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, token)

    assert len(set(batch.valid.tolist())) > 1
    for row, valid in enumerate(batch.valid.tolist()):
        weight = np.asarray(batch.weight[row]) @ np.asarray(batch.place[row])
        loss = losses(held, batch.seen[row, :valid], batch.token[row, :valid])
        np.testing.assert_allclose(got[row], np.sum(weight[:valid] * loss), rtol=1e-5)


def test_the_embedding_gradient_equals_the_scattered_one() -> None:
    table = jax.random.normal(jax.random.key(8), (9, 4))
    token = jax.random.randint(jax.random.key(9), (5, 30), 0, 9)
    mix = jax.random.normal(jax.random.key(10), (5, 30, 4))
    plain = jax.grad(lambda table: jnp.sum(mix * table[token]))(table)
    np.testing.assert_allclose(
        jax.grad(lambda table: jnp.sum(mix * step.embed(table, token, (7, 8))))(table), plain, rtol=1e-5, atol=1e-5
    )


def test_packed_weights_unpack_to_the_same_parameters() -> None:
    shapes = parameter_shapes(CONFIG)
    parameters = {path: jax.random.normal(jax.random.key(i), shape) for i, (path, shape) in enumerate(shapes.items())}
    back = weights.unpack(CONFIG, weights.pack(CONFIG, parameters))
    assert back.keys() == parameters.keys()
    assert all(np.array_equal(back[path], parameters[path]) for path in parameters)


def test_the_learning_rate_rises_stays_and_falls_to_nothing() -> None:
    rate = weights.schedule(steps=4000, peak=2.0)
    np.testing.assert_allclose([rate(s) for s in (0, 150, 300, 1999, 3000, 4000)], [0, 1, 2, 2, 1, 0], atol=1e-6)


def test_an_unknown_optimiser_is_refused() -> None:
    with pytest.raises(ValueError, match="adamw or muon"):
        weights.make_optimizer("sgd", weights.schedule(steps=10, peak=1.0))


def settings(output: Path, tokenizer: Path, **changes) -> train.Settings:
    chosen = {
        "steps": 48,
        "batch": 1,
        "learning_rate": 1e-2,
        "optimizer": "adamw",
        "pool": 64,
        "seed": 3,
        "weights": None,
        "resume": False,
    }
    return train.Settings(tokenizer=str(tokenizer), output=str(output), **(chosen | changes))


def run(chosen: train.Settings) -> dict:
    with ThreadPoolExecutor(1) as executor:
        return train.train(chosen, CONFIG, build, executor, bins=(BIN,), part=32, part_rows=(32,))


@pytest.fixture
def compile_once(tmp_path: Path) -> Iterator[None]:
    """Runs that are the same program share its compilation."""
    changes = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 1.0}
    before = {name: getattr(jax.config, name) for name in changes}
    for name, value in changes.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("compile_once")
def test_training_learns_exports_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    log = run(settings(tmp_path / "whole", tokenizer))
    held_out = log["held_out"][BIN.length]
    assert held_out["window"] < 0.7 * np.log(48), held_out
    assert held_out["anywhere"] < 1.2 * np.log(48), held_out  # a noisy estimate: 1 / rate of few sequences

    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    assert tensors["model.transformer.blocks.0.v_proj.weight"].shape == (32, 32)
    assert ModelConfig.from_directory(tmp_path / "whole") == CONFIG
    assert (tmp_path / "whole" / "tokenizer.json").exists()

    seen = iter([False] * 6)  # SIGTERM after six cycles
    monkeypatch.setattr(train, "_stop_on_sigterm", lambda: type("Stop", (), {"__bool__": lambda _: next(seen, True)})())
    assert not run(settings(tmp_path / "parts", tokenizer))["finished"]
    monkeypatch.undo()
    assert run(settings(tmp_path / "parts", tokenizer, resume=True))["finished"]
    resumed = load_file(tmp_path / "parts" / "model.safetensors")
    assert all(np.array_equal(resumed[name], value) for name, value in tensors.items())


def test_a_state_of_another_optimiser_is_refused(tmp_path: Path) -> None:
    held = initial(jax.random.key(0))
    save_state(tmp_path / "state.npz", (held, jnp.ones(3, jnp.bfloat16)))
    _, bits = load_state(tmp_path / "state.npz", (held, jnp.zeros(3, jnp.bfloat16)))
    assert bits.dtype == jnp.bfloat16 and np.all(bits == 1)
    with pytest.raises(ValueError, match="without --resume"):
        load_state(tmp_path / "state.npz", (held, jnp.zeros(4, jnp.bfloat16)))
    with pytest.raises(FileNotFoundError, match="no training state"):
        load_state(tmp_path / "none.npz", held)


def test_one_update_lowers_the_loss_of_its_batch() -> None:
    held = initial(jax.random.key(11))
    batch = draw(12, jnp.arange(16), 16)
    loss = jax.jit(jax.value_and_grad(lambda held: jnp.mean(step.sequence_losses(CONFIG, held, batch, jnp.float32))))
    before, gradient = loss(held)
    for name in ("adamw", "muon"):
        optimizer = weights.make_optimizer(name, lambda count: 3e-3)
        updates, _ = jax.jit(optimizer.update)(gradient, jax.jit(optimizer.init)(held), held)
        after, _ = loss(jax.jit(optax.apply_updates)(held, updates))
        assert after < before - 0.005, name


def test_noise_does_not_depend_on_the_number_of_devices() -> None:
    whole, half = draw(13, jnp.arange(8), 8), draw(13, jnp.arange(4, 8), 8)
    assert all(np.array_equal(a[4:], b) for a, b in zip(whole, half, strict=True))
