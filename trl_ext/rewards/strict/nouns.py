"""What is counted in answers, beside the units that convert: an answer may add one of these words to a bare number."""

NOUNS = frozenset(
    """apple arrangement bag ball banana bead bird block boat book bottle bowl box boy bracelet brother bus cake calorie
    camper candle candy car card case cat chair chicken child children choice class coin color combination cookie copy
    cow cracker crayon customer diamond digit dog doll donut door duck edge egg element employee envelope face factor
    family fish floor flower foot friend game gift girl glass goal grape group guest hat hole home horse house integer
    item jar key kid lap leaf leaves legs lemon letter line liter lollipop male man marble match meal member men mice
    minute mouse muffin necklace number nut onion orange outcome packet page pair pants paper part passenger path peach
    pear pen pencil person people permutation photo picture piece pizza plant plate player point pot potato problem
    puppy question room rose row scoop seat sheep sheet shell shirt shoe side sister slice sock solution song spot
    sticker stone story strawberry student subset team teacher term test ticket time tomato toy train tree
    triangle trip truck value vase vertex vertices visitor vote way wheel win window woman women word
    worker""".split()
)
