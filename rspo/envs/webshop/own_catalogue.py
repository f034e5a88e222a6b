"""A small catalogue of our own making, for a first start without any data: 200 products in 8 categories.

It is built the same way every time. Each kind of product comes in PRODUCTS_PER_KIND variants of invented makers that
share most of their words: which of them is meant shows in attributes, and those stand now in the title, now only on the
product's sub-pages. So a search for the kind alone finds several, and reading tells them apart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .catalogue import Product

PRODUCTS_PER_KIND = 5
_SEED = 20
_SHOWN_IN_TITLE = 2
_ATTRIBUTES = 4
_ASKED_FOR = 2


@dataclass(frozen=True)
class _Kind:
    """A kind of product: name (its plural is the query), attributes it may have, options, prices in dollars."""

    name: str
    plural: str
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    prices: tuple[int, int]


def _kind(name: str, plural: str, attributes: str, prices: tuple[int, int], **options: str) -> _Kind:
    """`attributes` and the values of `options` are separated by commas."""
    return _Kind(
        name,
        plural,
        _split(attributes),
        {option.replace("_", " "): _split(values) for option, values in options.items()},
        prices,
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


_COLOURS = "black, white, navy, green, red, yellow"
_SHOE_SIZES = "7, 8, 9, 10, 11"
_SIZES = "small, medium, large, x-large"

_KINDS: dict[tuple[str, str], tuple[_Kind, ...]] = {
    ("kitchen", "Home › Kitchen"): (
        _kind(
            "kettle", "kettles", "fast boiling, cordless base, keeps warm, quiet lid, easy clean, gooseneck spout",
            (25, 90), color=_COLOURS, capacity="1 liter, 1.7 liter",
        ),
        _kind(
            "frying pan", "frying pans", "nonstick coating, oven safe, induction ready, dishwasher safe, cool handle,"
            " cast iron", (18, 110), size="8 inch, 10 inch, 12 inch",
        ),
        _kind(
            "lunch box", "lunch boxes", "leak proof, bpa free, microwave safe, three compartments, freezer safe,"
            " snap lock", (9, 35), color=_COLOURS, capacity="600 ml, 900 ml",
        ),
        _kind(
            "coffee grinder", "coffee grinders", "ceramic burr, adjustable grind, hand powered, washable parts,"
            " compact body, low noise", (20, 150), color="black, white, red",
        ),
        _kind(
            "chef knife", "chef knives", "high carbon, full tang, hand forged, rust resistant, wooden handle,"
            " razor sharp", (15, 140), size="6 inch, 8 inch, 10 inch",
        ),
    ),
    ("garden", "Home › Garden"): (
        _kind(
            "garden hose", "garden hoses", "kink free, brass fittings, drinking water safe, self draining,"
            " uv resistant, extra light", (20, 95), length="25 feet, 50 feet, 100 feet", color="green, black",
        ),
        _kind(
            "planter", "planters", "drainage hole, frost proof, hand glazed, self watering, rail mounted, wide rim",
            (8, 60), size="6 inch, 9 inch, 12 inch", color="white, green, navy",
        ),
        _kind(
            "pruning shears", "pruning shears", "bypass blade, left handed, soft grip, safety catch, spare spring,"
            " sap groove", (12, 55), size="7 inch, 8 inch",
        ),
        _kind(
            "bird feeder", "bird feeders", "squirrel proof, window mounted, easy refill, rain roof, seed tray,"
            " recycled plastic", (10, 70), color="green, red, yellow",
        ),
        _kind(
            "solar lantern", "solar lanterns", "motion sensor, warm light, water resistant, dusk timer, hanging hook,"
            " long battery life", (14, 65), pack="pack of 1, pack of 2, pack of 4",
        ),
    ),
    ("clothing", "Clothing › Outdoor"): (
        _kind(
            "rain jacket", "rain jackets", "fully taped, two way zip, packs small, ventilated back, recycled fabric,"
            " reflective trim", (40, 180), color=_COLOURS, size=_SIZES,
        ),
        _kind(
            "wool sweater", "wool sweaters", "machine washable, crew neck, cable knit, elbow patches, itch free,"
            " ribbed cuffs", (35, 140), color=_COLOURS, size=_SIZES,
        ),
        _kind(
            "hiking pants", "hiking pants", "zip off legs, quick drying, insect repellent, knee vents, elastic waist,"
            " deep pockets", (30, 120), color="black, green, navy", size=_SIZES,
        ),
        _kind(
            "sun hat", "sun hats", "wide brim, chin strap, foldable crown, sweat band, floats on water, neck cape",
            (12, 50), color="white, green, yellow", size="medium, large",
        ),
        _kind(
            "winter gloves", "winter gloves", "touch screen tips, wind proof, fleece lined, wrist leash, grip palm,"
            " heated fingers", (14, 90), color="black, navy, red", size=_SIZES,
        ),
    ),
    ("shoes", "Clothing › Shoes"): (
        _kind(
            "running shoes", "running shoes", "cushioned heel, breathable mesh, wide toe box, carbon plate,"
            " removable insole, reflective laces", (45, 190), color=_COLOURS, size=_SHOE_SIZES,
        ),
        _kind(
            "leather boots", "leather boots", "resoleable welt, oil resistant, side zipper, steel toe, padded ankle,"
            " warm lining", (60, 240), color="black, green", size=_SHOE_SIZES,
        ),
        _kind(
            "sandals", "sandals", "arch support, quick release, vegan straps, toe guard, cork footbed, slip resistant",
            (20, 110), color="black, white, yellow", size=_SHOE_SIZES,
        ),
        _kind(
            "house slippers", "house slippers", "memory foam, closed heel, indoor outdoor sole, washable felt,"
            " sheepskin lined, non slip", (12, 70), color="navy, green, red", size=_SHOE_SIZES,
        ),
        _kind(
            "rain boots", "rain boots", "pull on loops, natural rubber, adjustable calf, fleece sock, flexible shaft,"
            " deep tread", (25, 120), color=_COLOURS, size="7, 8, 9, 10",
        ),
    ),
    ("electronics", "Electronics › Portable"): (
        _kind(
            "headphones", "headphones", "noise cancelling, foldable frame, detachable cable, built in microphone,"
            " replaceable pads, low latency", (30, 320), color="black, white, navy",
        ),
        _kind(
            "power bank", "power banks", "fast charging, airline approved, digital display, pass through power,"
            " wireless pad, drop proof", (15, 95), capacity="5000 mah, 10000 mah, 20000 mah", color="black, white",
        ),
        _kind(
            "desk lamp", "desk lamps", "dimmable light, flicker free, clamp mount, usb outlet, memory switch,"
            " swivel head", (18, 130), color="black, white, green",
        ),
        _kind(
            "keyboard", "keyboards", "hot swappable, silent keys, backlit legends, spill proof, split halves,"
            " programmable layers", (25, 220), layout="full, compact", color="black, white",
        ),
        _kind(
            "portable speaker", "portable speakers", "dust proof, stereo pairing, bass boost, shower safe,"
            " hands free calls, carry loop", (20, 160), color=_COLOURS,
        ),
    ),
    ("beauty", "Beauty › Care"): (
        _kind(
            "face cream", "face creams", "fragrance free, oil free, for sensitive skin, with sunscreen, vegan formula,"
            " fast absorbing", (8, 75), size="30 ml, 50 ml, 100 ml",
        ),
        _kind(
            "shampoo", "shampoos", "sulfate free, color safe, for dry hair, anti dandruff, tea tree, refill pouch",
            (6, 40), size="250 ml, 500 ml", scent="lemon, lavender, unscented",
        ),
        _kind(
            "lip balm", "lip balms", "beeswax free, tinted shine, cooling menthol, overnight repair, paper tube,"
            " shea butter", (3, 18), flavor="cherry, vanilla, mint", pack="pack of 1, pack of 3",
        ),
        _kind(
            "hair brush", "hair brushes", "boar bristle, detangling pins, vented back, travel mirror, bamboo handle,"
            " anti static", (7, 45), color="black, white, red", shape="round, paddle",
        ),
        _kind(
            "hand soap", "hand soaps", "triple milled, moisturizing oil, plastic free, antibacterial,"
            " exfoliating seeds, palm oil free", (4, 25), scent="lemon, lavender, unscented",
            pack="pack of 1, pack of 3, pack of 6",
        ),
    ),
    ("grocery", "Grocery › Pantry"): (
        _kind(
            "green tea", "green teas", "hand picked, caffeine free, single estate, biodegradable bags, shade grown,"
            " roasted rice", (5, 40), size="50 grams, 100 grams, 250 grams",
        ),
        _kind(
            "olive oil", "olive oils", "cold pressed, early harvest, unfiltered, single variety, dark bottle,"
            " peppery finish", (9, 60), size="250 ml, 500 ml, 1 liter",
        ),
        _kind(
            "granola", "granolas", "gluten free, no added sugar, high fiber, nut free, whole grain, high protein",
            (5, 25), flavor="honey, cocoa, apple", size="300 grams, 600 grams",
        ),
        _kind(
            "dark chocolate", "dark chocolates", "fair trade, soy free, stone ground, sea salt, dairy free,"
            " orange peel", (3, 30), cocoa="60 percent, 75 percent, 90 percent", pack="pack of 1, pack of 5",
        ),
        _kind(
            "pasta", "pastas", "bronze cut, egg free, high protein, slow dried, lentil based, quick cooking",
            (2, 20), shape="spaghetti, penne, fusilli", pack="pack of 1, pack of 6",
        ),
    ),
    ("toys", "Toys › Games"): (
        _kind(
            "board game", "board games", "for two players, cooperative play, short rounds, travel size, wooden pieces,"
            " solo mode", (12, 80), edition="first, second, family",
        ),
        _kind(
            "jigsaw puzzle", "jigsaw puzzles", "random cut, glow in the dark, no dust, poster included, thick pieces,"
            " matte print", (9, 45), pieces="500 pieces, 1000 pieces, 2000 pieces",
        ),
        _kind(
            "building blocks", "building blocks", "solid beech, water based paint, storage bag, magnetic core,"
            " alphabet print, rounded edges", (15, 95), pieces="40 pieces, 80 pieces, 120 pieces",
        ),
        _kind(
            "kite", "kites", "ripstop nylon, beginner friendly, dual line, long tail, pocket size, strong wind",
            (10, 70), color="red, yellow, green",
        ),
        _kind(
            "plush bear", "plush bears", "organic cotton, embroidered eyes, machine washable, weighted paws,"
            " removable jacket, hypoallergenic", (10, 60), color="white, black, yellow", size="small, medium, large",
        ),
    ),
}  # fmt: skip

_MAKERS = (
    "Arvelo", "Brintis", "Caldorra", "Denmoor", "Elvane", "Fennick", "Galdo", "Harrowby", "Isolde", "Jarnvik",
    "Kestova", "Lumera", "Mirabon", "Nordell", "Ostrava", "Pelligo", "Quandry", "Rovello", "Sundara", "Tavik",
)  # fmt: skip
_PRAISE = (
    "I use my {name} every week and it does what it should.",
    "Arrived well packed. Described as {attribute}, and so it is.",
    "Good value, though I had hoped for a second color.",
    "My sister has the same {name} and recommended it to me.",
    "Bought for {attribute}, and not disappointed. I would buy it again.",
)
_PURPOSES = ("every day", "weekends away", "people with little space", "a long life", "beginners and experts alike")


def own_products() -> list[Product]:
    """The products, in the same order every time."""
    draw = random.Random(_SEED)
    kinds = [(*place, kind) for place, of_place in _KINDS.items() for kind in of_place] * PRODUCTS_PER_KIND
    draw.shuffle(kinds)  # so that equal search results do not stand by kind
    return [_product(f"P{number:03d}", *kind, draw) for number, kind in enumerate(kinds, start=1)]


def _product(asin: str, category: str, path: str, kind: _Kind, draw: random.Random) -> Product:
    maker = draw.choice(_MAKERS)
    attributes = draw.sample(kind.attributes, _ATTRIBUTES)
    in_title, hidden = attributes[:_SHOWN_IN_TITLE], attributes[_SHOWN_IN_TITLE:]
    # One attribute of the title and one that only the sub-pages tell.
    asked_for = draw.sample(in_title, 1) + draw.sample(hidden, _ASKED_FOR - 1)
    draw.shuffle(asked_for)
    low = draw.randint(*kind.prices) + 0.99
    prices = (low, round(low * 1.2, 2)) if draw.random() < 0.25 else (low,)
    bullets = [f"A {kind.name} made for {draw.choice(_PURPOSES)}"]
    bullets += [f"{attribute.capitalize()}: see the description" for attribute in in_title]
    bullets.append(f"Also {hidden[0]}")
    told = " and ".join(hidden)
    reviews = [
        f"{draw.randint(2, 5)} of 5: {text.format(name=kind.name, attribute=draw.choice(attributes))}"
        for text in draw.sample(_PRAISE, draw.randint(0, 3))
    ]
    return Product(
        asin=asin,
        title=f"{maker} {kind.name.title()}, {' and '.join(text.title() for text in in_title)}",
        description=f"This {kind.name} by {maker} is known to be {told}.",
        bullet_points=tuple(bullets),
        attributes=tuple(attributes),
        options=kind.options,
        prices=prices,
        query=kind.plural,
        category=category,
        category_path=f"{path} › {kind.plural.title()}",
        rating=f"{draw.randint(30, 50) / 10:.1f}",
        reviews=tuple(reviews),
        instruction=f"Find me {kind.plural} described as {' and '.join(asked_for)}",
        instruction_attributes=tuple(asked_for),
    )
