"""What is compared, how it is scored, and the advice that follows, against closed forms and SciPy."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from fdllm_jax.comparison import (
    FEWEST,
    SIGNIFICANCE,
    Agreement,
    Measurement,
    Variant,
    advice,
    agreement,
    fastest,
    significantly_below,
    sweep_of,
    uncached,
    variants,
)
from fdllm_jax.comparison_plot import write_plot
from fdllm_jax.options import add_settings
from fdllm_jax.report import wilson
from fdllm_jax.settings import METHODS, Settings

tokens = st.lists(st.integers(0, 3), max_size=12)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_settings(parser, method=False)
    return parser.parse_args(arguments)


class TestVariants:
    def test_a_method_takes_the_options_that_it_uses(self) -> None:
        chosen, notes = variants(
            ["flash-dllm", "threshold", "llada"], ["fast"], options("--gamma", "0.7", "--gen-length", "32")
        )
        assert [v.label for v in chosen] == ["flash-dllm", "threshold", "llada", "fast"]
        assert [v.settings.gamma for v in chosen] == [0.7, None, None, 0.7]
        assert {v.settings.gen_length for v in chosen} == {32}
        assert notes == ["--gamma is not an option of threshold, llada: left out there"]

    def test_a_preset_keeps_its_settings(self) -> None:
        chosen, _ = variants([], ["quality", "mbpp"], options())
        assert [v.settings for v in chosen] == [Settings.preset("quality"), Settings.preset("mbpp")]

    def test_a_method_may_bring_its_own_options(self) -> None:
        names = ["flash-dllm:gamma=0.7,no-bonus,track_layers=1", "flash-dllm", "threshold:threshold=0.5"]
        chosen, _ = variants(names, [], options("--gamma", "0.9"), ("threshold", [0.6]))
        assert [v.name for v in chosen] == names
        assert [v.settings.gamma for v in chosen] == [0.7, 0.9, None]
        assert [v.settings.threshold for v in chosen] == [0.6, 0.6, 0.5]
        assert chosen[0].settings.track_layers == (1,) and chosen[0].settings.bonus is False

    def test_a_value_of_its_own_is_not_swept_in_silence(self) -> None:
        with pytest.raises(ValueError, match=r"flash-dllm:gamma=0.4: gamma has one value there"):
            variants(["flash-dllm:gamma=0.4"], [], options(), ("gamma", [0.5, 0.9]))
        chosen, notes = variants(["flash-dllm:gamma=0.4", "flash-dllm"], [], options(), ("gamma", [0.5, 0.9]))
        assert [v.settings.gamma for v in chosen] == [0.4, 0.5, 0.9]
        assert notes == ["flash-dllm:gamma=0.4: gamma has one value there, which --sweep does not replace"]

    @pytest.mark.parametrize(
        ("name", "fault"),
        [
            ("flash-dlm", "'flash-dlm' is unknown: expected one of flash-dllm, "),
            ("flash-dllm:gama=1", "unknown option 'gama'"),
            ("flash-dllm:gamma", "expected one argument"),
            ("flash-dllm:gamma=x", "invalid float value"),
            ("flash-dllm:bonus=3", "bonus=3: a switch has no value, write bonus or no-bonus"),
            ("flash-dllm:isolation=loose", "invalid choice"),
            ("flash-dllm:,", "unknown option ''"),
            ("flash-dllm:", "unknown option ''"),
            ("flash-dllm:gamma=2", "gamma=2.0"),
            ("llada:gamma=0.5", "gamma=0.5 is not an option of method 'llada'"),
        ],
    )
    def test_own_options_amiss(self, name: str, fault: str) -> None:
        with pytest.raises(ValueError, match=name) as error:
            variants([name], [], options())
        assert fault in str(error.value)

    def test_a_sweep_is_for_the_methods_that_use_it(self) -> None:
        chosen, notes = variants(["flash-dllm", "llada"], [], options(), ("track_budget", [32, 64]))
        assert [v.label for v in chosen] == ["flash-dllm track_budget=32", "flash-dllm track_budget=64", "llada"]
        assert [v.settings.track_budget for v in chosen] == [32, 64, None] and not notes

    def test_the_same_settings_are_measured_once(self) -> None:
        chosen, notes = variants(["flash-dllm-onepass", "flash-dllm-onepass"], ["balanced"], options())
        assert [v.name for v in chosen] == ["flash-dllm-onepass"]
        assert notes[-1] == "balanced has the settings of flash-dllm-onepass: measured once"

    def test_what_no_method_uses_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match=r"--steps is not an option of any chosen method, only of llada; --factor "
        ):
            variants(["flash-dllm", "threshold"], [], options("--steps", "3", "--factor", "1"))
        with pytest.raises(ValueError, match="--gamma is not an option of any"):
            variants(["threshold"], [], options(), ("gamma", [0.5]))

    def test_faults_name_their_method(self) -> None:
        with pytest.raises(ValueError, match=r"flash-cache: mask_window=64 is less than block_length=80"):
            variants(["threshold", "flash-cache"], [], options("--block-length", "80"))
        with pytest.raises(ValueError, match=r"--gamma and --sweep gamma: expected one of the two"):
            variants(["flash-dllm"], [], options("--gamma", "0.5"), ("gamma", [0.5]))

    @pytest.mark.parametrize("method", METHODS)
    def test_the_uncached_decoding_has_the_same_rule(self, method: str) -> None:
        chosen, _ = variants([method], [], options("--gen-length", "24", "--stop", "x", "--seed", "5"))
        settings = uncached(chosen[0].settings)
        if method == "llada":
            assert settings is None
            return
        expected = "fast-dllm-parallel" if "fast" in method else "threshold"
        assert settings == Settings(method=expected, gen_length=24, stop=("x",), seed=5)
        assert uncached(Settings(method=method, threshold=0.7)) == Settings(method=expected, threshold=0.7)


def test_sweeps() -> None:
    assert sweep_of(None) is None
    assert sweep_of(["track-budget", "32", "64"]) == ("track_budget", [32, 64])
    assert sweep_of(["gamma", "0.5"]) == ("gamma", [0.5])
    for words, message in (
        (["steps", "1"], "--sweep steps: expected one of threshold, gamma, track_budget"),
        (["gamma"], "--sweep gamma: expected values after it"),
        (["gamma", "x"], "--sweep gamma: could not convert"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep_of(words)


@given(tokens, tokens)
def test_agreement_counts_equal_places_of_the_longer_response(a: list[int], b: list[int]) -> None:
    found = agreement(a, b)
    assert found == agreement(b, a)
    width = max(len(a), len(b))
    padded = zip([*a, *[-1] * (width - len(a))], [*b, *[-2] * (width - len(b))], strict=True)
    assert (found.equal, found.of) == (sum(x == y for x, y in padded), width)
    assert (found.share == 1) == (a == b)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_a_share_is_within_its_interval(counts: tuple[int, int]) -> None:
    successes, trials = counts
    low, high = wilson(successes / trials, trials)
    expected = binomtest(successes, trials).proportion_ci(0.95, "wilson")
    assert 0 <= low <= successes / trials <= high <= 1
    assert max(abs(low - expected.low), abs(high - expected.high)) < 1e-6


@given(st.lists(st.tuples(st.sampled_from([0, 0.5, 1]), st.sampled_from([0, 0.5, 1])), min_size=1, max_size=40))
def test_the_sign_test_is_that_of_scipy(pairs: list[tuple[float, float]]) -> None:
    scores, best = ([float(x) for x in column] for column in zip(*pairs, strict=True))
    lower = sum(a < b for a, b in pairs)
    differ = sum(a != b for a, b in pairs)
    p = binomtest(lower, differ, alternative="greater").pvalue if differ else 1.0
    assert significantly_below(scores, best) == (p < SIGNIFICANCE)


def test_the_fewest_prompts_that_can_tell() -> None:
    zeros, ones = ([float(x)] * FEWEST for x in (0, 1))
    assert significantly_below(zeros, ones) and not significantly_below(zeros[1:], ones[1:])


def measurement(
    method: str,
    *,
    speed: float,
    batch: int = 1,
    right: Sequence[bool] | None = None,
    equal: Sequence[int] | None = None,
    swept: tuple[str, int | float] | None = None,
    peak_memory: int | None = None,
) -> Measurement:
    """Made up; equal: of ten tokens a prompt."""
    return Measurement(
        variant=Variant(name=method, settings=Settings(method=method), swept=swept),
        batch=batch,
        right=right,
        agreements=None if equal is None else [Agreement(equal=e, of=10) for e in equal],
        tokens=100,
        steps=50,
        forwards=80,
        speeds=[speed * 0.9, speed, speed * 1.2],
        peak_memory=peak_memory,
    )


class TestAdvice:
    GOOD, FAIR, BAD = [True] * 20, [True] * 17 + [False] * 3, [True] * 10 + [False] * 10

    def test_the_fastest_that_is_not_significantly_worse(self) -> None:
        llada, flash, bad = (
            measurement("llada", speed=10.0, right=self.GOOD),
            measurement("flash-dllm", speed=50.0, right=self.FAIR),
            measurement("fast-dllm-dual", speed=90.0, right=self.BAD),
        )
        assert fastest([llada, flash, bad]) is flash
        assert fastest([llada, bad]) is llada
        line = advice([llada, flash, bad, measurement("threshold", speed=80.0, batch=8, right=self.GOOD)])
        assert line.startswith(
            "Use flash-dllm at batch 1 (50.0 tokens/s, 85.0% accuracy) and threshold at batch 8 (80.0 tokens/s, "
            "100.0% accuracy): the fastest whose accuracy is not significantly below the best"
        )
        assert "over 20 prompts" in line and "\n" not in line and "--tasks" in line

    def test_without_gold_the_uncached_method_is_good_but_sets_no_bar(self) -> None:
        uncached, near, far = (
            measurement("threshold", speed=20.0, equal=[10] * 8),
            measurement("flash-cache", speed=40.0, equal=[9] * 8),
            measurement("flash-dllm", speed=60.0, equal=[4] * 8),
        )
        llada = measurement("llada", speed=99.0)
        assert fastest([uncached, near, far, llada]) is near
        assert fastest([measurement("threshold", speed=90.0, equal=[10] * 8), near, far]).speed == 90
        assert fastest([uncached]) is uncached
        assert fastest([llada]) is None and advice([llada]).startswith("No advice: ")
        assert "agreement with the uncached decoding" in advice([uncached, near])

    def test_too_few_prompts_tell_nothing(self) -> None:
        few = [measurement("llada", speed=10.0, right=[True] * n) for n in (FEWEST - 1, FEWEST)]
        assert advice(few[:1]).startswith(f"No advice: {FEWEST - 1} prompts cannot")
        assert advice(few[1:]).startswith("Use llada at batch 1 (")

    def test_many_prompts_need_no_caution(self) -> None:
        assert "--tasks" not in advice([measurement("llada", speed=10.0, right=self.GOOD * 10)])


def test_rows_hold_the_figures() -> None:
    m = measurement(
        "flash-cache", speed=10.0, right=[True, False], equal=[10, 5], swept=("threshold", 0.9), peak_memory=5
    )
    rows = m.rows()
    assert {metric: (row["median"], row["unit"], row["repeats"]) for metric, row in rows.items()} == {
        "accuracy": (0.5, "fraction", 2),
        "agreement": (0.75, "fraction", 2),
        "tokens_per_step": (2.0, "tokens", 1),
        "tokens_per_forward": (1.25, "tokens", 1),
        "tokens_per_second": (10.0, "tokens/s", 3),
        "peak_memory": (5, "B", 1),
    }
    assert all(row["low"] <= row["median"] <= row["high"] for row in rows.values())
    assert (rows["tokens_per_second"]["low"], rows["tokens_per_second"]["high"]) == (9.0, 12.0)
    assert rows["agreement"]["baseline"]["name"] == "threshold, uncached"
    case = rows["accuracy"]["case"]
    assert (case["method"], case["batch"], case["threshold"], case["track_budget"]) == ("flash-cache", 1, 0.9, 64)
    assert agreement([], []).share == 1 and set(measurement("llada", speed=1.0).rows()) == {
        "tokens_per_step", "tokens_per_forward", "tokens_per_second",
    }  # fmt: skip


def test_the_plot_is_whole_or_not_at_all(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measurements = [
        measurement("flash-dllm", speed=s, batch=b, right=[True, s < 40], swept=("gamma", g))
        for b in (1, 8)
        for s, g in ((30.0, 0.9), (50.0, 0.5))
    ]
    measurements.append(measurement("llada", speed=3.0, batch=8, right=[True, True]))
    assert write_plot(tmp_path / "compare.png", measurements, title="made up")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert not write_plot(tmp_path / "none.png", [measurement("llada", speed=1.0)], title="")
    assert [file.name for file in tmp_path.iterdir()] == ["compare.png"]
