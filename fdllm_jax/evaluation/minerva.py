"""MATH (arXiv 2103.03874), 4-shot, as lm-evaluation-harness's `minerva_math`.

Prompts and normalisation are those of Minerva (arXiv 2206.14858, appendix D).
"""

import re
from pathlib import Path

from fdllm_jax.evaluation import sandbox
from fdllm_jax.evaluation.data import Row, find, read
from fdllm_jax.evaluation.task import Item, Task

_FIELDS = {"problem": str, "solution": str}
_SECONDS = 20.0  # for all comparisons of one response
_EQUALITY = Path(__file__).with_name("equality.py")

_SHOTS = (
    (
        r"Find the domain of the expression  $\frac{\sqrt{x-2}}{\sqrt{5-x}}$.",
        r"The expressions inside each square root must be non-negative. Therefore, $x-2 \ge 0$, so $x\ge2$, and "
        r"$5 - x \ge 0$, so $x \le 5$. Also, the denominator cannot be equal to zero, so $5-x>0$, which gives $x<5$. "
        r"Therefore, the domain of the expression is $\boxed{[2,5)}$.",
        "[2,5)",
    ),
    (
        r"If $\det \mathbf{A} = 2$ and $\det \mathbf{B} = 12,$ then find $\det (\mathbf{A} \mathbf{B}).$",
        r"We have that $\det (\mathbf{A} \mathbf{B}) = (\det \mathbf{A})(\det \mathbf{B}) = (2)(12) = \boxed{24}.$",
        "24",
    ),
    (
        "Terrell usually lifts two 20-pound weights 12 times. If he uses two 15-pound weights instead, how many times "
        "must Terrell lift them in order to lift the same total weight?",
        r"If Terrell lifts two 20-pound weights 12 times, he lifts a total of $2\cdot 12\cdot20=480$ pounds of weight. "
        r" If he lifts two 15-pound weights instead for $n$ times, he will lift a total of $2\cdot15\cdot n=30n$ "
        "pounds of weight.  Equating this to 480 pounds, we can solve for $n$:\n"
        "\\begin{align*}\n"
        "30n&=480\\\\\n"
        r"\Rightarrow\qquad n&=480/30=\boxed{16}"
        "\n\\end{align*}",
        "16",
    ),
    (
        "If the system of equations\n\n\\begin{align*}\n6x-4y&=a,\\\\\n6y-9x &=b.\n\\end{align*}has a solution "
        "$(x, y)$ where $x$ and $y$ are both nonzero,\n"
        r"find $\frac{a}{b},$ assuming $b$ is nonzero.",
        r"If we multiply the first equation by $-\frac{3}{2}$, we obtain"
        "\n\n"
        r"$$6y-9x=-\frac{3}{2}a.$$Since we also know that $6y-9x=b$, we have"
        "\n\n"
        r"$$-\frac{3}{2}a=b\Rightarrow\frac{a}{b}=\boxed{-\frac{2}{3}}.$$",
        r"-\frac{2}{3}",
    ),
)

_SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", r"\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
    r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
# What is kept of mathematics between dollars, of text, bold, overlined and boxed; braces for \frac12 and \sqrt2.
_REWRITTEN = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"), (r"(\\text\{)(.*?)(\})", r"\2"), (r"(\\textbf\{)(.*?)(\})", r"\2"),
    (r"(\\overline\{)(.*?)(\})", r"\2"), (r"(\\boxed\{)(.*)(\})", r"\2"), (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)(\[[^\]]*\])(\w)", r"\1\2{\3}"), (r"(sqrt)(?!\[)([^{])", r"sqrt{\2}"), (r"\$", ""),
)  # fmt: skip
_FINAL = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct.")


def load(data: Path) -> list[Item]:
    """Problems in the order of the file, after the four examples that are the same for all."""
    rows = read(find(data, ("math_test.jsonl", "math/test.jsonl", "math.jsonl", "test.jsonl")), _FIELDS, _fault)
    shots = "".join(
        f"{_question(problem)} {solution}\nFinal Answer: The final answer is ${answer}$. I hope it is correct.\n\n"
        for problem, solution, answer in _SHOTS
    )
    return [
        Item(key=str(i), prompt=shots + _question(row["problem"]), document={"solution": row["solution"]})
        for i, row in enumerate(rows)
    ]


def _fault(row: Row) -> str | None:
    return r"the solution has no \boxed{...}" if boxed(row["solution"]) is None else None


def _question(problem: str) -> str:
    return f"Problem:\n{problem}\n\nSolution:"


def score(item: Item, text: str) -> dict[str, float]:
    """exact_match: the normalised final answer equals the gold one, or SymPy finds them equal.

    math_verify: the package of this name finds the answer in the text, wherever it is.
    """
    solution = item.document["solution"]
    gold, answer = normalised(boxed(solution) or ""), normalised(final_answer(text))
    call = f"compare({solution!r}, {text!r}, {gold!r}, {answer!r})"
    found = sandbox.run([_EQUALITY.read_text(encoding="utf-8")], call, seconds=_SECONDS)
    exact, verified = found or (bool(answer) and answer == gold, False)
    return {"exact_match": float(exact), "math_verify": float(verified)}


def boxed(solution: str) -> str | None:
    r"""What the last `\boxed` holds; None where there is none."""
    if r"\boxed " in solution:
        return solution.rsplit(r"\boxed ", 1)[1].split("$")[0]
    start = solution.rfind(r"\boxed{")
    depth = 0
    for place in range(start, len(solution)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(solution[place], 0)
        if solution[place] == "}" and depth == 0:
            return solution[start + len(r"\boxed{") : place]
    return None


def final_answer(text: str) -> str:
    """What follows "The final answer is", as in the shots."""
    found = _FINAL.search(f"{text}I hope it is correct.")
    return found[1].strip() if found else "[invalidanswer]"


def normalised(answer: str) -> str:
    """An answer without units, fillers and layout."""
    answer = answer.split("=")[-1]
    for word in filter(str.isalpha, _REMOVED):
        answer = re.sub(rf"(?<!\\)\b{word}\b", "", answer)
    for before, after in _SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for removed in _REMOVED:
        if removed.isalpha():  # in whatever it stands, but the name of a LaTeX command
            answer = re.sub(rf"(\\[a-zA-Z]+)|{removed}", lambda found: found[1] or "", answer)
        else:
            answer = answer.replace(removed, "")
    for pattern, replacement in _REWRITTEN:
        answer = re.sub(pattern, replacement, answer)
    return answer.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+", answer) else answer


TASK = Task(
    name="math",
    load=load,
    score=score,
    metrics=("math_verify", "exact_match"),
    shots=len(_SHOTS),
    stop=("Problem:",),
    gen_length=512,
    chat_template=False,
    source="lm-evaluation-harness 0.4.13, minerva_math version 3.1",
    runs_code=True,
    packages=("math-verify", "latex2sympy2_extended", "sympy", "antlr4-python3-runtime"),
)
