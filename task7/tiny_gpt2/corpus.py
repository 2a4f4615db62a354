"""The text that the bundled tiny GPT-2 is trained on: little stories, and notes on GPUs and attention.

Every document is put together at random from the sentences below, so a few hundred lines give
millions of words. Two rules of notation:

    {hero}              what this document has bound to the name: a person, a place, ...
    {one|another}       one of the alternatives, chosen anew each time; they nest

``python -m task7.tiny_gpt2.corpus`` prints a few documents.
"""

import random
import re
import textwrap

_INNERMOST = re.compile(r"\{([^{}]*)\}")

# ---------------------------------------------------------------- stories

# Each story takes one of these casts as it is: hero, friend, animal, its nature, place, thing. No word is
# in two casts. A model of this size learns who belongs to whom in a few minutes, but not, in that
# time, to look up which of sixteen names it was a hundred words ago.
_CASTS = [
    ("Mira", "Tom", "fox", "young", "lake", "kite"),
    ("Omar", "Lena", "donkey", "patient", "well", "lantern"),
    ("Nora", "Felix", "owl", "shy", "lighthouse", "bell"),
    ("Ravi", "Tilda", "crow", "clever", "castle", "golden ring"),
    ("Amina", "Jonas", "hedgehog", "sleepy", "orchard", "basket of apples"),
    ("Pablo", "Rosa", "hen", "proud", "mill", "drum"),
    ("Yuki", "Milo", "turtle", "gentle", "harbor", "small boat"),
    ("Henrik", "Clara", "goat", "cheerful", "valley", "green scarf"),
    ("Sofia", "Bruno", "squirrel", "clumsy", "meadow", "flute"),
    ("Emil", "Hana", "badger", "curious", "forest", "pot of honey"),
]
_GIRLS = {"Mira", "Lena", "Nora", "Tilda", "Amina", "Rosa", "Yuki", "Clara", "Sofia", "Hana"}

