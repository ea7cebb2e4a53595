"""Story skeletons about time, distance and other measures."""

from benchmarks.small_model.wording import Story


def trip(s: Story) -> None:
    who, hours, speed = s.person(), s.number(2, 9), s.number(3, 60)
    how, unit = s.pick((("drives", "miles"), ("rides", "kilometers"), ("travels", "miles"), ("cycles", "kilometers")))
    s.tell(f"{who} {how} for {hours} hours at {speed} {unit} [per|an] hour.")
    total = s.step(hours, "*", speed, "[the distance|the way so far]", f"[{who}|{who.he}] {how} @ {unit}")
    if s.left == 1 or (s.left == 2 and s.random.random() < 0.5):
        b = s.number(3, 60)
        s.tell(f"[Then|After a break], {who.he} {how} {b} {unit} more.")
        total = s.step(
            total, "+", b, "[the whole way|the total distance]", f"[{who}|{who.he}] {how} @ {unit}[| in all]"
        )
    elif s.left >= 2:
        h, v = s.number(2, 6), s.number(3, 40)
        s.tell(f"[Then|After a break], {who.he} {how} for {h} hours at {v} {unit} [per|an] hour.")
        second = s.step(
            h, "*", v, "[the second distance|the second part]", f"[then {who}|then {who.he}] {how} @ {unit}"
        )
        total = s.step(
            total, "+", second, "[the whole way|the total distance]", f"[{who}|{who.he}] {how} @ {unit}[| in all]"
        )
    if s.left:
        more = s.number(2, 60)
        s.tell(f"The whole way is {total + more} {unit}[| long]. How many {unit} are [left|still to go]?")
        s.step(
            total + more,
            "-",
            total,
            "[the rest of the way|the distance left]",
            f"[there are|{who} has] @ {unit} [left|to go]",
        )
    else:
        s.tell(f"[How far does {who} go|How many {unit} does {who} go][| in all| altogether]?")


def laps(s: Story) -> None:
    who, n, each = s.person(), s.number(2, 12), s.number(2, 40)
    verb, unit = s.pick((("runs", "meters"), ("swims", "meters"), ("walks", "blocks"), ("runs", "yards")))
    s.tell(f"{who} {verb} {n} laps of {each} {unit} [each|a lap].")
    total = s.step(n, "*", each, "[the distance|the whole way]", f"[{who}|{who.he}] {verb} @ {unit}")
    if not s.left:
        s.tell(f"How many {unit} does {who.he} {verb[:-1] if verb != 'swims' else 'swim'}?")
        return
    other = s.person()
    d = s.number(1, min(60, total - 1))
    more = s.random.random() < 0.5
    s.tell(f"{other} {verb} {d} {unit} {'more' if more else 'less'}[| than {who}].")
    y = s.step(total, "+" if more else "-", d, f"the way of {other}", f"{other} {verb} @ {unit}")
    if not s.left:
        s.tell(f"How many {unit} is that for {other}?")
        return
    both = s.step(total, "+", y, "[the sum|the total]", f"[they|both|the two] have @ {unit}[| together]")
    if s.left:
        goal = s.number(1, 60)
        s.tell(f"Their goal is {both + goal} {unit} together. How many {unit} are missing?")
        s.step(both + goal, "-", both, "[what is missing|the rest]", f"[they need|there are] @ {unit} more")
    else:
        s.tell(f"How many {unit} do they have [together|in all]?")


