"""Continuous batching: slots that are refilled, looks of the host, and what is counted of both."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from fdllm_jax import LLM, Interrupted, Result, Settings, batching, exchange
from fdllm_jax.batching import Looks
from fdllm_jax.decoding.state import MOST_STEPS
from fdllm_jax.engine import SHIPPED
from fdllm_jax.job import Snapshot
from tests.reference.checkpoint import random_checkpoint

SHORT = Settings(method="threshold", gen_length=8)
QUESTION = "Lena has 4 boxes with 6 pens in each. She gives away 5 pens. How many pens are left?"


@pytest.fixture(scope="module")
def llm(kernels: str) -> LLM:
    return LLM(slots=4, capacity=128, dtype="float32", kernels=kernels)


def test_a_thousand_prompts_through_four_slots(tmp_path: Path, kernels: str) -> None:
    random_checkpoint(tmp_path, seed=1, tokenizer_from=SHIPPED, vocab_size=4096)
    llm = LLM(tmp_path, slots=4, capacity=16, dtype="float32", kernels=kernels)
    settings = Settings(method="threshold", gen_length=2)
    prompts = [[5 + i % 90] * (1 + i % 7) for i in range(1000)]
    results = llm.generate(prompts, settings)
    assert [result.index for result in results] == list(range(1000))
    assert llm.load.occupancy == 1.0 and 0 < llm.load.host_share < 1
    alone = {(result.index % 90, result.index % 7): result.token_ids for result in results[:630]}
    assert all(result.token_ids == alone[result.index % 90, result.index % 7] for result in results[630:])
    some = [3, 500, 999]
    assert [llm.generate([prompts[i]], settings)[0].token_ids for i in some] == [results[i].token_ids for i in some]
    assert llm.programs == 1


def test_no_prompt_waits_where_there_are_slots_for_all(llm: LLM) -> None:
    llm.generate([[5, 6]] * 4, SHORT)
    assert llm.load.occupancy is None and str(llm.load).startswith("no prompt waited; ")


def test_steps_behind_a_stop_string_count_as_empty(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "SECONDS_WITH_STOPS", 60.0)  # a look every eight steps
    settings = Settings(method="llada", gen_length=64, stop=("=",))
    results = llm.generate([QUESTION] * 9, settings)
    assert all(result.stop_reason == "stop" for result in results)
    behind = [result.steps - 1 - max(result.step_of) for result in results]
    assert 0 < max(behind) <= 8
    assert llm.load.occupancy is not None and 0.5 < llm.load.occupancy < 1


def test_a_slow_consumer_s_time_is_not_the_device_s(llm: LLM) -> None:
    llm.generate([[5, 6]] * 9, SHORT)
    whole = llm.load.seconds  # of the run; the call that is under way takes a part of it
    stream = llm.stream([[5, 6]] * 9, SHORT)
    next(stream)
    time.sleep(whole + 1.0)
    assert len(list(stream)) == 8
    assert llm.load.host_seconds > 1.0


def test_looks_come_at_steps_or_seconds() -> None:
    looks = Looks.of(watched=False, stops=False)
    soon = looks.after(0.001, ended=False)
    assert soon.steps == 2 * looks.steps and soon.after(9.0, ended=False) == soon
    for _ in range(64):
        looks = looks.after(0.0, ended=False)
    assert looks.steps == MOST_STEPS
    stops = Looks.of(watched=False, stops=True)
    assert [(stops := stops.after(0.0, ended=False)).steps for _ in range(4)] == [2, 4, 8, 8]
    watched = Looks.of(watched=True, stops=True)
    assert watched.steps == watched.after(0.0, ended=False).steps == 1


def test_free_slots_wait_for_others_where_calls_are_short() -> None:
    looks = Looks.of(watched=False, stops=True)
    assert looks.after(1.0, ended=True) == looks and looks.until(64, crowded=True).tolist() == [1, 1]
    short = looks.after(0.001, ended=True)
    assert short.after(1.0, ended=True) == short  # so that calls do not become long and short in turn
    assert [short.until(slots, crowded=True).tolist() for slots in (1, 31, 32, 64)] == [[1, 1], [1, 1], [2, 1], [4, 1]]
    assert short.until(64, crowded=False).tolist() == [1, 1]  # a result is not held back for nothing


def test_ctrl_c_gives_what_has_finished(llm: LLM) -> None:
    """Here it comes in the look at which the sixth prompt is seen for the first time."""
    prompts = [[5] * n for n in range(1, 8)]
    expected = llm.generate(prompts, SHORT)

    def watch(snapshots: list[Snapshot]) -> None:
        if any(snapshot.index == 5 for snapshot in snapshots):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        llm.generate(prompts, SHORT, watch=watch)
    finished = stopped.value.results
    assert 0 < len(finished) < 7 and str(stopped.value) == f"{len(finished)} results had finished"
    assert all(result.token_ids == expected[result.index].token_ids for result in finished)


def test_threads_and_engines_do_not_meet(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines in a process, and several threads in each: their calls take turns."""
    running, together = [], []
    of = exchange.Report.of

    def slowly(packed: jax.Array) -> exchange.Report:
        running.append(1)
        together.append(len(running))
        time.sleep(0.005)
        running.pop()
        return of(packed)

    monkeypatch.setattr(exchange.Report, "of", slowly)
    other = LLM(slots=2, capacity=128, dtype="float32")
    prompts = [[[5 + k] * n for n in (3, 30, 7)] for k in range(4)]
    alone = [llm.generate(of_thread, SHORT) for of_thread in prompts]

    def run(job: int) -> list[Result]:
        return (llm, other)[job % 2].generate(prompts[job // 2], SHORT)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(8)))
    for job, results in enumerate(found):
        assert [r.token_ids for r in results] == [r.token_ids for r in alone[job // 2]]
    assert set(together) == {1}


def test_a_refusal_and_settings_of_its_own_for_each(llm: LLM) -> None:
    """Lengths, thresholds and stop strings differ within a batch; what does not fit is left out."""
    each = [
        replace(SHORT, gen_length=n, threshold=t, stop=s)
        for n, t, s in ((8, 0.9, ()), (99, 0.9, ()), (20, 0.5, ("=",)))
    ]
    found = list(llm.stream([QUESTION] * 3, each))
    assert found[0].index == 1 and not isinstance(found[0], Result)
    alone = {i: llm.generate([QUESTION], [each[i]])[0].text for i in (0, 2)}
    assert {one.index: one.text for one in found[1:] if isinstance(one, Result)} == alone
