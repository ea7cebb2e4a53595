"""Tasks from JSON lines, and the built-in ones."""

import json

import pytest

from fdllm_jax.tasks import EXAMPLES, Task, extract_answer, parse_tasks


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("12 + 6 = 18 eggs.\n#### 18", "18"),
        ("#### 3\n#### 1,234", "1234"),
        ("$12.50", "12.5"),
        ("-7", "-7"),
        (42, "42"),
        (2.0, "2"),
    ],
)
def test_gold_is_the_number_after_the_mark_or_the_whole_answer(answer: object, gold: str) -> None:
    line = json.dumps({"question": "How many?", "answer": answer, "id": 7})
    assert parse_tasks(f"\n{line}\n\n") == [Task(question="How many?", gold=gold)]


def test_every_line_at_fault_is_named() -> None:
    good = '{"question": "q", "answer": "#### 1"}'
    lines = [good, "{", '{"question": "q"}', '{"question": " ", "answer": "1"}', '{"question": "q", "answer": "yes"}']
    with pytest.raises(ValueError) as error:
        parse_tasks("\n".join(lines))
    message = str(error.value)
    assert "line 2: not JSON (" in message and "line 1" not in message and message.endswith("; and 1 more")
    assert 'line 3: expected {"question": ..., "answer": ...}' in message and "line 4: the question is no" in message
    with pytest.raises(ValueError, match=r"line 1: the answer 'yes' is not a number"):
        parse_tasks(lines[-1])
    with pytest.raises(ValueError, match="line 1: expected"):
        parse_tasks("[1]")
    with pytest.raises(ValueError, match="no task in it"):
        parse_tasks("\n")


def test_the_built_in_tasks_are_held_out_and_their_golds_are_numbers() -> None:
    """Held out: `benchmarks.small_model.word_problems` puts their questions on the test side."""
    from benchmarks.small_model.word_problems import split_of

    assert {split_of(task.question) for task in EXAMPLES} == {"test"}
    assert [extract_answer(f"#### {task.gold}") for task in EXAMPLES] == [task.gold for task in EXAMPLES]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So 3.\n#### 3", "3"),
        ("#### 1\n#### 1,234", "1234"),
        ("#### $12.50", "12.5"),
        ("####-7", "-7"),
        ("#### 12.00 dollars", "12"),
        ("#### 0", "0"),
        ("the answer is 3", None),
        ("#### none", None),
        ("", None),
    ],
)
def test_the_answer_is_the_number_after_the_last_mark(text: str, expected: str | None) -> None:
    assert extract_answer(text) == expected
