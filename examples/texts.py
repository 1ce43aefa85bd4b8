"""Sentences and paragraphs, on six subjects, for quickstart.py to find each other in."""

QUERIES = [
    "How does the moon cause the tides?",
    "What makes bread dough rise?",
    "Why do trains slow down before a curve?",
    "When should fruit trees be cut back?",
    "How is a violin kept in tune?",
    "Which birds leave the north before winter?",
]

SENTENCES = [
    "The pull of the moon raises two bulges of water on opposite sides of the earth.",
    "At new and full moon the sun and the moon pull along one line, and the water rises highest.",
    "A harbour pilot reads the tide table before he reads the chart.",
    "In narrow bays the sea can climb more than ten metres in six hours.",
    "Yeast feeds on the sugar in flour and breathes out gas that lifts the loaf.",
    "Knead until the dough springs back from a pressed thumb.",
    "A hot stone and a little steam give the crust its crackle.",
    "Salt slows the yeast, so weigh it with care.",
    "The outer rail is raised in a bend so that passengers do not slide in their seats.",
    "Signals tell the driver how many sections of line ahead are free.",
    "Freight runs at night, when the express trains sleep in their depots.",
    "A loose joint sounds twice under every wheel.",
    "Prune apples and pears in late winter, while the buds are still closed.",
    "Cherries bleed and catch disease when they are cut in the cold months.",
    "Water new saplings deeply once a week rather than lightly every day.",
    "Straw under the strawberries keeps the slugs from the fruit.",
    "Turn the peg a little at a time, and press it inwards as you turn.",
    "Gut strings drift with the weather; steel ones hardly move.",
    "The oboe gives the note to which the whole orchestra tunes.",
    "A worn bow grips the string unevenly, and the tone breaks.",
    "Swallows gather on the wires in September and are gone within a week.",
    "Geese fly in a wedge, taking turns in the wind at its point.",
    "Some robins stay all year, because gardens feed them.",
    "Storks ride columns of warm air and cross the sea where it is narrowest.",
]