def minutes(s: Story) -> None:
    who, n, each = s.person(), s.number(2, 12), s.number(3, 30)
    task = s.pick(("cards", "letters", "math problems", "pages", "drawings", "models", "windows", "chairs", "songs"))
    s.tell(f"{who} needs {each} minutes for [each of|every one of] {n} {task}.")
    total = s.step(n, "*", each, f"the time for the {task}", f"[{who} needs|the {task} take|it takes] @ minutes")
    if s.left > 1 or (s.left and s.random.random() < 0.5):
        b = s.number(2, 45)
        s.tell(f"{who.he} also takes a break of {b} minutes.")
        total = s.step(
            total, "+", b, "[the time with the break|the whole time]", f"[{who} needs|it takes] @ minutes[| in all]"
        )
    if s.left > 1:
        b = s.number(2, 45)
        s.tell(f"Cleaning up takes {b} minutes more.")
        total = s.step(
            total, "+", b, "[the time with cleaning|the whole time]", f"[{who} needs|it takes] @ minutes[| in all]"
        )
    if s.left:
        free = s.number(1, 60)
        s.tell(f"{who.he} has {total + free} minutes. How many minutes are left[| in the end]?")
        s.step(total + free, "-", total, "[the time left|what is left]", f"[{who} has|there are] @ minutes left")
    else:
        s.tell(f"How [many minutes does {who} need|long does it take][| in all| altogether]?")


def reading(s: Story) -> None:
    who, days, each = s.person(), s.number(2, 12), s.number(4, 40)
    s.tell(f"{who} reads {each} pages [a|each|every] day for {days} days.")
    total = s.step(days, "*", each, "[the pages read|the number of pages]", f"[{who}|{who.he}] reads @ pages")
    if not s.left:
        s.tell(f"How many pages does {who} read?")
        return
    if s.left == 3:
        b = s.number(2, 40)
        s.tell(f"On the next day {who.he} reads {b} pages.")
        total = s.step(total, "+", b, "[the pages so far|the pages read by then]", f"[{who}|{who.he}] has read @ pages")
    k, more = s.number(2, 10), s.number(2, 12)
    rest = k * more
    s.tell(f"The book has {total + rest} pages.")
    s.step(total + rest, "-", total, "[the pages left|the rest of the book]", f"[there are|{who} has] @ pages left")
    if s.left:
        s.tell(f"{who.he} wants to [finish|read] the rest in {k} days. How many pages [a|per] day is that?")
        s.step(
            rest,
            "/",
            k,
            "[the pages for a day|the pages per day]",
            f"[{who}|{who.he}] [must read|reads|needs] @ pages a day",
        )
    else:
        s.tell("How many pages are left?")


def garden(s: Story) -> None:
    who, length, width = s.person(), s.number(3, 40), s.number(2, 12)
    place, unit = s.pick(("garden", "field", "room", "yard", "park")), s.pick(("meters", "feet", "yards"))
    if s.left == 1 or s.random.random() < 0.4:
        s.tell(f"{who}'s {place} is {length} {unit} long and {width} {unit} wide.")
        total = s.step(length, "*", width, f"the area of the {place}", f"the {place} has @ square {unit}")
        if not s.left:
            s.tell(f"[What is the area of the {place}|How many square {unit} is that]?")
            return
        b = s.number(1, min(total - 1, 60))
        s.tell(f"[A pond|A path|A shed] takes up {b} square {unit}.")
        total = s.step(
            total, "-", b, "[the area left|the free area]", f"[there are|that leaves] @ square {unit}[| left]"
        )
        if s.left and total <= 160:
            k = s.number(2, 6)
            s.tell(f"[Each|Every] square {unit[:-1] if unit != 'feet' else 'foot'} of the rest [needs|gets] {k} seeds.")
            total = s.step(total, "*", k, "the number of seeds", f"[{who} needs|there are] @ seeds")
            unit = "seeds"
        else:
            unit = f"square {unit}"
        while s.left:
            b = s.number(2, 60)
            s.tell(f"{who} then adds {b} more {unit}.")
            total = s.step(total, "+", b, "the new total", f"[{who} has|there are] @ {unit}")
        s.tell(f"How many {unit} [are there|does {who} have][| in the end]?")
        return
    s.tell(f"{who} builds a fence around a {place} that is {length} {unit} long and {width} {unit} wide.")
    half = s.step(
        length,
        "+",
        width,
        "[the length and the width together|one long and one short side]",
        f"[two sides are|one long and one short side are] @ {unit}",
    )
    total = s.step(
        half,
        "*",
        2,
        "[the whole fence|the way around]",
        f"[the fence is|all four sides are|{who} needs] @ {unit}[| long]",
    )
    if not s.left:
        s.tell(f"How [many {unit} of fence does {who} need|long is the fence]?")
        return
    if s.left == 2:
        gate = s.number(1, 5)
        s.tell(f"A gate of {gate} {unit} needs no fence.")
        total = s.step(total, "-", gate, "the fence without the gate", f"[the fence is|{who} needs] @ {unit}")
    price = s.number(2, 9)
    s.tell(
        f"[Each|Every] {unit[:-1] if unit != 'feet' else 'foot'} of fence costs ${price}. How much does the fence cost?"
    )
    s.step(total, "*", price, "the [cost|price] of the fence", f"[the fence costs|{who} pays] [$@|@ dollars]")


