"""Story skeletons that compare or count: people, their ages and points, seats, animals."""

from benchmarks.small_model.wording import Story


def compare(s: Story) -> None:
    a, b, c, things = s.person(), s.person(), s.person(), s.things()
    x, d = s.number(12, 60), s.number(2, 30)
    more = s.random.random() < 0.5 or d >= x
    s.tell(
        f"{a} has {x} {things}. {b} has {d} {'more' if more else 'fewer'} {things} than {a}."
        if s.random.random() < 0.6
        else f"{b} has {d} {'more' if more else 'fewer'} {things} than {a}, who has {x}."
    )
    y = s.step(
        x, "+" if more else "-", d, f"[the number of {things} {b} has|the {things} of {b}]", f"{b} has @ {things}"
    )
    if not s.left:
        s.tell(f"How many {things} does {b} have?")
        return
    if s.left == 1:
        s.tell(f"How many {things} do [{a} and {b}|they|the two of them] have [together|in all|in total]?")
        s.step(
            x,
            "+",
            y,
            f"[the total|the sum|the number of {things} together]",
            f"[they|{a} and {b}|the two] have @ {things}[| together]",
        )
        return
    k = s.number(2, 5)
    s.tell(f"{c} has [{k} times as many {things} as {b}|{k} times the number of {things} that {b} has].")
    z = s.step(y, "*", k, f"[the number of {things} {c} has|the {things} of {c}]", f"{c} has @ {things}")
    if s.left == 1:
        first, second, value = s.pick(((b, c, y), (a, c, x)))
        s.tell(f"How many {things} do {first} and {second} have [together|in all|in total]?")
        clause = f"[they|{first} and {second}|the two] have @ {things}[| together]"
        s.step(value, "+", z, "[the total|the sum]", clause)
        return
    s.tell(f"How many {things} do [the three of them|{a}, {b} and {c}|all three] have [together|in all|in total]?")
    two = s.step(x, "+", y, f"the {things} of {a} and {b}", f"{a} and {b} have @ {things}[| together]")
    s.step(
        two, "+", z, "[the total|the number for all three]", f"[the three|all three|they] have @ {things}[| together]"
    )


