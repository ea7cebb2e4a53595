"""MBPP (arXiv 2108.07732), 3-shot pass@1, as lm-evaluation-harness's task `mbpp`."""

from pathlib import Path

from fdllm_jax.evaluation import sandbox
from fdllm_jax.evaluation.data import Row, find, read
from fdllm_jax.evaluation.task import Item, Task

_FIELDS = {"task_id": int, "text": str, "test_list": list}
_TEST = range(11, 511)  # the task ids of the test split
_ASSERTIONS = 3
# Problems 2 to 4 of the data set, its lines ended as they are there.
_SHOTS = (
    {
        "text": "Write a function to find the similar elements from the given two tuple lists.",
        "code": "def similar_elements(test_tup1, test_tup2):\r\n"
        "  res = tuple(set(test_tup1) & set(test_tup2))\r\n"
        "  return (res) ",
        "test_list": [
            "assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)",
            "assert similar_elements((1, 2, 3, 4),(5, 4, 3, 7)) == (3, 4)",
            "assert similar_elements((11, 12, 14, 13),(17, 15, 14, 13)) == (13, 14)",
        ],
    },
    {
        "text": "Write a python function to identify non-prime numbers.",
        "code": "import math\r\n"
        "def is_not_prime(n):\r\n"
        "    result = False\r\n"
        "    for i in range(2,int(math.sqrt(n)) + 1):\r\n"
        "        if n % i == 0:\r\n"
        "            result = True\r\n"
        "    return result",
        "test_list": [
            "assert is_not_prime(2) == False",
            "assert is_not_prime(10) == True",
            "assert is_not_prime(35) == True",
        ],
    },
    {
        "text": "Write a function to find the largest integers from a given list of numbers using heap queue "
        "algorithm.",
        "code": "import heapq as hq\r\n"
        "def heap_queue_largest(nums,n):\r\n"
        "  largest_nums = hq.nlargest(n, nums)\r\n"
        "  return largest_nums",
        "test_list": [
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],3)==[85, 75, 65] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],2)==[85, 75] ",
            "assert heap_queue_largest( [25, 35, 22, 85, 14, 65, 75, 22, 58],5)==[85, 75, 65, 58, 35]",
        ],
    },
)


def load(data: Path) -> list[Item]:
    """The test split of the full data set: of a file with all problems, task ids 11 to 510."""
    rows = read(find(data, ("mbpp.jsonl", "mbpp_test.jsonl", "mbpp/test.jsonl", "test.jsonl")), _FIELDS, _fault)
    shots = "".join(f"{_question(shot)}{shot['code']}\n[DONE]\n\n" for shot in _SHOTS)
    return [
        Item(key=str(row["task_id"]), prompt=shots + _question(row), document={"test_list": row["test_list"]})
        for row in rows
        if row["task_id"] in _TEST
    ]


def _fault(row: Row) -> str | None:
    tests = row["test_list"]
    whole = len(tests) >= _ASSERTIONS and all(isinstance(test, str) for test in tests)
    return None if whole else f"expected a test_list of {_ASSERTIONS} assertions"


def _question(row: Row) -> str:
    return (
        f"You are an expert Python programmer, and here is your task: {row['text']} "
        f"Your code should pass these tests:\n\n{_tests(row)}\n[BEGIN]\n"
    )


def _tests(row: Row) -> str:
    return "\n".join(row["test_list"][:_ASSERTIONS])


def score(item: Item, text: str) -> dict[str, float]:
    """Whether the text, as code, passes the assertions that its prompt shows."""
    return {"pass@1": float(sandbox.passes(text, _tests(item.document)))}


TASK = Task(
    name="mbpp",
    load=load,
    score=score,
    metrics=("pass@1",),
    shots=len(_SHOTS),
    stop=("[DONE]",),
    gen_length=512,
    chat_template=False,
    source="lm-evaluation-harness 0.4.13, mbpp version 1",
    runs_code=True,
)
