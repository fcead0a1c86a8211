"""Words for names and for the embedded model's vocabulary."""

import random
from collections.abc import Callable

_ADJECTIVES = """
able absent absurd acid active actual acute agile airy alert alien alive aloof amber ample ancient angry annual
antique anxious apt arctic ardent arid artful ashen asleep astute atomic austere autumnal avid awake aware awkward
azure bald bare barren basic bashful beige belated beloved bent best big bitter black bland blank blazing bleak
blind blithe blond blue blunt bold bony bossy bouncy brainy brave brazen breezy brief bright brisk brittle broad
broken bronze brown bubbly bumpy busy calm candid careful careless caring casual cautious central certain charming
cheap cheerful chief chilly chubby civic civil classic clean clear clever close cloudy clumsy coarse coastal cold
colossal common compact complete complex concise concrete cool copper coral cordial corrupt costly cosy covert cozy
crafty crazy creamy creepy crimson crisp critical crooked cruel crude cubic curious curly current curved cute daily
damp dapper daring dark dear decent deep defiant definite delicate dense deputy devout digital dim dire direct
discreet distant distinct dizzy docile domestic dormant double drab dramatic dreamy dreary droopy drowsy dry dual
due dull dusky dusty eager early earnest earthy eastern easy edible eerie elated elder elastic electric elegant
elite empty endless enormous entire epic equal errant eternal ethical even evident exact excellent exotic expert
extinct extra exuberant fabulous faded faint fair faithful false familiar famous fancy fast fatal faulty favorite
fearless feeble female fertile festive fickle fierce fiery filthy final fine firm first fiscal fit fixed flaky
flashy flat flawless fleet flexible flimsy fluent fluffy foggy folksy fond foolish foreign formal former fragile
frail frank frantic free frequent fresh friendly frigid frosty frozen frugal full fumbling funny furious furry fuzzy
gallant gaseous gaudy gaunt general generous genial gentle genuine ghostly giant giddy gifted gigantic glad
glamorous gleaming glib global gloomy glossy golden good gothic graceful gracious grand grateful grave gray great
greedy green grim gross grouchy grumpy guarded guilty gusty habitual hairy handsome handy happy hard hardy harmless
harsh hasty haunting hazy healthy hearty heavy hectic helpful hidden high hilarious hoarse hollow holy homely honest
horrid hostile hot huge humane humble humid hungry hurried husky icy ideal idle ill imaginary immense immune impish
important inborn infamous inland innate inner innocent intact intense internal iron ironic itchy ivory jaded jagged
jaunty jealous joint jolly jovial joyful joyous jubilant juicy jumbo junior just juvenile keen kind kindly knotty
known lame languid lanky large last late latent lavish lawful lazy lean legal lengthy lethal level light likable
limber limp linear liquid literate little lively local lofty lonely long loose lopsided loud lovely low loyal lucid
lucky lumpy lunar lush luxurious mad magenta magic magnetic main major male mammoth manic marine marked martial
massive mature meager mean measly medical medium meek mellow melodic merry messy metallic mighty mild mindful
miniature minor minty misty mobile modern modest moist molten moody moral mortal mossy muddy muffled mundane murky
musical mute muted mutual mystic naive narrow nasty native natural naughty nautical neat needy nervous neutral new
nice nifty nimble nippy noble nocturnal noisy nomadic normal northern nosy novel numb numeric nutty oaken obedient
oblong obscure obvious oceanic odd oily old olive opal opaque open opposite optimal orange ordinary organic ornate
outer outgoing oval overt painful pale paltry paper parallel partial past pastel patient peaceful peppery perfect
perky petite petty phony pink pious placid plain plastic playful pleasant plump plucky plural poetic pointed poised
polar polite poor popular portly positive potent precious precise pretty prickly prim primal prime private prize
proper proud prudent public puny pure purple pushy puzzled quaint quick quiet quirky radiant ragged rainy random
rapid rare rash raw ready real rebel recent red refined regal regular relaxed remote rich rigid ripe robust rocky
roomy rosy rotten rough round rowdy royal ruby rude rugged ruling rural russet rustic rusty sacred sad safe saline
salty sandy sane sarcastic sassy satin savory scaly scarce scarlet scenic scented scrawny secret secure selfish
senior sensible serene serious severe shabby shady shaggy shaky shallow sharp shiny short showy shrewd shrill shy
silent silken silky silly silver simple sincere single skilled sleek sleepy slender slick slim slimy slow sly small
smart smoggy smoky smooth smug snappy sneaky snowy snug sober social soft soggy solar solemn solid somber sonic sore
sour southern sparse special speedy spicy spiffy spiky spiral splendid spotless spry square squeaky stable stale
stark starry static steady steel steep stellar sterile stern sticky stiff still stingy stocky stoic stony stormy
stout straight strange strict striped strong stubborn stunning sturdy stylish suave subtle sudden sugary sulky
sullen sultry sunny super superb supple supreme sure surly sweet swift sylvan tacit tall tame tangy tardy tart tasty
tawny teal tedious teeny tender tense tepid terse thick thin third thirsty thorny thrifty tidal tidy tight timely
timid tiny tired tiresome torrid total tough toxic tragic tranquil trendy tricky trim tropical true trusty turbid
turquoise twin ugly ultra unary uneven uniform unique united unruly upbeat uphill upper upright upset urban urgent
usable useful usual utter vacant vagrant vague vain valiant valid vapid varied vast velvet verbal verdant vibrant
vicious vigilant vintage violet viral virtual visible vital vivid vocal volatile wacky wan warlike warm wary
wasteful watery wavy waxen weak wealthy weary western wet white whole wicked wide wiggly wild willing windy wiry
wise wistful witty wobbly woeful wooden woolen woozy wordy worldly worn worthy wrong wry yellow young youthful zany
zealous zesty
"""

