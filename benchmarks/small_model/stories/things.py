"""Story skeletons about things that somebody has: collections, groups, sharing, packing, trading."""

from benchmarks.small_model.wording import Person, Story


def _change(s: Story, total: int, who: Person, things: str) -> int:
    """One more event that changes how many `things` `who` has; returns the new number."""
    has = f"[{who}|{who.he}] [now has|then has|has] @ {things}"
    k = s.divisor(total)
    kind = s.pick(("gain", "gain", "lose", "lose", "times", "part", "part"))
    if kind == "times" and total <= 80:
        k = s.pick((2, 2, 3, 4))
        word = {2: "doubles", 3: "triples", 4: "quadruples"}[k]
        s.tell(f"[Then|Later|After that], {who} {word} the number of {things}[| that {who.he} has].")
        return s.step(total, "*", k, f"the {things} after {who.he} {word} them", f"{has}[| after that]")
    if kind == "part" and k:
        part = "half" if k == 2 else f"1/{k}"
        s.tell(f"[Then|Later|After that], {who} [keeps only|is left with only] {part} of {who.his} {things}.")
        return s.step(total, "/", k, f"{part} of the {things}", f"[{who} keeps|{who.he} keeps|there remain] @ {things}")
    if kind in ("lose", "part") and total > 4:
        b = s.number(2, min(60, total - 1))
        friend = s.person()
        s.tell(
            f"[Then|Later|After that|The next day], {who} "
            f"[gives {b} {things} to {friend}|loses {b} {things}|sells {b} of the {things}|uses up {b} "
            f"of them|breaks {b} of the {things}]."
        )
        left = f"[{who} has|{who.he} has|there are] @ {things} [left|remaining|still there]"
        return s.step(total, "-", b, f"[what is left|the number of {things} left|the rest]", left)
    b = s.number(2, 60)
    friend = s.person()
    s.tell(
        f"[Then|Later|After that|The next day], {who} "
        f"[gets {b} more {things}|buys another {b} {things}|finds {b} more|receives {b} {things} from "
        f"{friend}|makes {b} more {things}]."
    )
    return s.step(total, "+", b, f"[the new total|the number of {things} now|the sum]", f"{has}[| altogether| in all]")


def _ask_total(s: Story, who: Person, things: str) -> None:
    s.tell(f"How many {things} does {who} have [now|in the end|at the end|left]?")


def collection(s: Story) -> None:
    who, things, total = s.person(), s.things(), s.number(8, 60)
    s.tell(f"{who} [has|starts with|owns|collects] {total} {things}[| in a box| at home| at first].")
    while s.left:
        total = _change(s, total, who, things)
    _ask_total(s, who, things)


def groups(s: Story) -> None:
    who, things = s.person(), s.things()
    n, size = s.number(2, 12), s.number(3, 20)
    box = s.pick(("box", "bag", "basket", "pack", "crate", "drawer"))
    boxes = f"{box}es" if box == "box" else f"{box}s"
    s.tell(
        f"[{who} has {n} {boxes} with {size} {things} in each|There are {size} {things} in each of {who}'s {n} {boxes}|"
        f"{who} buys {n} {boxes} of {things}, and every {box} holds {size}]."
    )
    clause = f"[{who} has|the {boxes} hold|there are] @ {things}[| in the {boxes}]"
    total = s.step(n, "*", size, f"the number of {things} in the {boxes}", clause)
    while s.left:
        total = _change(s, total, who, things)
    _ask_total(s, who, things)


def sharing(s: Story) -> None:
    who, things = s.person(), s.things()
    k, each = s.number(2, 10), s.number(2, 30)
    total = k * each
    people = s.pick(("friends", "children", "cousins", "neighbors", "classmates"))
    one = {"children": "child"}.get(people, people[:-1])
    if s.left > 1:
        first = s.number(1, total - 1)
        s.tell(f"{who} has {first} {things} and [buys|gets|finds|adds] {total - first} more.")
        s.step(first, "+", total - first, f"the total number of {things}", f"[{who}|{who.he}] has @ {things}[| in all]")
        s.tell(f"{who.he} [shares|splits|divides] [them|all of them] equally among {k} {people}.")
    else:
        s.tell(f"{who} [shares|splits|divides] {total} {things} equally among {k} {people}.")
    s.step(
        total, "/", k, f"the share of one {one}", f"[each {one}|every {one}|each of them] [gets|receives] @ {things}"
    )
    if not s.left:
        s.tell(f"How many {things} does each {one} [get|receive]?")
        return
    friend = s.person()
    own = s.number(2, 60)
    s.tell(f"{friend}, one of the {people}, already had {own} {things}.")
    total = s.step(each, "+", own, f"the {things} of {friend}", f"{friend} [now has|has] @ {things}[| in all]")
    while s.left:
        total = _change(s, total, friend, things)
    _ask_total(s, friend, things)


