"""Story skeletons about money: shopping, saving, wages, tickets, debts."""

from benchmarks.small_model.tables import WORDS
from benchmarks.small_model.wording import Story


def _more_money(s: Story, total: int, who: str, he: str) -> int:
    """One more event that changes the money somebody has; returns the new amount."""
    has = f"[{who}|{he}] [now has|then has|has] [$@|@ dollars]"
    k = s.divisor(total)
    kind = s.pick(("gain", "lose", "lose", "part", "times"))
    if kind == "part" and k:
        part = "half" if k == 2 else f"1/{k}"
        s.tell(f"[Then|Later], {he} [keeps only|is left with] {part} of [the money|it].")
        return s.step(total, "/", k, f"{part} of the money", f"[{who}|{he}] keeps [$@|@ dollars]")
    if kind == "times" and total <= 100:
        s.tell(f"[Then|Later], {who} doubles [the money|this amount].")
        return s.step(total, "*", 2, "the doubled amount", has)
    if kind != "gain" and total > 3:
        b, thing = s.number(1, min(60, total - 1)), s.things(WORDS["goods"])[:-1]
        s.tell(
            f"[Then|Later], {he} [spends ${b} on a {thing}|pays {b} dollars for lunch|gives ${b} to "
            f"{s.person()}|loses ${b}]."
        )
        clause = f"[{who}|{he}] has [$@|@ dollars] [left|remaining]"
        return s.step(total, "-", b, "[what is left|the money left|the rest]", clause)
    b = s.number(2, 60)
    s.tell(
        f"[Then|Later], {who} [gets ${b} as a gift|earns {b} dollars more|finds ${b}|gets {b} dollars "
        f"from {s.person()}]."
    )
    return s.step(total, "+", b, "[the new total|the money now|the sum]", has)


def _ask_money(s: Story, who: str) -> None:
    s.tell(f"How much money does {who} have [now|in the end|then]?")


def shopping(s: Story) -> None:
    who, a, b = s.person(), s.things(WORDS["goods"]), s.things(WORDS["goods"])
    n, p, m, q = s.number(2, 12), s.number(2, 20), s.number(2, 12), s.number(2, 12)
    if s.left <= 2:
        s.tell(
            f"{who} [buys|orders|pays for] {n} {a}[ for ${p} each| at {p} dollars each|, each costing "
            f"${p}|, which cost {p} dollars each]."
        )
        total = s.step(
            n, "*", p, f"the [cost|price] of the {a}", f"[the {a} cost|{who} pays|{who.he} spends] [$@|@ dollars]"
        )
        if s.left and s.random.random() < 0.5:
            paid = total + s.number(1, 40)
            s.tell(f"{who.he} [pays with|gives the seller|hands over] ${paid}. How much change does {who.he} get?")
            s.step(paid, "-", total, "the change", f"[{who}|{who.he}] gets [$@|@ dollars] [back|in change]")
            return
        if s.left:
            s.tell(f"{who.he} also buys a {b[:-1]} for ${m}.")
            s.step(
                total,
                "+",
                m,
                "[the total|the cost of everything]",
                f"[everything costs|{who} pays|{who.he} spends] [$@|@ dollars]",
            )
        s.tell(f"How much does {who} [pay|spend][| in total| altogether]?")
        return
    s.tell(
        f"{who} [buys|orders|takes] {n} {a} and {m} {b}. [Each {a[:-1]} costs ${p} and each {b[:-1]} costs ${q}|"
        f"The {a} cost {p} dollars each and the {b} {q} dollars each|One {a[:-1]} is ${p}, one {b[:-1]} is ${q}]."
    )
    x = s.step(n, "*", p, f"the [cost|price] of the {a}", f"[the {a} cost|{who} pays] [$@|@ dollars][| for the {a}]")
    y = s.step(m, "*", q, f"the [cost|price] of the {b}", f"[the {b} cost|{who} pays] [$@|@ dollars][| for the {b}]")
    clause = f"[everything costs|{who} pays|{who.he} spends] [$@|@ dollars][| in all]"
    total = s.step(x, "+", y, "[the total|the cost of everything|the sum]", clause)
    if not s.left:
        s.tell(f"How much does {who} [pay|spend][| in total| altogether]?")
    elif s.random.random() < 0.5:
        off = s.number(1, min(30, total - 1))
        s.tell(f"{who.he} has a coupon for ${off} off. How much does {who.he} pay?")
        s.step(total, "-", off, "the price with the coupon", f"[{who}|{who.he}] pays [$@|@ dollars]")
    else:
        paid = total + s.number(1, 60)
        s.tell(f"{who.he} [pays with|gives the seller|hands over] ${paid}. How much change does {who.he} get?")
        s.step(paid, "-", total, "the change", f"[{who}|{who.he}] gets [$@|@ dollars] [back|in change]")