# Each plot is a list of steps and each step a list of ways to tell it. Steps never repeat one
# another, so that a model that always takes its best guess does not run in circles.
_OPENINGS = [
    "Once upon a time there was {a nature} {animal} who lived {near|next to|not far from} the {place}.",
    "Once upon a time there was a {girl_or_boy} named {hero} who lived near the {place} with {a nature} {animal}.",
    "One {morning|afternoon|day in spring|day in autumn}, {hero} walked to the {place} with {a nature} {animal}.",
    "{hero} lived in a {small|white|narrow} house near the {place}, and {a nature} {animal} lived in the garden.",
    "There was once {a nature} {animal} who knew every path around the {place}.",
    "The {nature} {animal} of the {place} woke up early and {looked out of the window|went for a walk}.",
    "Long ago, when the {place} was still new, a {girl_or_boy} named {hero} had {a nature} {animal} for a friend.",
]
_PLOTS = {
    "lost": [
        [
            "{hero} owned {a thing}, and {he} carried it {everywhere|to the {place} every day}.",
            "The best thing that {hero} had was {a thing}, a present from {his} {grandmother|uncle|aunt}.",
            "That day {hero} brought {a thing} along and {put it down in the grass|left it on a bench}.",
        ],
        [
            "When the sun was high, {hero} saw that the {thing} was gone.",
            "But in the evening the {thing} was nowhere to be found.",
            "Then the wind blew hard, and after it the {thing} was gone.",
        ],
        [
            "{hero} looked {behind every stone|under the trees} and found only {dust|leaves|an empty nest}.",
            "{hero} asked {friend}, but {friend} had not seen the {thing} either.",
            "{hero} sat down and {almost cried|did not know what to do}.",
        ],
        [
            '"{Do not worry|Do not be sad}," said the {animal}. "I will help you {look|search}."',
            "The {animal} {listened|thought for a while} and then {ran|hurried} off without a word.",
            'The {animal} asked, "Where did you see the {thing} last?"',
        ],
        [
            "They walked around the {place} {twice|three times} and looked {into every corner|behind every door}.",
            "Together they followed {a trail of small footprints|the path along the water} until it grew dark.",
            "They went from house to house, and everybody {shook their head|promised to look out for it}.",
        ],
        [
            "At last the {animal} found the {thing} {under a bush|behind the old wall|in a hollow tree}.",
            "In the end it was {friend} who saw the {thing} {up on a roof|between two stones}.",
            "Then something {shone|moved} in the grass, and it was the {thing}.",
        ],
        [
            "{hero} was so {happy|glad} that {he} {danced|sang all the way home|hugged the {animal}}.",
            "{hero} thanked the {animal} and {shared {his} supper with it|gave it the softest place by the fire}.",
        ],
    ],
    "way home": [
        [
            "One evening the {animal} walked too far and {lost the way|did not know where it was}.",
            "A thick fog came up from the {place}, and the {animal} could not see the way home.",
            "It began to snow, and soon every path looked the same to the {animal}.",
        ],
        [
            "The {animal} called out, but only the wind answered.",
            "The {animal} sat down under a tree and waited.",
            "It was cold, and the {animal} was {hungry|tired|afraid}.",
        ],
        [
            "Then {hero} came by with {a thing} in {his} {arms|hands}.",
            "{hero} heard a small voice and {stopped|came closer} with {a thing} in {his} hands.",
            "Not far away, {hero} was {carrying|bringing} {a thing} to {friend}.",
        ],
        [
            '"Where do you live?" asked {hero}. "On the other side of the {place}," said the {animal}.',
            '"Come with me," said {hero}. "I know {a shorter way|somebody who has a map}."',
            '{hero} said, "I cannot carry you, but I can walk beside you."',
        ],
        [
            "They went to {friend}, who {drew a map for them|told them to follow the stars}.",
            "{friend} joined them, and {the three of them|all three} "
            "{climbed the hill|took the long way around the {place}}.",
            "On the way they met {friend}, who knew {every stone|each turn} of the road.",
        ],
        [
            "The {thing} {was heavy|made the walk slow}, but nobody wanted to leave it behind.",
            "They used the {thing} to {scare away a wolf|make a sign for those at home}.",
            "When they were tired, they sat around the {thing} and told stories.",
        ],
        [
            "At sunrise they saw a {small door|chimney|light}, and the {animal} knew that it was home.",
            "After a long night the {animal} smelled {bread|the garden} and began to run.",
        ],
        [
            "Since then the {animal} has never {gone out without a friend|been afraid of the dark}.",
            "{hero} and {friend} {waved|stayed for breakfast}, and then they {went home|walked back slowly}.",
        ],
    ],
    "gift": [
        [
            "{friend} had a birthday, and {hero} wanted to make {a thing} for {him or her}.",
            "{hero} promised {friend} {a thing}, although {he} had never made one before.",
        ],
        [
            "{hero} worked {all day|for three days} and {slept very little|forgot to eat}.",
            "First {he} drew a plan, and then {he} collected {wood|old rope|paper} near the {place}.",
            "The first try {fell apart|was too small}, and the second was {no better|far too heavy}.",
        ],
        [
            "The {animal} watched and {laughed a little|said nothing}.",
            'The {animal} said, "You are in a hurry. Good work takes time."',
            "The {animal} brought {nails|a brush|some glue} and sat down next to {hero}.",
        ],
        [
            "So they started again, and this time they {measured every part|did one small step after another}.",
            "Then {hero} understood the mistake and {fixed|repaired} it with {a drop of glue|a bit of rope}.",
        ],
        [
            "When the {thing} was ready, it was {not perfect|a little crooked}, but it was {strong|beautiful}.",
            "In the evening the {thing} {stood|lay} on the table, and it was even better than the plan.",
        ],
        [
            "{friend} opened the door and {could not believe it|smiled from ear to ear}.",
            '"Did you make this {thing} yourself?" asked {friend}. "The {animal} helped me," said {hero}.',
        ],
        [
            "They took the {thing} to the {place} and {tried it out|showed it to everyone}.",
            "All of them ate cake at the {place} until the moon came up.",
        ],
        [
            "{hero} learned that {patience is worth more than speed|a friend makes hard work easy}.",
            "The next day {friend} began to make {something|a surprise} for {hero}.",
        ],
    ],
    "storm": [
        [
            "The sky over the {place} turned {gray|black}, and the first drops fell on {hero} and {his} {thing}.",
            "Nobody had expected a storm, least of all {hero}, who was out with {a thing}.",
        ],
        [
            "{hero} and {friend} ran {for shelter|as fast as they could}.",
            "The wind pulled at the {thing}, and {hero} held it with both hands.",
            "The water rose, and the bridge to the village was closed.",
        ],
        [
            "The {animal} knew {a dry cave|an empty barn|an old tower} and showed it to them.",
            "Under a big rock they found the {animal}, wet and {nervous|cold}.",
        ],
        [
            "There they {made a small fire|sat close together} and {counted the thunder|listened to the rain}.",
            "It was dark inside, so {friend} told {a funny story|a story about the sea}.",
        ],
        [
            "{friend} had {some bread|two pears|a piece of cheese}, and they cut it into three equal parts.",
            "The {animal} had nothing to share but its warm fur, and that was enough.",
        ],
        [
            "Then they heard somebody cry for help near the {place}.",
            "In the middle of the night a tree fell and blocked the door.",
        ],
        [
            "{hero} used the {thing} to {call the neighbors|show the way}, and soon everybody was safe.",
            "{hero} was afraid, but {he} went out with the {thing} and came back {an hour later|smiling}.",
        ],
        [
            "In the morning the air was clear, and a rainbow stood over the {place}.",
            "When the storm was over, the whole village {came to thank them|wanted to hear about it}.",
        ],
    ],
    "contest": [
        [
            "Every summer there was a race around the {place}, and the prize was {a thing}.",
            "A poster said that the fastest runner at the {place} would win {a thing}.",
        ],
        [
            "{hero} wanted to win, because {friend} had won {last year|twice before}.",
            "{friend} was the fastest {runner|person} in the village, and {hero} was not.",
        ],
        [
            "So {hero} asked the {animal} for {advice|a secret}.",
            "The {animal} offered to train with {hero} before breakfast.",
        ],
        [
            '"Do not look at the others," said the {animal}. "Look at the next step."',
            '"Start slowly," said the {animal}, "and keep something for the end."',
        ],
        [
            "On the day of the race {a hundred people|the whole village} stood along the road.",
            "When the bell rang, {friend} was {in front|ahead} and {hero} was last.",
        ],
        [
            "Halfway around, {friend} {fell over a root|hurt a foot} and could not go on.",
            "Near the end, {friend} stopped to {drink|rest} and {hero} came closer and closer.",
        ],
        [
            "{hero} stopped, took {friend} by the hand, and they {crossed the line|finished} together.",
            "{hero} could have won, but {he} turned around to help {friend}.",
        ],
        [
            "Nobody remembers who got the {thing}, but everybody remembers {that race|those two}.",
            "They hung the {thing} in the school, where all could see it, and the {animal} was very proud.",
        ],
    ],
}
_ENDINGS = [
    "And if you walk past the {place} today, you may {hear them laugh|see them there}.",
    "That night {hero} slept {well|deeply}, and the {animal} slept at {his} feet.",
    "{friend} wrote it all down, and that is how we know about it.",
    "From that day on, {hero} and the {animal} were {the best of friends|never apart}.",
    "It was a good day, and tomorrow would be {another one|even better}.",
]


