"""The small model's training data: generators, tokenizer, pools and scores."""

import json
import re
from collections import defaultdict
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.small_model import (
    dialogue,
    function_families,
    functions,
    gsm8k,
    pool,
    stories,
    vocabulary,
    word_problems,
)
from benchmarks.small_model.mixture import Mixture, Writer
from benchmarks.small_model.wording import MANNERS, NAMES, OutOfRange, Step, Story, calculate, expand, in_manner, phrase

STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
NO_GSM8K = Mixture(word_problems=0.6, functions=0.4, gsm8k=0.0, raw=0.5)


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer trained on random words, so that it does not need GSM8K."""
    random = Random(3)
    words = ["".join(random.choices("abcdefghij", k=random.randint(2, 9))) for _ in range(6000)]
    problems = (word_problems.make(seed).answer for seed in range(200))
    directory = tmp_path_factory.mktemp("tokenizer")
    vocabulary.save(vocabulary.train(iter([" ".join(words), *problems])), directory)
    return directory


# --- word problems


def test_word_problems_depend_on_seed_and_split_alone():
    first = [word_problems.make(seed) for seed in range(50)]
    word_problems.make(999)
    assert [word_problems.make(seed) for seed in range(50)] == first
    assert len({problem.question for problem in first}) == 50
    assert word_problems.make(3, "test") != word_problems.make(3, "train")
    with pytest.raises(ValueError, match="split='dev'"):
        word_problems.make(3, "dev")


def test_every_worked_step_is_right_and_gold_is_the_last():
    counts = defaultdict(int)
    for seed in range(3000):
        problem = word_problems.make(seed)
        worked = [(int(a), operation, int(b), int(c)) for a, operation, b, c in STEP.findall(problem.answer)]
        assert len(worked) == problem.steps, problem.answer
        assert all(calculate(a, operation, b) == c for a, operation, b, c in worked), problem.answer
        assert worked[-1][3] == problem.gold
        assert problem.answer.endswith(f"\n#### {problem.gold}")
        assert 0 <= problem.gold < 1000
        assert not re.search(r"[\[\]|{}@]", problem.question + problem.answer)
        assert "?" in problem.question
        counts[problem.steps] += 1
    assert min(counts.values()) > 600 and sorted(counts) == [1, 2, 3, 4]


def test_every_skeleton_writes_every_number_of_steps():
    assert len(stories.ALL) >= 25
    for skeleton in stories.ALL:
        for steps in (1, 2, 3, 4):
            written = 0
            for seed in range(12):
                story = Story(Random(f"{skeleton.__name__} {steps} {seed}"), steps)
                try:
                    skeleton(story)
                except OutOfRange:
                    continue
                assert story.left == 0, (skeleton.__name__, steps)
                written += 1
            assert written >= 8, (skeleton.__name__, steps)


def test_the_numbers_of_a_question_are_the_first_operands():
    """Every operand is told in the question, computed before, or stood for by a word (twice, legs, sides)."""
    for seed in range(1500):
        problem = word_problems.make(seed)
        known = set(re.findall(r"\d+", problem.question)) | {"2", "3", "4"}
        for a, _, b, result in STEP.findall(problem.answer):
            assert {a, b} <= known, (problem.question, problem.answer)
            known.add(result)


@pytest.mark.parametrize("manner", range(MANNERS))
def test_a_step_has_six_forms_in_each_manner(manner: int):
    step = Step(a=7, operation="+", b=12, result=19, label="[the total|the sum]", clause="[Tom|he] has @ apples")
    sentences = [phrase(step, "[|so ]", manner, Random(seed)) for seed in range(600)]
    counts = np.unique(sentences, return_counts=True)[1]
    assert len(counts) == 6 and counts.min() > 60
    assert all("7 + 12 = 19" in sentence and sentence.endswith(".") for sentence in sentences)


def test_the_same_story_is_worked_in_many_ways():
    answers = set()
    for seed in range(600):
        story = Story(Random(5), 2)
        stories.money.shopping(story)
        story.random.seed(seed)
        answers.add(story.answer())
    assert 90 <= len(answers) <= 108  # three manners of 6 x 6


def test_a_skeleton_asks_in_many_ways():
    for skeleton in stories.ALL:
        questions = set()
        for seed in range(60):
            story = Story(Random(seed), 1)
            skeleton(story)
            names = "|".join(name for name, _ in NAMES)
            questions.add(re.sub(rf"\d+|\b(?:{names})\b", "#", story.question()))
        assert len(questions) >= 12, skeleton.__name__


def test_word_problems_of_the_splits_are_disjoint():
    train = {word_problems.make(seed).question for seed in range(3000)}
    test = {word_problems.make(seed, "test").question for seed in range(300)}
    assert not train & test
    assert all(word_problems.split_of(question) == "test" for question in test)


def test_alternatives_are_expanded_innermost_first():
    assert {expand("a[ [b|c]|]", Random(seed)) for seed in range(40)} == {"a b", "a c", "a"}
    assert [in_manner("a[ [b|c]|]", manner) for manner in (0, 1, 2)] == ["a b", "a", "a b"]
    assert len(NAMES) > 100 and len({name for name, _ in NAMES}) == len(NAMES)


# --- functions


def test_functions_depend_on_seed_and_split_alone():
    first = [functions.make(seed) for seed in range(50)]
    assert [functions.make(seed) for seed in range(50)] == first
    with pytest.raises(ValueError, match="split='dev'"):
        functions.make(3, "dev")


@pytest.mark.parametrize("split", functions.SPLITS)
def test_reference_functions_pass_their_tests_in_both_forms(split: str):
    families = set()
    for seed in range(700):
        problem = functions.make(seed, split)
        families.add(problem.family)
        assert not re.search(r"<\w>|[\[]\||@", problem.question + problem.answer), problem.question
        for code in (problem.answer, problem.header + problem.body):
            namespace: dict[str, object] = {}
            exec(code, namespace)
            assert callable(namespace[problem.entry_point])
            exec(problem.tests, namespace)
        assert problem.question.endswith(problem.header)
        assert problem.tests.count("assert") == 8
    assert len(families) >= 60
    assert len(function_families.FAMILIES) >= 60


def test_functions_of_the_splits_have_different_combinations():
    train = [functions.draw(Random(seed), with_tests=False) for seed in range(4000)]
    test = [functions.make(seed, "test") for seed in range(300)]
    assert not {problem.combination for problem in train} & {problem.combination for problem in test}
    assert not {problem.header for problem in train} & {problem.header for problem in test}


def test_a_function_has_several_bodies():
    bodies = defaultdict(set)
    for seed in range(3000):
        problem = functions.draw(Random(seed), with_tests=False)
        bodies[problem.family].add(problem.body)
    assert np.median([len(found) for found in bodies.values()]) >= 10


# --- GSM8K


def test_gsm8k_has_no_calculator_marks(tmp_path: Path):
    path = tmp_path / "gsm8k_train.jsonl"
    path.write_text(json.dumps({"question": "Two and 3? ", "answer": "It is 2+3=<<2+3=5>>5.\n#### 5"}) + "\n")
    assert gsm8k.load(path) == [("Two and 3?", "It is 2+3=5.\n#### 5")]


def test_absent_gsm8k_is_left_out_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FDLLM_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="FDLLM_DATA"):
        gsm8k.load()
    writer = Writer(Mixture(word_problems=1, functions=0, gsm8k=1, raw=0))
    assert "left out of the mixture" in capsys.readouterr().err
    assert "#### " in writer.example(Random(0)).answer


# --- dialogue


def test_forms_of_a_question():
    item = dialogue.from_question("What?", "It is 2.\n#### 2")
    shot = dialogue.from_question("Who?", "Tom.\n#### 1")
    raw = dialogue.raw_example(item, [shot])
    assert raw.prompt == "Question: Who?\nAnswer: Tom.\n#### 1\n\nQuestion: What?\nAnswer:"
    assert raw.answer == " It is 2.\n#### 2"
    chat = dialogue.chat_example(item, [shot])
    assert chat.prompt == dialogue.chat(raw.prompt)
    assert chat.answer == "It is 2.\n#### 2"
    assert dialogue.chat_example(item).prompt == dialogue.chat("What?")


def test_forms_of_a_function():
    problem = functions.make(0)
    item = dialogue.from_function(problem)
    for example in (dialogue.raw_example(item), dialogue.raw_example(item, [item])):
        assert example.prompt.endswith(problem.header) and example.answer == problem.body
    assert dialogue.chat_example(item).answer == problem.answer


# --- tokenizer


def test_tokenizer_ids_and_round_trip(tokenizer_directory: Path):
    fast = AutoTokenizer.from_pretrained(tokenizer_directory)
    assert len(fast) == 4096
    assert fast.convert_tokens_to_ids(list(vocabulary.SPECIAL_TOKENS)) == list(range(4090, 4096))
    assert (fast.bos_token, fast.eos_token, fast.pad_token, fast.mask_token) == (
        dialogue.BOS,
        dialogue.EOS,
        dialogue.EOS,
        dialogue.MASK,
    )
    random = Random(4)
    texts = [
        "",
        " ",
        "\n\n  x\t\r\n",
        "naïve 日本語 🎉 ½ \x00 \ufffd",
        "def f(x):\n    return x[1:]\n",
        "12 * 345 = 4140",
    ]
    texts += ["".join(chr(random.randrange(1, 0xD800)) for _ in range(40)) for _ in range(50)]
    for text in texts:
        assert fast.decode(fast.encode(text, add_special_tokens=False)) == text
    digits = fast.convert_tokens_to_ids(list("0123456789"))
    assert len(set(digits)) == 10
    assert [id for id in fast.encode("a1234567890b", add_special_tokens=False) if id in digits] == [
        *digits[1:],
        digits[0],
    ]
    assert not [token for token in fast.get_vocab() if re.search(r"\d", token) and len(token) > 1]


def test_chat_template_is_the_training_form(tokenizer_directory: Path):
    fast = AutoTokenizer.from_pretrained(tokenizer_directory)
    messages = [{"role": "user", "content": "  How many?\n"}]
    text = fast.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == dialogue.chat("How many?")


def test_too_few_texts_for_a_vocabulary():
    with pytest.raises(ValueError, match="expected 4090"):
        vocabulary.train(iter(["a few words"]))


# --- pools


@pytest.mark.parametrize(("bin_length", "count"), [(256, 70), (768, 12), (2304, 6)])
def test_pool_shapes_and_contents(tokenizer_directory: Path, bin_length: int, count: int):
    built = pool.build(bin_length, count, 7, tokenizer_directory, NO_GSM8K, workers=1)
    tokenizer = Tokenizer.from_file(str(tokenizer_directory / "tokenizer.json"))
    eos = tokenizer.token_to_id(dialogue.EOS)
    assert built.tokens.shape == (count, bin_length)
    assert {array.dtype for array in (built.tokens, built.prompt_length, built.length)} == {np.dtype(np.uint16)}
    for row, prompt, length in zip(
        built.tokens, built.prompt_length.astype(int), built.length.astype(int), strict=True
    ):
        assert 0 < prompt < length - 1 < bin_length
        assert (row[length - 1 :] == eos).all() and eos not in row[: length - 1]
        answer = tokenizer.decode(row[prompt : length - 1].tolist(), skip_special_tokens=False)
        assert "####" in answer or "return" in answer
    if bin_length > 256:
        assert built.length.max() > bin_length / 2
    again = pool.build(bin_length, count, 7, tokenizer_directory, NO_GSM8K, workers=1)
    assert np.array_equal(built.tokens, again.tokens)
    other = pool.build(bin_length, count, 8, tokenizer_directory, NO_GSM8K, workers=1)
    assert not np.array_equal(built.tokens, other.tokens)


def test_a_pool_does_not_depend_on_the_workers(tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "CHUNK", 16)
    alone = pool.build(256, 40, 1, tokenizer_directory, NO_GSM8K, workers=1)
    shared = pool.build(256, 40, 1, tokenizer_directory, NO_GSM8K, workers=2)
    assert np.array_equal(alone.tokens, shared.tokens) and np.array_equal(alone.length, shared.length)


def test_pool_refuses_bad_arguments(tokenizer_directory: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="bin_length=100"):
        pool.build(100, 1, 0, tokenizer_directory)
    with pytest.raises(FileNotFoundError, match="vocabulary"):
        pool.build(256, 1, 0, tmp_path)
    with pytest.raises(ValueError, match="at least 0"):
        Mixture(word_problems=-1, functions=1, gsm8k=0, raw=0)
    with pytest.raises(ValueError, match="raw"):
        Mixture(word_problems=1, functions=1, gsm8k=0, raw=2)