def saving(s: Story) -> None:
    who, weeks, each = s.person(), s.number(2, 12), s.number(2, 30)
    period = s.pick(("week", "month", "day"))
    s.tell(f"{who} [saves|puts aside|earns] ${each} [a|every|each] {period} for {weeks} {period}s.")
    total = s.step(weeks, "*", each, "[the money saved|the savings]", f"[{who}|{who.he}] [saves|has] [$@|@ dollars]")
    if s.left and s.random.random() < 0.4:
        own = s.number(2, 60)
        s.tell(f"{who.he} [already had|had already] ${own}.")
        total = s.step(
            total, "+", own, "[all the money|the new total]", f"[{who}|{who.he}] has [$@|@ dollars][| in all]"
        )
    while s.left > 1:
        total = _more_money(s, total, str(who), who.he)
    if s.left and s.random.random() < 0.6:
        need = s.number(2, 60)
        thing = s.pick(("bike", "phone", "camera", "guitar", "tent", "desk", "watch"))
        s.tell(f"A {thing} costs ${total + need}. How much [more money does {who.he} need|is missing][| to buy it]?")
        s.step(
            total + need,
            "-",
            total,
            "[the missing money|what is missing]",
            f"[{who}|{who.he}] [needs|is missing] [$@|@ dollars]",
        )
        return
    if s.left:
        total = _more_money(s, total, str(who), who.he)
    _ask_money(s, str(who))


def wages(s: Story) -> None:
    who, pay, hours = s.person(), s.number(5, 20), s.number(2, 9)
    job = s.pick(
        (
            "works in a shop",
            "washes cars",
            "walks dogs",
            "paints fences",
            "teaches piano",
            "cleans windows",
            "delivers papers",
        )
    )
    s.tell(
        f"{who} {job} for ${pay} an hour[ and works {hours} hours a day|. {who.he} works {hours} hours "
        f"a day|, {hours} hours a day]."
    )
    total = s.step(
        pay,
        "*",
        hours,
        "[the pay for a day|the daily pay]",
        f"[{who}|{who.he}] [earns|makes|gets] [$@|@ dollars][| a day]",
    )
    if s.left and total <= 190:
        days = s.number(2, 5)
        s.tell(f"{who.he} works {days} days.")
        total = s.step(
            total,
            "*",
            days,
            "[the whole pay|the pay for all days]",
            f"[{who}|{who.he}] [earns|makes|gets] [$@|@ dollars][| in all]",
        )
    while s.left:
        total = _more_money(s, total, str(who), who.he)
    s.tell(
        f"How much money does {who} [have|make][| in the end| then]?"
        if s.steps > 1
        else f"How much does {who} earn [a|in a] day?"
    )


def tickets(s: Story) -> None:
    adults, kids, p, q = s.number(2, 12), s.number(2, 12), s.number(4, 20), s.number(2, 12)
    place = s.pick(("zoo", "museum", "circus", "fair", "pool", "show", "castle"))
    if s.left <= 2:
        s.tell(f"A ticket for the {place} costs ${p}. A group of {adults} [people|friends|adults] goes there.")
        total = s.step(
            adults,
            "*",
            p,
            "[the price of the tickets|the cost for the group]",
            "[the tickets cost|the group pays|they pay] [$@|@ dollars]",
        )
        if s.left:
            b = s.number(2, 60)
            s.tell(f"They also [pay ${b} for food|spend {b} dollars on the bus|buy drinks for ${b}].")
            s.step(
                total,
                "+",
                b,
                "[the total|the cost of the day]",
                "[they pay|the day costs|everything costs] [$@|@ dollars]",
            )
        s.tell("How much do they [pay|spend][| in all| altogether]?")
        return
    s.tell(
        f"[At|For] the {place}, [a ticket costs ${p} for adults and ${q} for children|adults pay ${p} "
        f"and children pay ${q}]. "
        f"{adults} adults and {kids} children [go there|visit it|buy tickets]."
    )
    x = s.step(adults, "*", p, "[the price for the adults|the tickets of the adults]", "the adults pay [$@|@ dollars]")
    y = s.step(
        kids, "*", q, "[the price for the children|the tickets of the children]", "the children pay [$@|@ dollars]"
    )
    total = s.step(
        x, "+", y, "[the total|the sum|the price for all]", "[they|all of them|the group] pay [$@|@ dollars][| in all]"
    )
    if s.left:
        off = s.number(1, min(40, total - 1))
        s.tell(f"As a group they pay ${off} less.")
        s.step(total, "-", off, "[the price for the group|the lower price]", "[they|all of them] pay [$@|@ dollars]")
    s.tell("How much do they [pay|spend][| in all| altogether]?")