def trading(s: Story) -> None:
    who, a, b = s.person(), s.things(), s.things()
    friend, n, k, own = s.person(), s.number(2, 30), s.number(2, 9), s.number(2, 60)
    s.tell(f"{friend} gives {k} {a} for [each|every] one of {who}'s {b}. {who} [trades|swaps|exchanges] {n} {b}.")
    total = s.step(n, "*", k, f"the {a} from {friend}", f"{who} gets @ {a}[| from {friend}]")
    if s.left:
        s.tell(f"{who} [already had|had already] {own} {a}.")
        total = s.step(total, "+", own, f"all the {a} of {who}", f"{who} has @ {a}[| in all]")
    while s.left:
        total = _change(s, total, who, a)
    s.tell(
        f"How many {a} does {who} [have now|end up with|have]?" if total != n * k else f"How many {a} does {who} get?"
    )


def packing(s: Story) -> None:
    who, things = s.person(), s.things()
    size, n = s.number(2, 10), s.number(2, 40)
    total = size * n
    box = s.pick(("boxes", "bags", "packs", "jars", "baskets"))
    if s.left >= 2:
        lost = s.number(2, 50)
        s.tell(
            f"{who} has {total + lost} {things}[, but {lost} of them are broken| and gives {lost} to "
            f"{s.person()}|. {lost} of them get lost]."
        )
        s.step(total + lost, "-", lost, f"the {things} left", f"[{who} has|there are] @ {things} left")
        s.tell(f"{who.he} puts the rest into {box} [of {size}|with {size} in each].")
    else:
        s.tell(f"{who} puts {total} {things} into {box} [of {size}|with {size} in each].")
    n = s.step(total, "/", size, f"the number of {box}", f"[{who} fills|{who.he} needs|there are] @ {box}")
    if not s.left:
        s.tell(f"How many {box} does {who.he} [need|fill]?")
        return
    price = s.number(2, 12)
    s.tell(f"{who.he} sells [each|every one] of the {box} for [${price}|{price} dollars].")
    money = s.step(n, "*", price, "[the money|the income]", f"[{who} earns|{who.he} gets|that makes] [$@|@ dollars]")
    if s.left:
        cost = s.number(1, money - 1)
        s.tell(
            f"The {box} cost {who.him} [${cost}|{cost} dollars]. How much [profit does {who.he} make|"
            f"money does {who.he} keep]?"
        )
        s.step(money, "-", cost, "the profit", f"[{who} keeps|the profit is|{who.he} is left with] [$@|@ dollars]")
    else:
        s.tell(f"How much money does {who.he} [make|get|earn]?")


def baking(s: Story) -> None:
    who, n, size = s.person(), s.number(2, 12), s.number(4, 24)
    things = s.pick(("cookies", "muffins", "rolls", "cupcakes", "pancakes", "biscuits", "buns", "brownies"))
    s.tell(
        f"{who} bakes {n} trays of {things}[, with {size} on each tray|. There are {size} {things} on "
        f"each tray|, {size} {things} a tray]."
    )
    total = s.step(n, "*", size, f"the number of {things} baked", f"{who} [bakes|makes|has] @ {things}")
    if s.left:
        eaten = s.number(2, min(total - 2, 50))
        s.tell(f"{who.his} family eats {eaten} of them.")
        left = f"[there are|{who} has|they have] @ {things} [left|remaining]"
        total = s.step(total, "-", eaten, f"[the {things} left|what is left]", left)
    if s.left == 2:
        more = s.number(2, 40)
        s.tell(f"Then {who.he} bakes {more} more.")
        total = s.step(total, "+", more, f"the {things} now", f"[{who} has|there are] @ {things}[| now]")
    if s.left:
        k = s.divisor(total)
        if k:
            s.tell(f"{who.he} packs the rest into boxes of {k}. How many boxes does {who.he} [fill|need]?")
            s.step(total, "/", k, "the number of boxes", f"[{who.he} fills|{who} needs|there are] @ boxes")
            return
        total = _change(s, total, who, things)
    _ask_total(s, who, things)


