"""Predictions, and noise that depends on the request and the position alone."""

import jax
import jax.numpy as jnp
import numpy as np

from fdllm_jax.sampling import gumbel, predict, uniform


def test_prediction_is_argmax_and_its_probability() -> None:
    logits = jnp.array([[[1.0, 3.0, 3.0, -jnp.inf], [0.0, 0.0, 0.0, 0.0]]])
    token, confidence = predict(logits, None, jnp.zeros(1))
    assert token.tolist() == [[1, 0]]  # ties to the lower id
    np.testing.assert_allclose(confidence, np.array([[np.exp(3) / (2 * np.exp(3) + np.exp(1)), 0.25]]), rtol=1e-6)


def test_noise_moves_the_choice_and_not_the_confidence() -> None:
    logits = jnp.log(jnp.array([[[0.6, 0.3, 0.1]]]))
    noise = jnp.array([[[0.0, 5.0, 0.0]]])
    token, confidence = predict(logits, noise, jnp.ones(1))
    assert token.tolist() == [[1]]
    np.testing.assert_allclose(confidence, [[0.3]], rtol=1e-6)
    assert predict(logits, noise, jnp.zeros(1)).token.tolist() == [[0]]


def test_gumbel_sampling_has_the_softmax_distribution() -> None:
    probability = np.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(jnp.array(probability)), (1, 20_000, 4))
    noise = gumbel(jnp.array([11], jnp.uint32), jnp.array([0]), jnp.arange(20_000)[None], 4)
    token = np.asarray(predict(logits, noise, jnp.ones(1)).token)[0]
    frequency = np.bincount(token, minlength=4) / len(token)
    np.testing.assert_allclose(frequency, probability, atol=4 * 0.5 / np.sqrt(20_000))


def test_noise_is_keyed_by_seed_step_and_position_alone() -> None:
    seeds, steps = jnp.array([1, 2], jnp.uint32), jnp.array([0, 3])
    position = jnp.array([[4, 9], [9, 4]])
    both = gumbel(seeds, steps, position, 8)
    alone = gumbel(seeds[1:], steps[1:], position[1:, ::-1], 8)
    assert jnp.array_equal(both[1, 1], alone[0, 0])
    draws = [both[0, 0], both[0, 1], both[1, 0], gumbel(seeds, steps + 1, position, 8)[0, 0]]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert not jnp.any(a == b)
    numbers = uniform(seeds, steps, position)
    assert numbers.shape == (2, 2) and bool(jnp.all((numbers >= 0) & (numbers < 1)))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(jax.random.key(1), 1), 0), 4)
    assert numbers[0, 0] == jax.random.uniform(key)