def _story(rng: random.Random, cast: tuple[str, ...], plot: str) -> str:
    hero, friend, animal, nature, place, thing = cast
    girl = hero in _GIRLS
    bound = {
        "hero": hero,
        "friend": friend,
        "girl_or_boy": "girl" if girl else "boy",
        "he": "she" if girl else "he",
        "his": "her" if girl else "his",
        "him or her": "her" if friend in _GIRLS else "him",
        "animal": animal,
        "nature": nature,
        "a nature": f"a {nature}",
        "place": place,
        "thing": thing,
        "a thing": f"a {thing}",
    }
    steps = [rng.choice(_OPENINGS)]
    steps += [rng.choice(ways) for ways in _PLOTS[plot]]
    steps.append(rng.choice(_ENDINGS))
    return " ".join(_expand(step, bound, rng) for step in steps)


# ---------------------------------------------------------------- notes on GPUs and attention

_COURSE_QUESTION = (
    "What are the advantages of using flashattention kernels compared to the naive pytorch "
    "implementation?"
)
_COURSE_HINT = (
    " Think about the shared memory usage, the computation complexity, and the performance."
)

# topic -> (questions, title of a note, steps of the answer)
_TOPICS = {
    "flashattention": (
        [
            _COURSE_QUESTION + _COURSE_HINT,
            _COURSE_QUESTION + "{|" + _COURSE_HINT + "}",
            "Why is {flashattention|a flashattention kernel} faster than {naive attention|the naive implementation}?",
            "What does {flashattention|a flashattention kernel} do differently?",
        ],
        "flashattention",
        [
            [
                "The naive implementation writes the whole score matrix to global memory, reads it back "
                "for the softmax, and reads it once more for the product with the values.",
                "The naive implementation needs one kernel for the scores, one for the softmax and one for "
                "the output, and every one of them goes through global memory.",
                "In the naive implementation the score matrix has one entry for every pair of tokens, and "
                "all of them travel to global memory and back.",
            ],
            [
                "A flashattention kernel fuses these steps into a single launch and never stores the full "
                "score matrix.",
                "A flashattention kernel computes the same result block by block, so the full score matrix "
                "never exists.",
            ],
            [
                "It keeps {a tile|one block} of the queries, keys and values in shared memory, where "
                "{every thread of the block|all the threads} can reuse {it|them at low cost}.",
                "For the shared memory this means that {each tile of keys and values is loaded once|every "
                "tile is loaded a single time} and then used by all the rows of the block.",
                "The shared memory holds only a few small tiles, so its usage does not depend on the length "
                "of the sequence.",
            ],
            [
                "The computation complexity stays the same: the number of operations still grows with the "
                "square of the sequence length.",
                "The computation complexity does not change, because every query is still compared with "
                "every key.",
            ],
            [
                "The memory, however, grows only linearly, because {each row keeps|all that a row keeps is} "
                "a running maximum, a running sum and its output.",
                "What changes is the extra memory, which is linear in the sequence length instead of "
                "quadratic.",
            ],
            [
                "The online softmax makes this possible: when a new tile brings a larger maximum, the old "
                "sum and the old output are rescaled.",
                "This works because of the online softmax, which corrects the earlier results whenever it "
                "finds a larger maximum.",
            ],
            [
                "The performance is better because the kernel spends its time on arithmetic and not on "
                "waiting for memory.",
                "The performance improves most for long sequences, where the traffic of the naive "
                "implementation is largest.",
                "The performance gain comes from moving fewer bytes, not from doing less arithmetic.",
            ],
            [
                "With a causal mask the kernel can also skip the tiles above the diagonal, which saves "
                "{almost half|about half} of the work.",
                "In short, flashattention {trades|exchanges} a little extra arithmetic for far less memory "
                "traffic.",
                "In short, it gives the same answer with less memory and in less time.",
            ],
        ],
    ),
    "shared memory": (
        [
            "What is shared memory {good for|used for}?",
            "Why does a kernel {use shared memory|copy tiles into shared memory}?",
        ],
        "shared memory",
        [
            [
                "Shared memory is a small and fast memory inside each multiprocessor of the GPU.",
                "Shared memory sits next to the compute units and belongs to one block of threads.",
            ],
            [
                "A value that many threads need is loaded from global memory once and then read from there.",
                "The threads of a block use it to exchange values with each other.",
            ],
            [
                "A barrier is needed after the tile is written, so that no thread reads a value that is not "
                "there yet.",
                "Before a tile is replaced, all threads must have finished with it, and a barrier makes sure "
                "of that.",
            ],
            [
                "It is divided into banks, and {two threads of a warp|threads} that read different rows of one "
                "bank have to wait for each other.",
                "Its size is limited, so larger tiles leave room for fewer blocks at the same time.",
            ],
            [
                "A good kernel loads each byte once and uses it many times.",
                "When the tile size is chosen well, the arithmetic units never run out of data.",
            ],
        ],
    ),
    "kv cache": (
        [
            "What is a key and value cache?",
            "Why does {a language model|the decode step} need a key and value cache?",
            "What limits the speed of decoding?",
        ],
        "the key and value cache",
        [
            [
                "The key and value cache stores the keys and values of all the tokens that the model has "
                "already seen.",
                "During generation the keys and values of old tokens do not change, so they are kept in a "
                "cache.",
            ],
            [
                "Without the cache, each new token would run the whole text through the model again.",
                "With the cache, a new token only computes its own query, key and value.",
            ],
            [
                "The prefill step reads the prompt in one go and fills the cache, and it is limited by "
                "arithmetic.",
                "First the prompt is processed in parallel, and this determines the time to the first token.",
            ],
            [
                "The decode step reads the whole cache to produce a single token, and it is limited by memory "
                "bandwidth.",
                "After that, every decode step has one query and many keys, so its time is the time to read "
                "the cache.",
            ],
            [
                "When the batch is small, the cache is split over several blocks, and a second kernel combines "
                "their results.",
                "The cache grows with {the length of the text and the size of the batch|every token}, and on "
                "long texts it needs more memory than the weights.",
            ],
            [
                "Several query heads may share one key head, which makes the cache smaller.",
                "A good decode kernel reads each cached value once and in place, without copying it first.",
            ],
        ],
    ),
    "softmax": (
        [
            "Why does the softmax subtract the maximum?",
            "What is the online softmax?",
            "How does a kernel compute {a softmax|the softmax of a row}?",
        ],
        "the softmax",
        [
            [
                "The softmax turns a row of scores into weights that sum to one.",
                "The softmax takes the exponential of each score and divides it by the sum of all of them.",
            ],
            [
                "The exponential of a large score would overflow, so the maximum of the row is subtracted "
                "first.",
                "Subtracting the maximum does not change the result, but it keeps every exponential at or "
                "below one.",
            ],
            [
                "The plain version reads the row three times: for the maximum, for the sum and for the "
                "division.",
                "One block handles one row, and its threads combine their partial results in a tree.",
            ],
            [
                "The online version reads the row once and keeps a running maximum and a running sum.",
                "In the online version each new maximum rescales the sum that was collected before.",
            ],
            [
                "A row that is masked completely has no largest score, and its output is set to zero.",
                "Inside a warp the reduction uses shuffles, which need no shared memory at all.",
            ],
        ],
    ),
    "cuda": (
        [
            "How is a CUDA program organized?",
            "What is a {warp|block of threads}?",
            "How do I make a CUDA kernel {fast|faster}?",
        ],
        "CUDA",
        [
            [
                "A CUDA kernel is a function that many threads run at the same time.",
                "The host launches a kernel on a grid of blocks, and each block has up to a thousand threads.",
            ],
            [
                "The threads of a block run in groups of thirty-two, and such a group is called a warp.",
                "A block stays on one multiprocessor, and its threads can wait for each other.",
            ],
            [
                "Neighboring threads should read neighboring addresses, because then one access serves the "
                "whole warp.",
                "If the threads of a warp take different branches, the warp runs both of them, one after the "
                "other.",
            ],
            [
                "Registers are the fastest memory, shared memory comes next, and global memory is large but "
                "slow.",
                "While one warp waits for memory, the multiprocessor runs another one.",
            ],
            [
                "Copies can run in the background, so that the next tile arrives while the current one is "
                "being used.",
                "Tensor cores multiply small matrices in one instruction, and they want their data in a fixed "
                "order.",
            ],
            [
                "Measure first, with many runs and a warm-up, and only then change the code.",
                "A fast kernel that gives a wrong answer is worth nothing, so every change is tested first.",
            ],
        ],
    ),
    "matrix product": (
        [
            "Why is a tiled matrix product faster?",
            "How does a kernel multiply two matrices?",
        ],
        "the matrix product",
        [
            [
                "A matrix product computes one dot product for each entry of the result.",
                "Each entry of the result needs a whole row of the first matrix and a column of the second.",
            ],
            [
                "The simple kernel gives one entry to each thread and reads all of its inputs from global "
                "memory.",
                "If every thread reads its inputs alone, the same values are loaded again and again.",
            ],
            [
                "The tiled kernel loads {a square|one tile} of each matrix into shared memory and uses it for "
                "{a whole tile of results|many results}.",
                "With tiles, a value is loaded once and serves a full row or column of threads.",
            ],
            [
                "At the edges the tile is not full, so the kernel fills it with zeros.",
                "Each thread can also compute several results, which keeps more values in registers.",
            ],
            [
                "A large product is limited by arithmetic, and a product with a single row is limited by "
                "memory.",
                "The larger the tile, the more often each value is used, until the shared memory is full.",
            ],
        ],
    ),
    "attention": (
        [
            "What does attention {do|compute}?",
            "What is a causal mask?",
            "Why do we {use|need} several heads?",
        ],
        "attention",
        [
            [
                "Attention lets every token collect information from the other tokens.",
                "In attention each token asks a question, and the other tokens answer it.",
            ],
            [
                "The query of a token is compared with all the keys, and the results are called scores.",
                "A score is the dot product of a query and a key, divided by the square root of the head size.",
            ],
            [
                "The softmax turns the scores into weights, and the output is the weighted sum of the values.",
                "After the softmax, a token with a large weight gives more of its value to the output.",
            ],
            [
                "A causal mask hides the future, so that a token sees only itself and what came before.",
                "When a text is generated from left to right, a causal mask keeps each token from looking "
                "ahead.",
            ],
            [
                "Several heads do this side by side, and each can look for something else.",
                "Each head works on its own part of the hidden state, and the parts are joined at the end.",
            ],
            [
                "The work grows with the square of the sequence length, and this is why fast kernels matter.",
                "Shorter sequences in a batch are padded, and the padding has to be masked as well.",
            ],
        ],
    ),
}