def harvest(s: Story) -> None:
    who, rows, size = s.person(), s.number(2, 12), s.number(3, 20)
    plants, fruit = s.pick(
        (("trees", "apples"), ("bushes", "berries"), ("plants", "tomatoes"), ("vines", "grapes"), ("plants", "peppers"))
    )
    s.tell(
        f"{who} has {rows} rows of {plants}[ with {size} in each row|, {size} {plants} a row|. Each row "
        f"has {size} {plants}]."
    )
    total = s.step(rows, "*", size, f"the number of {plants}", f"[{who}|{who.he}] has @ {plants}")
    if s.left == 2 or s.left == 3:
        b = s.number(1, min(40, total - 2))
        s.tell(f"{b} of them [dry out|die|are cut down].")
        total = s.step(total, "-", b, f"the {plants} left", f"[{who} has|there are] @ {plants} left")
    if s.left and total <= 80:
        each = s.number(2, 12)
        s.tell(f"Each of [the|those] {plants} [gives|bears] {each} {fruit}.")
        total = s.step(total, "*", each, f"the number of {fruit}", f"[{who} picks|there are|{who.he} gets] @ {fruit}")
        plants = fruit
    while s.left:
        b, k = s.number(1, min(60, total - 1)), s.divisor(total)
        if k and s.random.random() < 0.6:
            s.tell(f"{who} divides the {plants} into {k} equal parts[| and keeps one].")
            total = s.step(total, "/", k, "one part", f"[one part is|each part has|there are] @ {plants}")
        else:
            s.tell(f"{who} [sells|gives away] {b} {plants}.")
            total = s.step(total, "-", b, f"the {plants} left", f"[{who}|{who.he}] has @ {plants} left")
    s.tell(f"How many {plants} [does {who} have|are there][| in the end| then]?")


def recipe(s: Story) -> None:
    who, n, cups = s.person(), s.number(2, 12), s.number(2, 12)
    stuff = s.pick(("flour", "sugar", "milk", "rice", "oats", "juice"))
    unit = s.pick(("cups", "spoons", "ounces", "grams"))
    dish = s.pick(("cakes", "pies", "soups", "loaves", "puddings"))
    s.tell(
        f"[{who} needs {cups} {unit} of {stuff} for one of {n} {dish}|{who} makes {n} {dish}, and each "
        f"takes {cups} {unit} of {stuff}]."
    )
    total = s.step(n, "*", cups, f"the {stuff} for the {dish}", f"[{who} needs|the {dish} take] @ {unit}[| of {stuff}]")
    if s.left > 2 or (s.left and s.random.random() < 0.5):
        b = s.number(1, 20)
        s.tell(f"{who.he} also needs {b} {unit} for [a sauce|the top|a drink].")
        total = s.step(total, "+", b, f"all the {stuff}", f"[{who}|{who.he}] needs @ {unit}[| in all]")
    if s.left:
        have = s.number(1, total - 1)
        s.tell(f"{who.he} has [only|just] {have} {unit}[| at home].")
        total = s.step(
            total,
            "-",
            have,
            "[what is missing|the rest]",
            f"[{who}|{who.he}] [must buy|still needs|is missing] @ {unit}",
        )
        if s.left:
            price = s.number(2, 9)
            s.tell(f"One {unit[:-1]} costs {price} cents. How [many cents|much] does the rest cost?")
            s.step(total, "*", price, "the price of the rest", f"[{who} pays|the rest costs|it costs] @ cents")
            return
    s.tell(
        f"How many {unit} of {stuff} does {who.he} [still need|have to buy]?"
        if s.steps > 1 and "has" in s.told[-1]
        else f"How many {unit} [of {stuff} |]does {who} need?"
    )