def loan(s: Story) -> None:
    who, other = s.person(), s.person()
    weeks, each = s.number(2, 12), s.number(2, 30)
    paid, rest_weeks, rest_each = weeks * each, s.number(2, 10), s.number(2, 12)
    rest = rest_weeks * rest_each
    s.tell(
        f"{who} [borrows|has borrowed] ${paid + rest} from {other}[ and pays back| and returns|, paying "
        f"back] ${each} a week for {weeks} weeks."
    )
    s.step(weeks, "*", each, "[the money paid back|what is paid back]", f"[{who}|{who.he}] pays back [$@|@ dollars]")
    if not s.left:
        s.tell(f"How much [has {who.he} paid back|does {who.he} pay back] in that time?")
        return
    s.step(paid + rest, "-", paid, "[the rest|what is left to pay]", f"[{who}|{who.he}] still owes [$@|@ dollars]")
    if not s.left:
        s.tell(f"How much does {who.he} still owe?")
        return
    if s.left == 2:
        extra = s.number(2, 5) * rest_weeks
        s.tell(f"{other} then lends {who.him} another ${extra}.")
        rest = s.step(rest, "+", extra, "the new debt", f"[{who}|{who.he}] owes [$@|@ dollars][| now]")
    s.tell(f"{who.he} pays the rest in {rest_weeks} [equal parts|equal payments]. How much is one [part|payment]?")
    s.step(rest, "/", rest_weeks, "one payment", f"[{who} pays|each payment is|one payment is] [$@|@ dollars]")


def pooling(s: Story) -> None:
    a, b = s.person(), s.person()
    x, y = s.number(5, 60), s.number(5, 60)
    s.tell(f"{a} has ${x} and {b} has ${y}. [They|The two] put their money together[| for a present].")
    total = s.step(
        x,
        "+",
        y,
        "[the money together|the sum|the total]",
        f"[they|{a} and {b}|the two] have [$@|@ dollars][| together]",
    )
    while s.left:
        k, c = s.divisor(total), s.number(2, 60)
        kind = s.pick(("lose", "gain", "part", "times"))
        if kind == "part" and k:
            s.tell(f"They [use|spend] only 1/{k} of [the money|it].")
            total = s.step(total, "/", k, f"1/{k} of the money", "[they use|they spend|this part is] [$@|@ dollars]")
        elif kind == "times" and total <= 300:
            k = s.pick((2, 3))
            s.tell(
                f"[Their parents|Their teachers|Their friends] {'double' if k == 2 else 'triple'} [this|"
                "this amount|the money]."
            )
            total = s.step(total, "*", k, "[the new amount|the money then]", "[they|both|the two] have [$@|@ dollars]")
        elif kind == "lose" and total > c:
            s.tell(f"They spend ${c} on [a card|a cake|a book|flowers].")
            total = s.step(
                total, "-", c, "[the money left|what is left]", "[they|both|the two] have [$@|@ dollars] left"
            )
        else:
            d = s.person()
            s.tell(f"{d} adds ${c}.")
            total = s.step(
                total, "+", c, f"the money with that of {d}", "[they|all of them] have [$@|@ dollars][| now]"
            )
    s.tell("How much money [do they have|is that][| in the end| then]?")


STORIES = (shopping, saving, wages, tickets, loan, pooling)