def _note(rng: random.Random, topic: str) -> str:
    questions, title, steps = _TOPICS[topic]
    answer = " ".join(_expand(rng.choice(ways), {}, rng) for ways in steps)
    if topic == "flashattention" or rng.random() < 0.6:
        return f"{_expand(rng.choice(questions), {}, rng)} {answer}"
    return f"{rng.choice(['A note', 'A few words', 'Some notes'])} on {title}: {answer}"


# ---------------------------------------------------------------- documents


def documents(count: int, seed: int = 0) -> list[str]:
    """``count`` documents, the same ones for the same seed.

    About half are stories; the rest are notes and questions with answers. One in four has a second
    piece after an empty line (of a story: the same cast in another plot), so that a text may go on
    after its first ending.
    """
    rng = random.Random(seed)
    docs = []
    for _ in range(count):
        pieces = 2 if rng.random() < 0.25 else 1
        if rng.random() < 0.55:
            cast = rng.choice(_CASTS)
            texts = [_story(rng, cast, plot) for plot in rng.sample(list(_PLOTS), pieces)]
        else:
            topics = rng.sample(list(_TOPICS), pieces)
            if rng.random() < 0.25:  # what the course asks about comes up more often
                topics = ["flashattention"]
            texts = [_note(rng, topic) for topic in topics]
        docs.append("\n\n".join(texts))
    return docs


def _expand(text: str, bound: dict[str, str], rng: random.Random) -> str:
    def choose(match: re.Match[str]) -> str:
        inside = match.group(1)
        if inside in bound:
            return bound[inside]
        if "|" not in inside:
            raise ValueError(f"{{{inside}}} is bound to nothing in: {text}")
        return rng.choice(inside.split("|"))

    # from the inside out; a chosen alternative that is dropped later costs nothing
    while _INNERMOST.search(text):
        text = _INNERMOST.sub(choose, text)
    return text


def words() -> str:
    """The text of words.txt: every word of the corpus once, sorted, in lines of at most 100 characters."""
    found = sorted(set(re.findall(r"[\w-]+", " ".join(documents(2000)))))
    return textwrap.fill(" ".join(found), 100, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    print("\n\n----\n\n".join(documents(12, seed=1)))