def times_as_many(s: Story) -> None:
    a, b, things = s.person(), s.person(), s.things()
    x, k = s.number(3, 40), s.number(2, 8)
    how = {2: "twice", 3: "three times"}.get(k, f"{k} times")
    s.tell(f"{a} [has|owns|counts] {how} as many {things} as {b}. {b} [has|owns|counts] {x} {things}.")
    y = s.step(x, "*", k, f"[the number of {things} {a} has|the {things} of {a}]", f"{a} has @ {things}")
    if not s.left:
        s.tell(f"How many {things} does {a} have?")
    elif s.left == 1 and s.random.random() < 0.5:
        s.tell(f"How many more {things} does {a} have than {b}?")
        clause = f"{a} has @ more {things}[| than {b}]"
        s.step(y, "-", x, "[the difference|how many more that is]", clause)
    else:
        total = s.step(
            x, "+", y, f"[the total|the sum|the {things} of both]", f"[they|both|the two] have @ {things}[| together]"
        )
        s.tell(f"They put all of their {things} together in one [box|bag|pile].")
        while s.left:
            k, gone = s.divisor(total), s.number(2, max(2, total // 2))
            if k and s.left == 1 and s.random.random() < 0.7:
                s.tell(
                    f"Then they [split|divide] [all of|everything in] it into {k} equal parts. How many "
                    f"{things} are in [one|each] part?"
                )
                s.step(total, "/", k, "one part", f"[each part has|one part holds|there are] @ {things}")
                return
            s.tell(f"[Then|Later], {gone} {things} are [taken out|lost|given away].")
            total = s.step(
                total, "-", gone, f"[what is left|the {things} that remain]", f"[there are|they have] @ {things} left"
            )
        s.tell(f"How many {things} do they have [together|in all|now]?")


def ages(s: Story) -> None:
    a, b, c = s.person(), s.person(), s.person()
    x = s.number(4, 40)
    if s.random.random() < 0.5:
        d = s.number(2, 20)
        older = d >= x or s.random.random() < 0.6
        s.tell(f"{a} is {x} years old. {b} is {d} years {'older' if older else 'younger'} than {a}.")
        y = s.step(x, "+" if older else "-", d, f"the age of {b}", f"{b} is @ years old")
    else:
        k = s.number(2, 4)
        how = {2: "twice", 3: "three times", 4: "four times"}[k]
        x = s.number(3, 20)
        s.tell(f"[{a} is {x} years old. {b} is {how} as old[| as {a}]|{b} is {how} as old as {a}, who is {x}].")
        y = s.step(x, "*", k, f"the age of {b}", f"{b} is @ years old")
    if not s.left:
        s.tell(f"How old is {b}?")
        return
    if s.left == 3 or (s.left == 2 and s.random.random() < 0.5):
        d = s.number(1, 20)
        older = d >= y or s.random.random() < 0.5
        s.tell(f"{c} is {d} years {'older' if older else 'younger'} than {b}.")
        z = s.step(y, "+" if older else "-", d, f"the age of {c}", f"{c} is @ years old")
        if s.left == 2:
            s.tell("What is the sum of [their three ages|all three ages]?")
            two = s.step(x, "+", y, f"the ages of {a} and {b}", f"{a} and {b} are @ years old[| together]")
            s.step(two, "+", z, "[the sum|the sum of the ages]", "[all three|the three] are @ years old[| together]")
            return
        first, value = s.pick(((b, y), (a, x)))
        s.tell(f"[How old are {first} and {c} together|What is the sum of the ages of {first} and {c}]?")
        s.step(value, "+", z, "[the sum|the sum of the ages]", f"[they|{first} and {c}] are @ years old[| together]")
        return
    if s.left == 2:
        total = s.step(x, "+", y, "[the sum|the sum of the ages]", "[they|both|the two] are @ years old together")
        t = s.number(2, 30)
        s.tell(
            f"[{c} is {t} years older than both together|{c}'s age is {t} more than the sum of their "
            f"ages]. How old is {c}?"
        )
        s.step(total, "+", t, f"the age of {c}", f"{c} is @ years old")
        return
    if s.random.random() < 0.5:
        t = s.number(2, 30)
        s.tell(f"How old will {b} be in {t} years?")
        s.step(y, "+", t, f"the age of {b} then", f"{b} will be @ years old")
    else:
        s.tell("[How old are they together|What is the sum of their ages]?")
        s.step(x, "+", y, "[the sum|the sum of the ages]", "[they|both|the two] are @ years old together")


def points(s: Story) -> None:
    a, b = s.person(), s.person()
    game = s.pick(("a game", "basketball", "a quiz", "a card game", "darts"))
    n, each = s.number(2, 20), s.pick((2, 3, 5, 10))
    s.tell(f"In {game}, {a} [scores|wins|gets] {n} times, {each} points each time.")
    total = s.step(n, "*", each, f"the points of {a}", f"{a} has @ points")
    if s.left == 3 or (s.left == 1 and s.random.random() < 0.5):
        bonus = s.number(2, 40)
        s.tell(f"{a} also [gets a bonus of {bonus} points|gets {bonus} extra points].")
        total = s.step(
            total, "+", bonus, f"[the points with the bonus|the score of {a}]", f"{a} [reaches|has|gets] @ points"
        )
    if not s.left:
        s.tell(f"How many points does {a} [have|get]?")
        return
    d = s.number(1, min(total - 1, 40))
    s.tell(f"{b} has {d} points fewer[| than {a}].")
    other = s.step(total, "-", d, f"the points of {b}", f"{b} has @ points")
    if s.left:
        s.tell("How many points do they have [together|in all]?")
        s.step(total, "+", other, "[the sum|the total]", f"[together they|{a} and {b}|they] have @ points")
    else:
        s.tell(f"How many points does {b} have?")


def gathering(s: Story) -> None:
    who = s.person()
    things = s.pick(("fish", "crabs", "photos of birds", "mushrooms", "berries", "nuts", "bottles", "cans", "letters"))
    verb = s.pick(("collects", "finds", "gets", "gathers"))
    x = s.number(4, 40)
    days = ("Monday", "Tuesday", "Wednesday") if s.random.random() < 0.5 else ("Friday", "Saturday", "Sunday")
    s.tell(f"[On {days[0]}, {who} {verb} {x} {things}|{who} {verb} {x} {things} on {days[0]}].")
    values = [x]
    for day in days[1 : 1 + max(1, s.left // 2)]:
        last = values[-1]
        k, d = s.pick((2, 3, 4)), s.number(1, 20)
        label, clause = f"[the number for {day}|{day}]", f"[{who}|{who.he}] {verb} @ {things} on {day}"
        if s.random.random() < 0.4:
            how = {2: "twice", 3: "three times", 4: "four times"}[k]
            s.tell(f"On {day}, {who.he} {verb} {how} as many[| as the day before].")
            values.append(s.step(last, "*", k, label, clause))
        else:
            more = d >= last or s.random.random() < 0.5
            s.tell(
                f"On {day}, {who.he} {verb} {d} {'more' if more else 'fewer'}[ than the day before| "
                "than on the day before]."
            )
            values.append(s.step(last, "+" if more else "-", d, label, clause))
    if not s.left:
        s.tell(f"How many {things} does {who} [get|have] on {days[1]}?")
        return
    total = values[0]
    for value in values[1:]:
        total = s.step(
            total, "+", value, "[the total|the sum|all days together]", f"[{who}|{who.he}] has @ {things}[| in all]"
        )
    if s.left:
        b = s.number(1, min(total - 1, 60))
        s.tell(f"{who.he} gives {b} of them away.")
        s.step(total, "-", b, "[what is left|the rest]", f"[{who} has|there are] @ {things} left")
        s.tell(f"How many {things} does {who} have [left|in the end]?")
    else:
        s.tell(f"How many {things} does {who} [get|have] [in all|altogether|in total]?")


def school(s: Story) -> None:
    boys, girls = s.number(8, 40), s.number(8, 40)
    place = s.pick(("school trip", "camp", "club", "choir", "party", "course"))
    s.tell(f"[{boys} boys and {girls} girls join a {place}|There are {boys} boys and {girls} girls [in|at] a {place}].")
    total = s.step(boys, "+", girls, "[the number of children|all the children]", "[there are|we count] @ children")
    if s.left > 1 or (s.left and not s.divisor(total)):
        b = s.number(1, min(total - 2, 20))
        s.tell(f"{b} of them [are ill|go home|do not come|leave early].")
        total = s.step(total, "-", b, "the children who stay", "[there are|that leaves] @ children[| left]")
    k = s.divisor(total)
    if s.left and not k:
        b = s.number(2, 20)
        s.tell(f"{b} [adults|teachers|parents] are with them.")
        total = s.step(total, "+", b, "[the people in all|everybody]", "[there are|we count] @ people")
        k = s.divisor(total)
    if s.left and k:
        s.tell(f"They [form|make] {k} equal groups.")
        total = s.step(
            total, "/", k, "[the size of a group|one group]", "[each group has|there are] @ people[| in each group]"
        )
        if s.left:
            price = s.number(2, 12)
            s.tell(f"Each person pays [${price}|{price} dollars]. How much does one group pay?")
            s.step(
                total,
                "*",
                price,
                "[the price for a group|the cost of one group]",
                "[one group|each group|a group] pays [$@|@ dollars]",
            )
        else:
            s.tell("How many people are in [each|one] group?")
        return
    if s.left:
        b = s.number(2, 20)
        s.tell(f"Then {b} more people arrive.")
        s.step(total, "+", b, "the new total", "[there are|we count] @ people[| now]")
    s.tell(f"How many people are [at|on|in] the {place}?" if total != boys + girls else "How many children are there?")


def passengers(s: Story) -> None:
    vehicle = s.pick(("bus", "train", "tram", "boat", "ferry"))
    total = s.number(10, 60)
    s.tell(
        f"[A {vehicle} leaves with {total} people|There are {total} people on a {vehicle}|A {vehicle} "
        f"carries {total} passengers]."
    )
    stop = 0
    while s.left:
        stop += 1
        where = f"[At stop {stop}|At the {('first', 'second', 'third', 'fourth')[stop - 1]} stop]"
        if s.random.random() < 0.5:
            b = s.number(2, 30)
            s.tell(f"{where}, {b} [more people|people|passengers] [get on|board|climb on].")
            label, operation = f"the people after stop {stop}", "+"
        else:
            b = s.number(1, total - 1)
            s.tell(f"{where}, {b} [people|passengers|of them] [get off|leave|step off].")
            label, operation = f"the people after stop {stop}", "-"
        clause = f"[there are|the {vehicle} has|it carries] @ people[| on board]"
        total = s.step(total, operation, b, label, clause)
    s.tell(f"How many people are on the {vehicle} [now|after that|at the end]?")


def seats(s: Story) -> None:
    rows, size = s.number(3, 12), s.number(4, 25)
    place = s.pick(("theater", "cinema", "classroom", "hall", "train", "stadium", "church", "bus"))
    s.tell(f"A {place} has {rows} rows [of {size} seats|with {size} seats in each row|with {size} seats each].")
    total = s.step(
        rows, "*", size, "[the number of seats|the seats in all]", f"[there are|the {place} has] @ seats[| in all]"
    )
    if not s.left:
        s.tell(f"How many seats [are there|does the {place} have]?")
        return
    taken = s.number(2, total - 2)
    if s.left == 1:
        s.tell(
            f"[{taken} seats are taken|{taken} people sit down|{taken} of the seats are full]. How many "
            "seats are [empty|free|left]?"
        )
        s.step(total, "-", taken, "the [empty|free] seats", "[there are|that leaves] @ seats [empty|free]")
        return
    adults = s.number(1, taken - 1)
    s.tell(f"{adults} adults and {taken - adults} children [sit down|come in|take a seat].")
    s.step(
        adults,
        "+",
        taken - adults,
        "[the number of people|the people in all]",
        "[there are|we count] @ people[| in all]",
    )
    free = s.step(total, "-", taken, "the [empty|free] seats", "[there are|that leaves] @ seats [empty|free]")
    if s.left:
        more = s.number(1, 30)
        s.tell(f"Then {more} [folding|extra|spare] chairs are brought in.")
        s.step(free, "+", more, "the places that are free", "[there are|they have] @ places free")
        s.tell("How many free places are there [now|in the end]?")
    else:
        s.tell("How many seats are [empty|free|left]?")


def animals(s: Story) -> None:
    who = s.person()
    four, two = s.pick(("cows", "horses", "goats", "sheep", "pigs")), s.pick(("chickens", "ducks", "geese", "hens"))
    x, y = s.number(2, 40), s.number(2, 60)
    if s.left == 1:
        animal, legs, n = s.pick(((four, 4, x), (two, 2, y)))
        s.tell(f"{who} has {n} {animal}. [How many legs do they have|How many legs do the {animal} have in all]?")
        s.step(n, "*", legs, f"[the number of legs|the legs of the {animal}]", f"[they|the {animal}] have @ legs")
        return
    if s.left == 4:
        k = s.number(2, 5)
        x = s.number(2, 12)
        y = x * k
        s.tell(f"{who} keeps {x} {four} and {k} times as many {two}[| on a farm].")
        s.step(x, "*", k, f"the number of {two}", f"[there are|{who} has] @ {two}")
    else:
        s.tell(f"{who} [keeps|has|raises] {x} {four} and {y} {two}[| on a farm].")
    if s.left == 2:
        k = s.number(2, 12)
        total = s.step(x, "+", y, "[the number of animals|the animals in all]", f"[there are|{who} has] @ animals")
        s.tell(f"{who.he} buys {k} [dogs|cats|rabbits] too. How many animals does {who.he} have?")
        s.step(total, "+", k, "[the new total|all animals]", f"[there are|{who} has] @ animals[| now]")
        return
    s.tell("How many legs do the animals have [altogether|in all|in total]?")
    a = s.step(x, "*", 4, f"[the legs of the {four}|the number of legs of {four}]", f"the {four} have @ legs")
    b = s.step(y, "*", 2, f"[the legs of the {two}|the number of legs of {two}]", f"the {two} have @ legs")
    s.step(a, "+", b, "[the total|all the legs]", "[they have|there are|the animals have] @ legs[| in all]")


def building(s: Story) -> None:
    floors, rooms = s.number(2, 12), s.number(2, 12)
    what, place = s.pick((("rooms", "hotel"), ("flats", "tower"), ("offices", "building"), ("rooms", "school")))
    s.tell(
        f"A {place} has {floors} floors [with {rooms} {what} on each|and {rooms} {what} on each floor|"
        f"of {rooms} {what}]."
    )
    total = s.step(floors, "*", rooms, f"the number of {what}", f"[the {place} has|there are] @ {what}")
    if s.left == 3 or (s.left and s.random.random() < 0.4):
        b = s.number(1, total - 1)
        s.tell(f"{b} of the {what} are [empty|closed].")
        total = s.step(total, "-", b, f"the {what} in use", f"[there are|that leaves] @ {what}[| in use]")
    if s.left and total < 140:
        k = s.number(2, 6)
        thing = s.pick(("windows", "beds", "lamps", "chairs", "desks"))
        s.tell(
            f"Each [of the other {what}|one of the {what} in use] has {k} {thing}."
            if s.steps - s.left > 1
            else f"Each of the {what} has {k} {thing}."
        )
        total = s.step(total, "*", k, f"the number of {thing}", f"[there are|they have] @ {thing}")
        what = thing
    while s.left:
        b = s.number(1, min(60, total))
        s.tell(f"A worker has [checked|cleaned|repaired] {b} of the {what}.")
        total = s.step(total, "-", b, f"the {what} that remain", f"[there are|that leaves] @ {what}[| left]")
    s.tell(f"How many {what} are [there|left][| in the end]?")


STORIES = (compare, times_as_many, ages, points, gathering, school, passengers, seats, animals, building)
