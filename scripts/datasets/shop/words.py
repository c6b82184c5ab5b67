"""The vocabulary of the mini catalogue: shelves, attributes, options. All of it was invented for this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Form(Enum):
    """The place of an attribute next to a noun."""

    BEFORE = "before"
    """leak proof bottles"""
    FOR = "for"
    """bottles for long trips"""
    WITH = "with"
    """bottles with aloe vera"""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A property that goals ask for."""

    phrase: str
    """Two words in lower case, as instructions and titles have them."""
    form: Form
    said: str
    """A person's wording: a clause that follows ``a bottle``."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """The common properties of the products of one query."""

    category: str
    query: str
    noun: str
    """Name of a product in titles, close to the query."""
    alias: str
    """Another name for the same thing, of other words."""
    level: str
    """Second level of the product category."""
    attributes: tuple[Attribute, ...]
    """Eight that a product may have."""
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    """Two option groups with their values."""
    prices: tuple[int, int]
    """Least and greatest usual price in dollars."""


_ATTRIBUTES: Mapping[str, str] = {
    "beauty": """
        long lasting: that lasts all day
        cruelty free: that was never tested on animals
        fragrance free: that has no scent
        alcohol free: that has no alcohol in it
        leak proof: that does not leak
        quick drying: that dries in a minute
        plant based: that is made from plants
        easy clean: that i can wash in no time
        travel friendly: that fits into my luggage
        splash proof: that does not mind getting wet
        for sensitive skin: that is gentle to my face
        for daily use: that i can take every morning
        for thick hair: that works on my thick curls
        with aloe vera: that has aloe in it
        with shea butter: that has shea in it
        with coconut milk: that has coconut in it""",
    "electronics": """
        fast charging: that is full again in an hour
        noise reducing: that keeps noise away
        heavy duty: that can take a beating
        light weight: that weighs next to nothing
        water proof: that survives a splash
        plug play: that works as soon as i plug it in
        high resolution: that shows sharp pictures
        easy install: that i can set up alone
        battery powered: that runs on batteries
        touch control: that answers to a tap
        tangle free: that never gets into knots
        for home office: that suits my desk at home
        for long trips: that i can take on a journey
        for video calls: that i can use in meetings
        with carrying case: that comes in a case
        with stereo sound: that fills the room with music
        with status display: that shows how much is left""",
    "garden": """
        machine washable: that can go in the washing machine
        fade resistant: that keeps its color in the sun
        space saving: that fits in a small flat
        hand woven: that was woven by hand
        non slip: that does not slide on the floor
        easy assemble: that i can put together alone
        weather resistant: that can stay outside all year
        rust free: that does not rust
        extra thick: that feels thick
        eco friendly: that is kind to nature
        energy saving: that needs little power
        for living room: that goes with my couch
        for dining room: that goes with my dinner table
        for kids room: that my children would like
        with solid wood: that is made of real wood
        with hidden storage: that has room inside
        with cotton lining: that has cotton inside""",
    "fashion": """
        moisture wicking: that keeps me dry when i sweat
        slim fit: that is cut close to the body
        loose fit: that is cut wide
        wrinkle resistant: that i need not iron
        wind proof: that keeps the wind out
        odor control: that does not smell after sport
        high visibility: that is seen at night
        tag free: that does not scratch my neck
        hand stitched: that was sewn by hand
        for daily wear: that i can wear to work
        for cold weather: that keeps me warm
        for outdoor sports: that i can train in
        with side pockets: that has room for my keys
        with soft lining: that feels soft inside
        with elastic band: that stretches well
        with rubber sole: that has a sole of rubber""",
    "grocery": """
        gluten free: that has no gluten
        low sugar: that is not too sweet
        dairy free: that has no milk in it
        caffeine free: that lets me sleep
        non gmo: that has no altered crops in it
        high fiber: that has a lot of fiber
        low carb: that fits my diet without bread
        kosher certified: that is kosher
        small batch: that is made a little at a time
        stone ground: that was ground between stones
        freeze dried: that was dried by cold
        for gift giving: that i can give as a present
        for school lunches: that my children can take to school
        for hiking trips: that i can eat on the trail
        with sea salt: that has salt from the sea
        with real fruit: that has true fruit in it
        with ancient grains: that has old kinds of grain""",
}

_VALUES: Mapping[str, str] = {
    "ounces": "2 oz, 4 oz, 8 oz, 12 oz",
    "scent": "vanilla, jasmine, citrus, sage, cedar, honey",
    "shade": "red, pink, coral, plum, nude, bronze",
    "pack": "2 pack, 3 pack, 6 pack, 10 pack",
    "color": "black, white, blue, green, gray, purple, yellow, orange",
    "feet": "3 ft, 6 ft, 10 ft, 25 ft",
    "model": "mini, plus, pro, max",
    "letters": "small, medium, large, xl",
    "bed": "twin, full, queen, king",
    "pattern": "plain, striped, dotted, floral",
    "shape": "round, square, oval",
    "shoe": "7, 8, 9, 10, 11",
    "flavor": "vanilla, lemon, mint, cinnamon, honey, ginger, maple",
    "savory": "garlic, basil, pepper, sesame, smoky, original",
    "roast": "mild, medium, bold",
}

EXOTIC: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "beauty": ("scent", ("crème", "rosé", "pêche")),
    "electronics": ("screen", ('10"', '13"', '15"')),
    "garden": ("length", ("5'", "8'", "12'")),
    "fashion": ("fit", ("s/m", "l/xl")),
    "grocery": ("flavor", ("salt & honey", "piña", "<5 spices")),
}
"""An option group per category whose values need care: accents, quotes, slashes, characters of HTML."""

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "beauty": ("Women's", "Rosé", "Bath & Body"),
    "electronics": ('10" Wide', "A&V", "Pro's"),
    "garden": ("Décor", "12' Long", "Home & Yard"),
    "fashion": ("Men's", "Women's", "Été"),
    "grocery": ("Crème", "<5g Fat", "Salt & Sweet", "Chef's"),
}
"""Words of some titles per category that need the same care."""

# query | noun | alias | second level | attributes | groups as name=values | prices
_SHELVES: Mapping[str, str] = {
    "beauty": """
