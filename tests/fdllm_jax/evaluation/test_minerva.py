"""MATH: normalised answers and scores by hand."""

import hashlib
import json
from pathlib import Path

import pytest

from fdllm_jax.evaluation import minerva, sandbox
from fdllm_jax.evaluation.task import Item
from tests.fdllm_jax.evaluation.scores import score_all


def test_the_prompt_is_the_harness_s(tmp_path: Path):
    """The digest is of the prompt that lm-evaluation-harness 0.4.13 makes of the same problem."""
    file = tmp_path / "math_test.jsonl"
    file.write_text(json.dumps({"problem": "What is $0+1$?", "solution": r"It is $\boxed{1}$."}))
    (item,) = minerva.load(tmp_path)
    assert (
        hashlib.sha256(item.prompt.encode()).hexdigest()
        == "7f17ef4d79be7ecce4454606ad1870aa63586a6bd2ded99ad9ccc6dab57078aa"
    )
    assert item.prompt.endswith("I hope it is correct.\n\nProblem:\nWhat is $0+1$?\n\nSolution:")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{24}.$", "24"),
        (r"$\boxed{1}$ or $\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"$\boxed 5$ it is", "5"),
        (r"\boxed{{a}", None),
        ("none", None),
    ],
)
def test_the_gold_answer_is_what_the_last_box_holds(solution: str, answer: str | None):
    assert minerva.boxed(solution) == answer


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("x = 5", "5"),
        ("$10,000$", "10000"),
        ("0,1", "0,1"),
        (r"2\pi cm", r"2\pi"),
        (r"\left(3, 4\right)", r"\left(3,4\right)"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"\sqrt[3]8", r"\sqrt[3]{8}"),
        (r"\text{(A)}", "(A)"),
        (r"90^\circ", "90"),
        ("12 square feet", "12"),
        (r"\boxed{7}", "7"),
        (r"the value is $\textbf{3}$ here", "3"),
        (r"1\,000", r"1\,000"),
        ("$-1$ and $2$", "-1"),
        ("", ""),
    ],
)
def test_normalised(answer: str, normal: str):
    assert minerva.normalised(answer) == normal


def test_the_final_answer_is_what_follows_the_words():
    assert minerva.final_answer("so\nFinal Answer: The final answer is $2$. I hope it is correct.\nx") == "$2$"
    assert minerva.final_answer("Final Answer: The final answer is $2$. ") == "$2$"
    assert minerva.final_answer("The answer is 2.") == "[invalidanswer]"


@pytest.mark.usefixtures("layers")
def test_scores():
    """Of responses by hand; those that only SymPy or only math-verify can tell among them."""
    pytest.importorskip("math_verify")
    final = "Final Answer: The final answer is ${}$. I hope it is correct."
    cases = [
        (r"$\boxed{\frac{1}{2}}$", final.format(r"\frac12"), 1, 1),
        (r"$\boxed{\frac{1}{2}}$", final.format("0.5"), 1, 1),
        (r"$\boxed{[2,5)}$", final.format("[2,5)"), 1, 1),
        (r"$\boxed{x^2 - 1}$", final.format("(x-1)(x+1)"), 1, 1),
        (r"$\boxed{4}$", final.format("5"), 0, 0),
        (r"$\boxed{4}$", r"It is $\boxed{4}$.", 0, 1),
        (r"$\boxed{4}$", "", 0, 0),
        (r"$\boxed{4}$", final.format("\\" * 50 + "{{{'\"\n\x00"), 0, 0),
    ]
    items = [Item(key="", prompt="", document={"solution": solution}) for solution, *_ in cases]
    found = score_all(minerva.TASK, [(item, case[1]) for item, case in zip(items, cases, strict=True)])
    assert [(f["exact_match"], f["math_verify"]) for f in found] == [case[2:] for case in cases]


@pytest.mark.usefixtures("layers")
def test_a_comparison_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch):
    """By itself; and where the process has to be ended, equal strings still count."""
    pytest.importorskip("sympy")
    source = Path(minerva.__file__).with_name("equality.py").read_text().replace("SECONDS = 5", "SECONDS = 1")
    call = "[same('9^{9^{9^{9}}}', '4'), same('', ''), same('2+2', '4')]"
    assert sandbox.run([source], call, seconds=20.0) == [False, False, True]
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: None)
    for text, exact in (("$4$", 1), ("$5$", 0)):
        item = Item(key="", prompt="", document={"solution": r"$\boxed{4}$"})
        found = minerva.score(item, f"Final Answer: The final answer is {text}. I hope it is correct.")
        assert found == {"exact_match": exact, "math_verify": 0}
