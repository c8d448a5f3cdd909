"""The classes of the demo models and the designers they are learned from. No torch."""

from __future__ import annotations

IMAGE_SIZE = 128
"""Side of every picture in pixels."""

TRAINING_DESIGNERS: tuple[str, ...] = (
    "noto",
    "noto-v1",
    "fluent-emoji",
    "fluent-emoji-flat",
    "twemoji",
)
"""Icon sets that training, healing and model selection may read."""

# Chosen by hand from the names that all sets share, for shapes that the eye tells apart.
CLASSES: tuple[str, ...] = tuple(
    """
    bear butterfly cat-face cow-face crab crocodile dog-face dolphin elephant fox frog honeybee
    koala lady-beetle lion monkey-face octopus owl panda penguin pig-face rabbit-face shark snail
    snake spider tiger-face tropical-fish turtle unicorn spouting-whale two-hump-camel baby-chick
    red-apple banana grapes watermelon strawberry cherries lemon pineapple peach kiwi-fruit avocado
    carrot eggplant ear-of-corn hot-pepper mushroom croissant cheese-wedge hamburger french-fries
    pizza hot-dog taco popcorn cooking doughnut cookie birthday-cake soft-ice-cream lollipop
    beer-mug hot-beverage
    cactus sunflower tulip evergreen-tree palm-tree four-leaf-clover maple-leaf
    airplane helicopter rocket automobile bus fire-engine bicycle sailboat locomotive
    hammer scissors key light-bulb camera laptop umbrella balloon wrapped-gift crown gem-stone
    bomb hourglass-done microscope anchor bell trophy pencil artist-palette high-heeled-shoe t-shirt
    top-hat
    guitar trumpet drum
    soccer-ball basketball american-football bowling boxing-glove pool-8-ball
    rainbow snowflake high-voltage sun crescent-moon fire droplet star
    castle house ferris-wheel volcano
    ghost skull jack-o-lantern red-heart
    """.split()  # noqa: SIM905
)

_READABLE = {
    "lady-beetle": "ladybird",
    "spouting-whale": "whale",
    "two-hump-camel": "camel",
    "baby-chick": "chick",
    "red-apple": "apple",
    "ear-of-corn": "corn",
    "cooking": "fried egg",
    "soft-ice-cream": "ice cream",
    "hot-beverage": "hot drink",
    "high-voltage": "lightning",
    "hourglass-done": "hourglass",
    "pool-8-ball": "8 ball",
    "wrapped-gift": "gift",
    "jack-o-lantern": "jack-o'-lantern",
}


def label(name: str) -> str:
    """The readable label of an icon name: `cat-face` is "cat", `birthday-cake` "birthday cake"."""
    return _READABLE.get(name, name.removesuffix("-face").replace("-", " "))


LABELS: tuple[str, ...] = tuple(label(name) for name in CLASSES)
"""Label of every class, by class id."""

SHOWN = (
    *("fox", "cat-face", "butterfly", "penguin", "owl", "strawberry"),
    *("hamburger", "birthday-cake", "cactus", "rocket", "guitar", "castle"),
)
"""Classes on the sheets of samples, fixed before anything was trained."""

SAMPLE_SEED = 99
SAMPLE_STEPS = 25
"""Seed and denoising steps of the samples that are measured and shown."""