travel bottles | Travel Bottle | Pump Flask | Bath Tools | leak proof, easy clean, travel friendly, splash proof, \
plant based, quick drying, daily use, thick hair | size=ounces, color=color | 6-24
face creams | Face Cream | Facial Lotion | Skin Care | fragrance free, cruelty free, plant based, alcohol free, \
long lasting, sensitive skin, aloe vera, shea butter | size=ounces, scent=scent | 9-48
hand lotions | Hand Lotion | Palm Balm | Skin Care | quick drying, cruelty free, fragrance free, alcohol free, \
daily use, sensitive skin, aloe vera, shea butter | scent=scent, pack=pack | 5-28
lip balms | Lip Balm | Mouth Stick | Makeup | long lasting, cruelty free, plant based, splash proof, \
daily use, sensitive skin, coconut milk, shea butter | color=shade, pack=pack | 4-19
nail polishes | Nail Polish | Manicure Lacquer | Makeup | quick drying, long lasting, cruelty free, plant based, \
fragrance free, travel friendly, daily use, aloe vera | color=shade, size=ounces | 5-22
eye shadows | Eye Shadow | Lid Powder | Makeup | long lasting, splash proof, cruelty free, plant based, \
fragrance free, travel friendly, sensitive skin, daily use | color=shade, style=model | 8-39
bath soaps | Bath Soap | Wash Bar | Bath Tools | cruelty free, fragrance free, plant based, long lasting, \
sensitive skin, aloe vera, shea butter, coconut milk | scent=scent, pack=pack | 4-26
shampoos | Shampoo | Hair Wash | Hair Care | alcohol free, fragrance free, cruelty free, plant based, \
thick hair, daily use, aloe vera, coconut milk | scent=scent, size=ounces | 8-36
hair brushes | Hair Brush | Detangling Comb | Hair Care | easy clean, travel friendly, quick drying, plant based, \
splash proof, thick hair, daily use, coconut milk | color=color, size=letters | 6-32
makeup mirrors | Makeup Mirror | Vanity Glass | Bath Tools | easy clean, travel friendly, splash proof, \
long lasting, quick drying, daily use, sensitive skin, thick hair | shape=shape, color=color | 12-58""",
    "electronics": """
phone chargers | Phone Charger | Power Adapter | Phones | fast charging, heavy duty, light weight, plug play, \
easy install, home office, long trips, status display | color=color, length=feet | 9-38
power banks | Power Bank | Battery Pack | Phones | fast charging, heavy duty, light weight, water proof, \
touch control, long trips, carrying case, status display | color=color, style=model | 15-60
earphones | Earphone | Music Bud | Audio | noise reducing, light weight, water proof, touch control, tangle free, \
long trips, carrying case, stereo sound | color=color, style=model | 12-66
speakers | Speaker | Sound Box | Audio | water proof, battery powered, touch control, heavy duty, light weight, \
home office, long trips, stereo sound | color=color, size=letters | 16-85
keyboards | Keyboard | Typing Deck | Computers | plug play, light weight, battery powered, touch control, \
noise reducing, home office, carrying case, long trips | color=color, style=model | 18-75
webcams | Webcam | Screen Camera | Computers | high resolution, plug play, easy install, light weight, noise reducing, \
video calls, home office, stereo sound | style=model, color=color | 18-80
video cables | Video Cable | Display Cord | Computers | heavy duty, plug play, tangle free, high resolution, \
easy install, home office, video calls, light weight | length=feet, pack=pack | 6-29
tablet stands | Tablet Stand | Screen Holder | Computers | heavy duty, light weight, easy install, touch control, \
home office, video calls, long trips, carrying case | color=color, size=letters | 10-44
desk clocks | Desk Clock | Alarm Timer | Office | battery powered, touch control, light weight, easy install, \
plug play, home office, status display, long trips | color=color, shape=shape | 11-47
camera bags | Camera Bag | Lens Pouch | Office | water proof, heavy duty, light weight, tangle free, \
long trips, home office, carrying case, video calls | size=letters, color=color | 17-79""",
    "garden": """
