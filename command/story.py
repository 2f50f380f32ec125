"""The built-in text: a year in a harbour town by a seeded generator, with a letter to find in it.

Same seed, same text, on any machine.  Read before: `generate.py`.
"""

import random


def listed(text: str, separator=",") -> list[str]:
    """The items of a text, line breaks inside them taken as spaces."""
    return [" ".join(item.split()) for item in text.split(separator)]


NAMES = listed("""
Alma Thorne, Bastian Crewe, Cora Whitlock, Dunstan Pike, Edith Marlow, Fergus Hale, Greta Sorrel, Hector
Vane, Ida Penrose, Jonas Birch, Kitty Larkin, Lionel Frost, Mabel Quill, Nathan Oakes, Olive Trask, Piers
Rowan, Rosa Fenwick, Silas Wren, Tilda Marsh, Walter Boone
""")
TRADES = listed("""
the baker, the net maker, the ferry pilot, the schoolteacher, the harbour clerk, the carpenter, the doctor,
the innkeeper, the beekeeper, the postmaster, the blacksmith, the bookseller
""")
PLACES = listed("""
the fish market, the old customs house, the chapel on the hill, the rope walk, the long pier, the mill pond,
the lower square, the town library, the boatyard, the salt sheds, the east gate, the orchard behind the
school
""")
GOODS = listed("""
lamp oil, apples, barrels of herring, wool blankets, window glass, seed potatoes, copper pans, writing
paper, oak planks, candles
""")
SHIPS = listed("""
the Grey Heron, the Patience, the Northern Star, the Two Sisters, the Merry Widow, the Kingfisher, the
Evening Tide
""")
WEATHER = listed("""
a hard wind from the north, a warm and windless morning, fog so thick that the gulls walked, a week of
steady rain, the first frost of the season, a bright sky after the storm, a low grey sky that never broke
""")
MONTHS = "January February March April May June July August September October November December".split()
NUMBERS = "three four five six seven nine eleven twelve fifteen twenty".split()

SCENES = listed(
    """
{month} began with {weather}. {a}, who had promised to mend the roof at {place}, sent word that the ladder
was broken and that nothing could be done before the week was out. {b} did not believe it. By noon {number}
people had gathered to look at the ladder, and every one of them had a different opinion about it. In the
end {trade} brought a new one and the work was finished before dark.

In the second week of {month} {ship} came in with {goods} and {goods2}. The price was fair, but {a} argued
about it for {number} hours all the same. {b} wrote down every word in the harbour book. When the tide
turned the captain laughed, took off his hat, and gave the last crate away for nothing. It stood near
{place} until someone needed the wood.

There was a quarrel at {place} that {month}. {a} had planted a row of beans on land that {b} had always used
for drying nets. Neither would give way, so {trade} was asked to judge. The answer took {number} days and
pleased nobody. The beans could stay until they were picked, and after that the nets would return, and both
of them would pay for a new fence.

Late in {month}, with {weather}, the children of the school were sent to {place} to draw what they saw. {a}
drew {number} boats and a dog. {b} drew only the water, and filled the whole page with it. The teacher hung
both pictures beside the door. People who came to buy {goods} stopped to look at them, and more than one
asked whether they were for sale.

{a} opened a small shop beside {place} in {month}. It sold {goods} on one side and {goods2} on the other. On
the first day {number} customers came, and {b} was the last of them. "You will need a bigger sign," {b}
said, and offered to paint it. The sign was green, with white letters, and it could be read from the deck of
{ship} when the air was clear.

The bridge near {place} was closed for {number} days in {month}, after {weather}. {trade_cap} had noticed a
crack in the middle arch. {a} carried travellers across in a flat boat and would take no money for it. {b}
sat on the far bank with a kettle and gave each of them a cup of tea. When the bridge was open again, some
people said that they missed the boat.

That {month} the town counted its winter stores. There were {number} sacks of flour at {place}, and rather
less of everything else. {a} proposed to share out {goods} by household. {b} wanted to wait for {ship},
which was expected any day. They voted, and the vote was even, and then {trade} arrived late and decided it.
Nobody went hungry before the spring.
""",
    "\n\n",
)

(LETTER,) = listed(
    """
On the last evening of the month {reader} read a letter aloud in the lower square. The letter said: "My dear
friends, I am writing from a small island where the {metal} mines used to be. The house has {rooms} rooms
and a {colour} door, and the garden runs down to the sea on the {side} side. Every morning an old fisherman
brings me bread and tells me about his daughter in Lisbon. I have learned to play the fiddle, although the
goats do not enjoy it. In the {week} week of spring I shall sail home with two trunks of books for the
school. Please tell {friend} that I have not forgotten the debt." Nobody in the square said a word until the
bells began.
""",
    "\n\n",
)
QUESTION = "What did the letter that was read aloud in the lower square say?"


def story(seed: int = 0, paragraphs: int = 52, depth: float = 0.9) -> str:
    """The text: 52 paragraphs are about 5,000 tokens; the letter stands at the fraction `depth` of them."""
    rng = random.Random(seed)
    pick = lambda items: items[int(rng.random() * len(items))]  # stable over Python versions
    order = []
    text = ["A Year in Saltmere"]
    for i in range(paragraphs):
        if i == int(depth * paragraphs):
            text.append(letter(pick))
        order = order or sorted(SCENES, key=lambda scene: rng.random())
        a, goods, trade = pick(NAMES), pick(GOODS), pick(TRADES)
        b, goods2 = pick([n for n in NAMES if n != a]), pick([g for g in GOODS if g != goods])
        facts = dict(place=pick(PLACES), ship=pick(SHIPS), weather=pick(WEATHER), number=pick(NUMBERS))
        facts |= dict(a=a, b=b, goods=goods, goods2=goods2, trade=trade, trade_cap=trade.capitalize())
        text.append(order.pop().format(month=MONTHS[i * 12 // paragraphs], **facts))
    return "\n\n".join(text)


def letter(pick) -> str:
    reader = pick(NAMES)
    return LETTER.format(
        reader=reader,
        friend=pick([name for name in NAMES if name != reader]),
        metal=pick(("tin", "iron", "silver", "copper")),
        week=pick(("second", "third", "fourth", "fifth")),
        side=pick(("north", "south", "east", "west")),
        rooms=pick(("two", "three", "four", "six")),
        colour=pick(("red", "blue", "green", "yellow")),
    )