PARAGRAPHS = [
    """Anyone who has kept a boat in an estuary learns to think in two clocks. One is on the wall, and the other is in
    the mud. Roughly every twelve and a half hours the water comes back, a little later each day, because the moon has
    moved on in its own path while the earth turned underneath it. The pull is strongest on the side that faces the
    moon and weakest on the far side, and the difference between the two is what stretches the oceans into a long
    shape. The coast then does with that stretch whatever it likes. An open shore on a small island may see less than
    half a metre between high and low water, while a funnel of land that happens to rock in time with the moon can pile
    the same impulse up into a wall as high as a house. Fishermen knew the table long before there was a theory. They
    noted that the great tides come a day or two after the full moon, that wind from the sea adds a hand's breadth, and
    that a high barometer takes one away. The theory came later and agreed with them, which is the most that one can
    ask of a theory. What it added was the reason that the table may be printed a year ahead, and the humility to print
    beneath it that weather has not been taken into account.""",
    """The oldest part of baking is waiting. Flour and water, left in a warm corner, will begin to work without
    anybody's help, because yeasts and bacteria sit on the grain already. They break the starch down into sugars, eat
    the sugars, and leave behind acids, alcohol and gas. The gas would simply escape, as it does from a glass of beer,
    were it not for the gluten: two proteins of wheat that link up when they are wet and are pulled about, until they
    form a net of thin elastic skins. Kneading is nothing more than building that net, and proving is nothing more
    than blowing it up. A baker controls the pace with three dials, which are temperature, salt and time. Cold slows
    the yeast more than it slows the bacteria, so dough that rests overnight in a cellar tastes of more than dough
    that is hurried beside an oven. In the heat of the oven everything happens at once. For some minutes the gas
    expands and the loaf springs, then the yeast dies, the proteins set, the starch swells and stiffens, and the crust
    dries enough to turn brown. Open the door too soon and the whole structure, still soft, sinks back with a
    sigh.""",
    """A railway is a machine for spending as little force as possible. A steel wheel on a steel rail rolls so easily
    that one person leaning on a wagon can start it moving, and for the same reason it is very hard to stop. Everything
    else about the railway follows from this. Brakes cannot promise to halt a train within the distance that its driver
    can see, and so the line is cut into sections, with one train allowed in each, and signals that speak for what is
    beyond the next bend. Gradients are kept gentle, because the grip that is too weak for braking is also too weak for
    climbing. In a curve the train wants to go straight on, and what turns it is the cone shape of the wheels, which
    ride up on the outer side and so roll a longer way there. Beyond a certain speed that is no longer enough, and the
    flange presses against the rail and grinds. Engineers answer by tilting the track, but a slow goods train uses the
    same track and would lean inwards, so that the tilt is always a compromise, and the express must slow down for it.
    The timetable is the last part of the machine. It keeps apart in time what cannot be kept apart in space, and a
    delay of two minutes in the morning can still be found, a little larger, in the evening.""",
    """An orchard is planned by people who will not see it full grown, and corrected by people who did not plant it. The
    correcting is done in the cold months with a saw and a ladder. While a tree is asleep its shape is easy to read, and
    the wood cut away costs it nothing that it was using. The aim is light: every branch that will carry fruit ought to
    see the sun for part of the day, and air ought to move between the branches, so that leaves are dry again soon after
    rain and mould finds no place to start. Crossing branches go first, then those that grow straight up, then whatever
    is dead. Cut hard, and the tree answers with a thicket of young shoots; cut lightly every year, and it forgets to be
    angry. Stone fruit is different. Plums and cherries close their wounds slowly, and in winter spores settle in them,
    so they are cut in summer, straight after the harvest. Young trees get water and patience. Old trees get a prop
    under the heaviest limb, and a few years more than the accounts would allow, because the blackbirds are used to
    them, and because the fruit of an old tree, though small, is the one the children remember.""",
    """To tune a string instrument is to listen for something disappearing. Two strings that are almost, but not
    quite, in agreement produce a slow swelling and fading, as one vibration overtakes the other and falls behind
    again. The player turns the peg, the swelling slows, and when it has stopped the interval is pure. On a violin the
    neighbours are a fifth apart, and the ear finds a pure fifth without being taught. Trouble begins when four of
    them in a row do not arrive at the third that the piano has, since no power of three is ever a power of two. Every
    tuning is a way to hide that remainder, in one ugly interval that is never played, or in a little impurity
    everywhere. Wood adds trouble of its own. It takes up water from the air and swells, the top rises and carries the
    bridge with it, and in a heated hall all of this goes into reverse. Gut stretches, steel does not, and new strings
    of any kind need days to settle. An orchestra therefore tunes twice: once behind the stage, to find the place, and
    once in front of the public, to the long note of an oboe, which is chosen not because it is right but because it
    cannot be changed.""",
    """Every autumn a large part of the life of the north picks itself up and leaves. What sets it off is less the cold
    than the shortening of the day, which cannot be mistaken and does not vary from year to year. Birds that hatched in
    June and have never seen the south grow restless at night, and in a closed room they hop towards the side on which
    their kind flies away. They steer by the turning of the stars, by the place of the sunset, and by a sense for the
    lines of the magnetic field, and they correct each of these with the others. Small birds travel in the dark, when
    the air is calm and hawks are asleep, and put on half their weight again in fat before a crossing. Storks and eagles
    need the sun, since they climb in warm rising air and glide from one column to the next; over water there is none,
    so they crowd together at the straits, where people with telescopes wait for them. Geese learn the road from their
    parents and keep to it for life. Not all go far. Many only move from the hills into the valley, or from the woods to
    the gardens, and in mild years some do not move at all, and are found in January singing on a chimney.""",
]