table lamps | Table Lamp | Bedside Light | Lighting | energy saving, easy assemble, space saving, eco friendly, \
living room, dining room, kids room, solid wood | color=color, shape=shape | 18-84
area rugs | Area Rug | Floor Mat | Textiles | machine washable, fade resistant, non slip, hand woven, extra thick, \
living room, dining room, kids room | pattern=pattern, size=letters | 24-89
throw pillows | Throw Pillow | Couch Cushion | Textiles | machine washable, fade resistant, hand woven, extra thick, \
eco friendly, living room, kids room, cotton lining | color=color, pattern=pattern | 9-42
window curtains | Window Curtain | Door Drape | Textiles | machine washable, fade resistant, energy saving, \
hand woven, living room, dining room, kids room, cotton lining | color=color, pattern=pattern | 14-66
bed sheets | Bed Sheet | Mattress Cover | Textiles | machine washable, fade resistant, extra thick, eco friendly, \
non slip, kids room, cotton lining, hand woven | size=bed, color=color | 19-78
plant pots | Plant Pot | Flower Planter | Outdoors | weather resistant, rust free, fade resistant, eco friendly, \
space saving, living room, dining room, hidden storage | size=letters, color=color | 8-52
garden hoses | Garden Hose | Water Pipe | Outdoors | weather resistant, rust free, extra thick, eco friendly, \
space saving, fade resistant, easy assemble, non slip | length=feet, color=color | 15-69
storage baskets | Storage Basket | Laundry Hamper | Furniture | hand woven, space saving, machine washable, \
eco friendly, rust free, living room, kids room, cotton lining | size=letters, color=color | 11-49
wall shelves | Wall Shelf | Hanging Rack | Furniture | easy assemble, space saving, rust free, eco friendly, \
living room, dining room, solid wood, hidden storage | color=color, size=letters | 17-82
bar stools | Bar Stool | Counter Chair | Furniture | easy assemble, space saving, rust free, weather resistant, \
non slip, dining room, solid wood, hidden storage | color=color, shape=shape | 35-89""",
    "fashion": """
hoodies | Hoodie | Pullover Sweater | Tops | moisture wicking, loose fit, slim fit, tag free, odor control, \
cold weather, daily wear, soft lining | size=letters, color=color | 18-64
dress shirts | Dress Shirt | Office Blouse | Tops | wrinkle resistant, slim fit, loose fit, tag free, \
moisture wicking, hand stitched, daily wear, odor control | size=letters, color=color | 19-68
rain jackets | Rain Jacket | Storm Coat | Tops | wind proof, high visibility, loose fit, slim fit, \
outdoor sports, cold weather, side pockets, soft lining | size=letters, color=color | 29-89
yoga pants | Yoga Pant | Stretch Legging | Bottoms | moisture wicking, odor control, slim fit, tag free, \
outdoor sports, daily wear, side pockets, elastic band | size=letters, color=color | 15-59
pajama sets | Pajama Set | Sleepwear Suit | Bottoms | loose fit, tag free, wrinkle resistant, moisture wicking, \
cold weather, soft lining, side pockets, elastic band | size=letters, pattern=pattern | 17-62
running shoes | Running Shoe | Jogging Sneaker | Shoes | odor control, high visibility, moisture wicking, \
hand stitched, outdoor sports, daily wear, soft lining, rubber sole | size=shoe, color=color | 29-89
ankle socks | Ankle Sock | Foot Liner | Shoes | moisture wicking, odor control, tag free, high visibility, \
cold weather, outdoor sports, soft lining, elastic band | color=color, pack=pack | 6-27
winter gloves | Winter Glove | Knit Mitten | Accessories | wind proof, hand stitched, high visibility, odor control, \
cold weather, outdoor sports, soft lining, elastic band | size=letters, color=color | 9-46
sun hats | Sun Hat | Beach Cap | Accessories | wind proof, hand stitched, moisture wicking, high visibility, \
outdoor sports, daily wear, soft lining, elastic band | color=color, pattern=pattern | 11-43
waist belts | Waist Belt | Buckle Strap | Accessories | hand stitched, slim fit, odor control, high visibility, \
daily wear, outdoor sports, side pockets, elastic band | size=letters, color=color | 10-48""",
    "grocery": """