_NOUNS = """
abbey acorn acre actor adobe agent album alcove alley almond alpaca altar amulet anchor angel ankle anthem antler
anvil apple apron arbor arch arena armor arrow artist ash aspen atlas atom attic aunt author avenue awning axle baby
badge badger bagel baker balcony ball ballad balloon bamboo banana band banjo bank banner barge bark barley barn
baron barrel basil basin basket bass bat bath baton battery bay beach beacon bead beak beam bean bear beard beaver
bed beech beet beetle bell belt bench berry bicycle bird birch biscuit bishop bison blade blanket blaze blossom
board boat bobcat body bolt bone bonnet book boot border bottle boulder bow bowl box bracelet brain bramble branch
bread breeze brick bridge broom brook brush bubble bucket buckle bud buffalo bugle bulb bull bunker bus bush butter
button cabbage cabin cable cactus cafe cage cake calf camel camera camp canal canary candle candy canoe canopy
canvas canyon cape captain car caravan card cargo carpet carriage carrot cart castle cat cave cedar ceiling celery
cell cellar cello cement chain chair chalk chamber chapel chariot chart cheek cheese chef cherry chess chest chicken
child chimney chin chisel choir church cider cinema circle circus citrus city clam clarinet claw clay cliff clinic
cloak clock closet cloth cloud clover clown club coach coal coast coat cobra cocoa coconut coffee coin colony column
comb comet compass cone cook cookie cork corn cottage cotton couch cougar council cove cow coyote crab cradle crane
crater crayon creek crest cricket crow crowd crown crumb crystal cube cup cupboard curb curtain cushion cymbal
cypress dagger dairy daisy dam dancer dart dawn deacon deer delta den desert desk dial diamond diary dice diesel
diner dinghy dish ditch diver dock doctor dog doll dolphin dome donkey door dove dragon drain drawer dress drill
drum duck duke dune dust eagle ear earth easel echo eel egg elbow elk elm ember emblem emerald engine envelope epoch
essay estate fable face factory fair falcon fan farm farmer faucet fawn feast feather fence fern ferry fiddle field
fig file film finch finger fire fish flag flame flask fleece flint flock floor flour flower flute fly foal foam fog
folder food foot forest fork fort fossil fountain fox frame freight frog frost fruit funnel fur furnace gadget
galaxy gallery galley garage garden garlic gate gazelle gear gem ghost ginger giraffe girl glacier glass globe glove
glue goat goblet gold goose gorilla gourd gown grain granite grape grass gravel grill grove guitar gull gutter gym
hail hair hall hamlet hammer hamster hand handle hangar harbor hare harness harp hat hatch hawk hay hazel head heart
hearth hedge heel helmet hen herb hermit heron hill hinge hippo hive hockey hog hole home honey hood hoof hook
horizon horn hornet horse hose hotel hound house hut hyena ice igloo inch ink inlet inn insect island item jacket
jaguar jail jam jar jasmine javelin jaw jelly jewel journal judge jug jungle juniper jury kayak kennel kettle key
kiln kilt king kitchen kite kitten knee knife knight knob koala label lace ladder lady lagoon lake lamb lamp lance
lantern lark laser latch lava lawn leaf ledge leek leg lemon lemur lens leopard letter lettuce library lid
lighthouse lilac lily lime linen lion lip lizard llama loaf lobby lobster lock locket locust lodge log lotus lounge
lunch lung lute lynx lyre magnet magpie mango manor mantle map maple marble market marsh mask mast mat mayor maze
meadow meal medal melon mentor merchant mesa metal meteor mill mineral mink minnow mirror mist mitten moat mole
money monk monkey moon moose mop morning mortar mosaic mosque moss motel moth motor mountain mouse mouth mud muffin
mug mule mural muscle museum mushroom nail napkin neck nectar needle nest net nettle newt nickel night noodle nose
notebook nugget nurse nut oak oar oasis oat ocean octopus office oil onion orbit orchard orchid organ osprey ostrich
otter oven owl ox oyster packet paddle page pail paint palace palm pan panda panel pansy panther papaya parade
parcel park parrot parsley party pasta pastry patch path patrol paw pea peach peacock peak peanut pear pearl pebble
pelican pen pencil penguin pepper perch petal phone piano picnic pie pier pigeon pillar pillow pilot pine pipe
pirate pistol pit pitcher pizza plane planet plank plant plate plateau plaza plough plum plume pocket poem poet pole
pollen pond pony poppy porch port portrait potato pottery pouch prairie prawn priest prince prism puddle puffin
pulley pump pumpkin puppet puppy purse puzzle pyramid python quail quarry quartz queen quill quilt rabbit raccoon
radar radio radish raft rail rain raisin ram ranch raven razor reef relic ribbon rice rider rifle ring river road
robe robin robot rock rocket rod roof room rooster root rope rose rubber rudder rug ruler saddle saffron sage sail
sailor salad salmon salt sand sandal sapphire satchel sauce saucer sausage scale scarf school scooter scout screen
screw scroll sea seal season seat seed shadow shark shawl shed sheep shelf shell shepherd shield ship shirt shoe
shop shore shovel shower shrimp shrine shrub shutter siren sister skate skull skunk sky slate sled sleeve slipper
slope snail snake snow soap sock sofa soil soldier song soup spade spark sparrow spear sphere spice spider spinach
spindle sponge spoon spruce spur squad squid squirrel stable stadium staff stage stair stamp star statue steam stem
stone stool storm stove straw stream street string studio sugar suit summit sun swallow swamp swan sword syrup table
tailor talon tank tape tapestry tavern taxi tea teacher team teapot temple tent terrace theater thistle thorn thread
throne thumb thunder ticket tide tiger tile timber tin toad toast tomato tongue tool tooth torch tortoise totem
tower town toy tractor trail train tram tray treasure tree trench trophy trout truck trumpet trunk tub tube tulip
tuna tunnel turban turkey turnip turtle tusk twig uncle unicorn urn valley valve van vase vault veil vessel vest
viking villa village vine vineyard viola violin viper visitor volcano voyage vulture wafer wagon waist waiter walnut
walrus wand warden warrior wasp watch water wave wax weasel web wedge well whale wharf wheat wheel whip whistle
widow wig willow window wing winter wire witch wizard wolf woman wood wool workshop worm wreath wren wrist yacht yak
yard yarn yeast yew yogurt zebra zinc zipper
"""