def tank(s: Story) -> None:
    rate, time = s.number(2, 30), s.number(2, 12)
    what = s.pick(("tank", "pool", "barrel", "tub", "pond"))
    s.tell(
        f"A [pump|pipe|hose] fills a {what} with {rate} liters of water [a|per|every] minute. It runs "
        f"for {time} minutes."
    )
    total = s.step(
        rate, "*", time, f"the water in the {what}", f"[the {what} has|there are|it holds] @ liters[| of water]"
    )
    while s.left:
        kind = s.pick(("lose", "lose", "gain", "part"))
        k = s.divisor(total)
        if kind == "part" and k:
            s.tell(
                f"[Then|Later], the water is [put|poured] equally into {k} [buckets|smaller tanks]. The "
                "first one is [looked at|used]."
            )
            total = s.step(total, "/", k, "the water in one of them", "[each|one of them|every one] has @ liters")
        elif kind == "lose" and total > 2:
            b = s.number(1, min(60, total - 1))
            s.tell(f"[Then|Later], {b} liters [leak out|are used|run out].")
            total = s.step(total, "-", b, "[the water left|what is left]", "[there are|that leaves] @ liters[| left]")
        else:
            b = s.number(2, 60)
            s.tell(f"[Then|Later], {b} liters [are added|of rain fall into it|more are poured in].")
            total = s.step(
                total, "+", b, "[the new amount|the water now]", f"[there are|the {what} has] @ liters[| now]"
            )
    s.tell(
        "How many liters of water are there [now|in the end|then]?"
        if s.steps > 1
        else f"How many liters are in the {what}?"
    )


def rope(s: Story) -> None:
    who, pieces, size = s.person(), s.number(2, 10), s.number(2, 30)
    stuff, unit = s.pick(
        (("rope", "meters"), ("ribbon", "inches"), ("wire", "feet"), ("wood", "inches"), ("string", "feet"))
    )
    used = pieces * size
    more = s.number(2, 60)
    if s.left == 1:
        s.tell(f"{who} cuts {used} {unit} of {stuff} into {pieces} equal pieces. How long is [one|each] piece?")
        s.step(used, "/", pieces, "the length of a piece", f"[each piece is|one piece is|a piece has] @ {unit}[| long]")
        return
    s.tell(f"{who} has {used + more} {unit} of {stuff} and cuts off {pieces} pieces of {size} {unit} each.")
    s.step(pieces, "*", size, f"the {stuff} cut off", f"[{who} cuts off|the pieces have|the pieces are] @ {unit}")
    left = s.step(used + more, "-", used, f"[the {stuff} left|what is left]", f"[there are|{who} has] @ {unit} left")
    while s.left:
        k, b = s.divisor(left), s.number(2, 40)
        if k and s.random.random() < 0.5:
            s.tell(f"[Then {who.he} cuts|{who.he} cuts] what is left into {k} equal parts and takes one.")
            left = s.step(left, "/", k, "one part", f"[each part is|one part is|a part has] @ {unit}[| long]")
        else:
            s.tell(f"[Then {who.he} gets|{who.he} gets] {b} {unit} more.")
            left = s.step(left, "+", b, f"[the {stuff} now|the new length]", f"[{who}|{who.he}] has @ {unit}")
    s.tell(f"How many {unit} does {who} have [left|now|in the end]?")


STORIES = (trip, laps, minutes, reading, garden, harvest, recipe, tank, rope)