herbal teas | Herbal Tea | Leaf Infusion | Drinks | caffeine free, non gmo, low sugar, kosher certified, small batch, \
gift giving, real fruit, freeze dried | flavor=flavor, pack=pack | 5-26
coffee bags | Coffee Bag | Roast Pouch | Drinks | caffeine free, non gmo, small batch, stone ground, \
kosher certified, gift giving, hiking trips, freeze dried | roast=roast, size=ounces | 8-34
protein powders | Protein Powder | Shake Drink | Drinks | gluten free, dairy free, low sugar, low carb, non gmo, \
high fiber, real fruit, hiking trips | flavor=flavor, size=ounces | 19-69
granola bars | Granola Bar | Oat Snack | Snacks | gluten free, low sugar, high fiber, dairy free, \
school lunches, hiking trips, real fruit, ancient grains | flavor=flavor, pack=pack | 5-29
trail mixes | Trail Mix | Nut Blend | Snacks | low sugar, low carb, non gmo, freeze dried, \
hiking trips, school lunches, sea salt, real fruit | flavor=flavor, size=ounces | 7-33
rice crackers | Rice Cracker | Crisp Wafer | Snacks | gluten free, dairy free, non gmo, stone ground, high fiber, \
school lunches, sea salt, ancient grains | flavor=savory, pack=pack | 4-21
fruit jams | Fruit Jam | Berry Spread | Pantry | low sugar, gluten free, small batch, kosher certified, non gmo, \
gift giving, school lunches, real fruit | size=ounces, pack=pack | 5-24
pasta sauces | Pasta Sauce | Tomato Ragout | Pantry | gluten free, dairy free, low sugar, small batch, low carb, \
kosher certified, gift giving, sea salt | flavor=savory, size=ounces | 5-25
hot sauces | Hot Sauce | Chili Dressing | Pantry | small batch, gluten free, low sugar, low carb, non gmo, \
gift giving, sea salt, real fruit | flavor=savory, size=ounces | 4-23
baking flours | Baking Flour | Bread Meal | Pantry | gluten free, stone ground, high fiber, low carb, non gmo, \
kosher certified, ancient grains, sea salt | size=ounces, pack=pack | 5-31""",
}

COLORS = tuple(_VALUES["color"].split(", "))

_BRANDS = """
Velmora Orvanto Kestrin Dulvane Marnox Tilvera Brenzop Halvikk Quorbel Sundrelo Yarrowik Zubrelk Vimtask Ploverin
Ostrakel Nimbrek Fendorra Grivalt Jorvesk Krumholt Lanvero Mistrava Nordequi Oxtavel Pyrelka Quilvane Rontessa Skelvor
Thrumbel Ulvenno Varquist Wendrusk Xandrovel Yolbrith Zanthure Ambrevik Bolvanta Cresdune Drovanki Elmquora
"""
BRANDS = tuple(_BRANDS.split())
"""Invented brands; we know of no maker with these names."""

STYLES = ("Classic", "Compact", "Deluxe", "Modern", "Premium", "Simple", "Everyday", "Signature")


def _read_attributes() -> dict[str, dict[str, Attribute]]:
    read: dict[str, dict[str, Attribute]] = {}
    for category, text in _ATTRIBUTES.items():
        known = read[category] = {}
        for line in text.strip().splitlines():
            phrase, said = line.strip().split(": ")
            form = Form.BEFORE
            for other in (Form.FOR, Form.WITH):
                if phrase.startswith(f"{other.value} "):
                    form, phrase = other, phrase.removeprefix(f"{other.value} ")
            known[phrase] = Attribute(phrase, form, said)
    return read


def _read_shelf(category: str, line: str, known: Mapping[str, Attribute]) -> Shelf:
    query, noun, alias, level, attributes, groups, prices = line.split(" | ")
    low, high = prices.split("-")
    return Shelf(
        category=category,
        query=query,
        noun=noun,
        alias=alias,
        level=level,
        attributes=tuple(known[phrase] for phrase in attributes.split(", ")),
        groups=tuple(
            (name, tuple(_VALUES[values].split(", ")))
            for name, values in (group.split("=") for group in groups.split(", "))
        ),
        prices=(int(low), int(high)),
    )


def _read_shelves() -> tuple[Shelf, ...]:
    rows = [
        [_read_shelf(category, line, ATTRIBUTES[category]) for line in text.strip().splitlines()]
        for category, text in _SHELVES.items()
    ]
    return tuple(shelf for column in zip(*rows, strict=True) for shelf in column)


ATTRIBUTES: Mapping[str, Mapping[str, Attribute]] = _read_attributes()
"""Category -> phrase -> attribute."""

SHELVES = _read_shelves()
"""All shelves, one category after the other in turn."""