ADJECTIVES = tuple(dict.fromkeys(_ADJECTIVES.split()))
NOUNS = tuple(dict.fromkeys(_NOUNS.split()))

_ONSETS = (
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p ph pl pr qu r s sc sh sk sl sm sn sp st str t th tr v w wh "
    "y z"
)
_VOWELS = "a e i o u ai ea ee ia ie io oa oo ou y"
_CODAS = "b ck ct d f g ght k l ll lt m mp n nce nd ng nk nt p r rd rk rm rn rt s sh ss st t th tion ve x ze"


def names(draw: random.Random, count: int, invented: float = 0.0) -> list[str]:
    """Distinct adjective-noun names; a share of their words may be made up, as words nobody listed."""
    if count > len(ADJECTIVES) * len(NOUNS) // 2:
        raise ValueError(f"there are {len(ADJECTIVES) * len(NOUNS):,} names, too few to draw {count:,} at random")
    parts = (ADJECTIVES, NOUNS)
    return distinct(
        lambda: "-".join(invented_word(draw) if draw.random() < invented else draw.choice(words) for words in parts),
        count,
    )


def distinct(make: Callable[[], str], count: int) -> list[str]:
    """So many different words, in the order in which they were made."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[make()] = None
    return list(found)


def invented_word(draw: random.Random) -> str:
    """A word of one to four made-up syllables."""
    onsets, vowels, codas = _ONSETS.split(), _VOWELS.split(), _CODAS.split()
    return "".join(
        draw.choice(onsets) + draw.choice(vowels) + (draw.choice(codas) if draw.random() < 0.5 else "")
        for _ in range(draw.choice((1, 2, 2, 2, 3, 3, 4)))
    )