def library(s: Story) -> None:
    shelves, size = s.number(2, 12), s.number(5, 40)
    what, place = s.pick((("books", "library"), ("films", "shop"), ("records", "store"), ("magazines", "room")))
    s.tell(
        f"A {place} has {shelves} shelves [with {size} {what} each|of {size} {what}|and puts {size} {what} on each]."
    )
    total = s.step(
        shelves, "*", size, f"[the number of {what}|all the {what}]", f"[there are|the {place} has] @ {what}"
    )
    while s.left:
        b = s.number(2, min(60, total - 1))
        if s.random.random() < 0.5:
            s.tell(f"{b} [new {what} arrive|{what} are returned|more {what} are bought].")
            total = s.step(total, "+", b, f"the {what} then", f"[there are|the {place} has] @ {what}[| now]")
        else:
            s.tell(f"{b} {what} are [borrowed|lent out|sold|thrown away].")
            total = s.step(
                total,
                "-",
                b,
                f"[the {what} left|what is left]",
                f"[there are|the {place} has] @ {what} [left|remaining]",
            )
    s.tell(f"How many {what} [are in the {place}|does the {place} have] [now|then|in the end]?")


def eggs(s: Story) -> None:
    who, hens, each, days = s.person(), s.number(2, 12), s.number(1, 5) + 1, s.number(2, 7)
    s.tell(
        f"{who} has {hens} hens[, and each lays {each} eggs a week|. Each hen lays {each} eggs a week|, "
        f"each laying {each} eggs per week]."
    )
    total = s.step(
        hens,
        "*",
        each,
        "[the eggs in a week|the weekly number of eggs]",
        f"[the hens lay|{who} gets] @ eggs[| a week| in a week]",
    )
    if s.left > 1 or (s.left and s.random.random() < 0.4):
        s.tell(f"{who.he} [collects|saves] them for {days} weeks.")
        total = s.step(total, "*", days, f"the eggs in {days} weeks", f"[{who} has|there are|{who.he} collects] @ eggs")
    while s.left:
        k = s.divisor(total)
        if k and s.left == 1:
            s.tell(
                f"[{who} fills boxes of {k} eggs|The eggs are put in boxes of {k}]. How many boxes are [filled|needed]?"
            )
            s.step(total, "/", k, "the number of boxes", f"[{who} fills|there are|{who.he} needs] @ boxes")
            return
        b = s.number(1, min(total - 1, 60))
        s.tell(f"{who.he} [uses|eats|breaks|sells] {b} eggs.")
        total = s.step(total, "-", b, "the eggs left", f"[{who} has|there are] @ eggs left")
    s.tell(f"How many eggs does {who} [have|get]?")


def factory(s: Story) -> None:
    machines, rate = s.number(2, 12), s.number(3, 20)
    things = s.things()
    s.tell(
        f"A factory has {machines} machines[ that make {rate} {things} an hour each|. Each makes {rate} "
        f"{things} an hour|, each making {rate} {things} per hour]."
    )
    total = s.step(
        machines,
        "*",
        rate,
        f"the {things} in an hour",
        f"[the machines make|they make|the factory makes] @ {things}[| an hour]",
    )
    if s.left and total <= 160:
        hours = s.number(2, 6)
        s.tell(f"They [run|work] for {hours} hours.")
        total = s.step(
            total,
            "*",
            hours,
            f"the {things} in {hours} hours",
            f"[the machines make|they make|the factory makes] @ {things}",
        )
    while s.left:
        b, k = s.number(1, min(60, total - 1)), s.divisor(total)
        if k and s.left == 1 and s.random.random() < 0.6:
            s.tell(f"The {things} are packed in boxes of {k}. How many boxes [are needed|is that]?")
            s.step(total, "/", k, "the number of boxes", "[there are|they fill|they need] @ boxes")
            return
        s.tell(f"{b} of the {things} are [broken|sold|thrown away|kept for tests].")
        total = s.step(total, "-", b, f"[the {things} left|the rest]", f"[there are|that leaves] @ {things}[| left]")
    s.tell(
        f"How many {things} [are there|does the factory have] [in the end|then]?"
        if s.steps > 1
        else f"How many {things} are made in an hour?"
    )


STORIES = (collection, groups, sharing, trading, packing, baking, library, eggs, factory)
