"""What a program takes of the device's memory: counted, chosen by, and told when there is too little."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from fdllm_jax import LLM, Settings, memory

SETTINGS = Settings(gen_length=8, block_length=8)


def test_the_plan_is_what_the_program_takes() -> None:
    llm = LLM(slots=2, capacity=64, dtype="float32")
    assert llm.plan is None
    llm.generate("How many?", SETTINGS)
    assert llm.plan is not None and llm.plan.slots == 2 and llm.plan.work_space > 0
    config = llm.config
    assert llm.plan.cache == 2 * config.n_layers * 64 * config.n_kv_heads * config.head_dim * 4
    assert llm.plan.weights == memory.bytes_of(llm._parameters) > 8e6 * 4
    (program,) = llm._programs.values()
    state = jax.eval_shape(program.start)
    assert memory.bytes_of(state.cache) == 2 * llm.plan.cache
    assert str(memory.Plan(weights=16_030_000_000, cache=525_000_000, slots=4, work_space=2_000_000)) == (
        "18.13 GB: weights 16.03 GB, cache 4 x 0.53 GB, work space 2.00 MB"
    )


def test_slots_fill_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(slots="auto", capacity=64, dtype="float32")
    prompts = ["How many?"] * 9
    few = llm.generate(prompts[:3], SETTINGS)
    assert llm.plan is not None and llm.plan.slots == 3  # no more than prompts; a CPU does not say what is free
    one = memory.cache_bytes(llm.config, capacity=64, itemsize=4)
    room = llm.plan.work_space + 8 * one
    monkeypatch.setattr(memory, "free_bytes", lambda: int(room / memory.MOST_OF_FREE) + 1)
    many = llm.generate(prompts, SETTINGS)
    assert 1 <= llm.plan.slots < 9
    assert (
        llm.plan.slots * one + llm.plan.work_space <= memory.MOST_OF_FREE * memory.free_bytes() or llm.plan.slots == 1
    )
    assert [r.token_ids for r in many] == [few[0].token_ids] * 9
    monkeypatch.setattr(memory, "free_bytes", lambda: 1)
    assert llm.generate(prompts[0], SETTINGS)[0].token_ids == few[0].token_ids


@pytest.mark.parametrize("call", ["start", "advance"])
def test_too_little_memory_is_told_with_the_plan(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    llm = LLM(slots=2, capacity=64, dtype="float32")
    llm.compile("How many?", SETTINGS)

    def fail(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    ((key, program),) = llm._programs.items()
    monkeypatch.setitem(llm._programs, key, replace(program, **{call: fail}))
    with pytest.raises(memory.OutOfMemory, match=r"out of memory: this takes .*weights .*, cache 2 x .*fewer slots"):
        llm.generate("How many?", SETTINGS)


def test_other_errors_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(slots=2, capacity=64, dtype="float32")

    def fail(**_: Any) -> Any:
        raise RuntimeError("a fault")

    llm.compile("How many?", SETTINGS)
    ((key, program),) = llm._programs.items()
    monkeypatch.setitem(llm._programs, key, replace(program, start=fail))
    with pytest.raises(RuntimeError, match="^a fault$"):
        llm.generate("How many?", SETTINGS)


def test_what_a_machine_has_not_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel would kill the process."""
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU says so itself")
    left = memory._host_bytes()
    assert left is None or left > 1e6
    llm = LLM(slots=2, capacity=64, dtype="float32")
    monkeypatch.setattr(memory, "_host_bytes", lambda: 50_000)
    with pytest.raises(memory.OutOfMemory, match=r"this takes .* work space .*; 0.05 MB are left. Use fewer slots"):
        llm.generate("How many?", SETTINGS)
    monkeypatch.setattr(memory, "_host_bytes", lambda: None)
    assert llm.generate("How many?", SETTINGS)
