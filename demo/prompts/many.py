"""Writes any number of training prompts: wordings times topics, none worded like a held-out prompt.

`make demo` does not need it: ten minutes on two cores have enough with `train.jsonl`. A long run on a GPU
does, see docs/results.md. The same count and seed give the same file. No prompt begins with the words of a
held-out one.

    python demo/prompts/many.py --count 40000 --seed 0 --output build/many.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

HELD_OUT = Path(__file__).with_name("held_out.jsonl")
# Prompts that begin with the same words as a held-out one count as worded like it.
OPENING_WORDS = 3
# Far below what the wordings and topics make, so that draws do not search for the last ones.
MOST = 200_000


def _split(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(";") if part.strip()]


THINGS = _split("""
    photosynthesis; gravity; inflation; a black hole; a volcano; an earthquake; the water cycle; a rainbow;
    thunder; a hurricane; a tornado; the greenhouse effect; climate change; an ecosystem; a food chain; a
    cell; DNA; a gene; evolution; natural selection; a virus; bacteria; a vaccine; the immune system; the
    human heart; the lungs; the brain; the digestive system; a muscle; a bone; the skin; sleep; a dream;
    memory; stress; a balanced diet; protein; a vitamin; cholesterol; exercise; yoga; meditation; an atom; a
    molecule; an electron; a magnet; friction; energy; heat; light; sound; a laser; a battery; a solar
    panel; a wind turbine; nuclear power; a lever; a pulley; an engine; a jet engine; a bicycle; a car; a
    train; an airplane; a helicopter; a submarine; a rocket; a satellite; a telescope; a microscope; the
    Moon; Mars; Jupiter; Venus; Mercury; Neptune; a comet; an asteroid; a galaxy; the Milky Way; the Big
    Bang; the solar system; an eclipse; the seasons; the atmosphere; the ozone layer; a glacier; a desert; a
    rainforest; an ocean current; a coral reef; a river delta; a mountain range; soil; a fossil; a dinosaur;
    a mammal; a reptile; a whale; a dolphin; a shark; an octopus; a bee; an ant; a butterfly; a spider; an
    eagle; a penguin; an owl; a horse; a cow; a dog; a cat; an elephant; a lion; a wolf; a bear; a frog; a
    tree; a flower; a seed; a mushroom; grass; bamboo; cotton; coffee; tea; chocolate; cheese; butter;
    sugar; salt; honey; rice; wheat; corn; a potato; a tomato; an apple; a banana; yeast; fermentation; a
    computer; the internet; an algorithm; a database; an operating system; a programming language; a
    compiler; a web browser; a search engine; artificial intelligence; machine learning; a neural network; a
    robot; encryption; a password; a computer virus; cloud computing; a touch screen; a printer; a camera; a
    microphone; a radio; television; a microwave oven; a refrigerator; an elevator; a bridge; a dam; a
    skyscraper; concrete; steel; glass; paper; plastic; recycling; money; a bank; a loan; interest; a tax;
    the stock market; a budget; supply and demand; trade; globalization; unemployment; a company; marketing;
    a brand; insurance; a contract; a law; a constitution; democracy; an election; a parliament; a
    president; a king; a city; a village; a school; a university; a library; a museum; a hospital; a
    pharmacy; a police officer; a firefighter; a judge; a lawyer; a doctor; a nurse; a teacher; an engineer;
    an architect; a farmer; a scientist; a journalist; an artist; a musician; a poem; a novel; a short
    story; a fable; a myth; a metaphor; a simile; irony; a symphony; jazz; opera; ballet; theater; cinema;
    photography; painting; sculpture; architecture; the Renaissance; the Industrial Revolution; the French
    Revolution; the Roman Empire; ancient Egypt; ancient Greece; the Middle Ages; the Silk Road; World War
    I; World War II; the Cold War; the Great Wall of China; the Statue of Liberty; the Olympic Games; chess;
    football; basketball; tennis; swimming; hiking; camping; gardening; cooking; baking; knitting;
    philosophy; ethics; logic; psychology; sociology; biology; chemistry; physics; mathematics; geometry;
    algebra; statistics; probability; a prime number; a fraction; a triangle; a circle; pi; infinity; a map;
    a compass; a clock; a calendar; time zones; language; grammar; an adjective; a verb; an alphabet;
    translation; friendship; kindness; honesty; courage; patience; teamwork; leadership; creativity;
    happiness; empathy; gratitude; trust
""")

ACTIVITIES = _split("""
    learn a new language; save money; cook rice; bake a cake; make a cup of coffee; brew tea; boil an egg;
    make a salad; grow tomatoes; plant a tree; water house plants; clean a kitchen; organize a desk; wash a
    car; change a tire; ride a bicycle; swim; run a marathon; start jogging; stretch in the morning; fall
    asleep faster; wake up early; reduce stress; stay focused; study for an exam; write an essay; write a
    letter; write a poem; write a resume; prepare for a job interview; give a speech; lead a meeting; make
    new friends; apologize to a friend; plan a birthday party; plan a trip; pack a suitcase; read a map;
    take a good photo; draw a face; play the guitar; learn chess; solve a puzzle; train a dog; take care of
    a cat; feed birds; save water; save electricity; recycle at home; reduce waste; eat healthier; drink
    more water; lose weight; build muscle; choose a bicycle; buy a used car; rent an apartment; paint a
    wall; hang a picture; fix a leaking tap; remove a stain; iron a shirt; sew on a button; set a table;
    host a dinner; raise a child; teach a child to read; use a library; learn to type; back up files; choose
    a password; install a program; build a website; start a blog; learn programming; debug a program; start
    a business; make a budget; pay off debt; invest a little money; write a business plan; find a job; work
    from home; manage time; break a bad habit; build a good habit; keep a diary; read more books; remember
    names; learn history; understand a graph; do a science experiment; observe the stars; make a kite; fold
    a paper airplane; make a fire; survive in the woods; treat a small burn; clean a wound; cross a street
    safely
""")

PLURALS = _split("""
    fruits; vegetables; animals that live in the sea; birds; insects; mammals; countries in Europe;
    countries in Africa; countries in Asia; capitals; rivers; mountains; oceans; planets; inventions;
    scientists; writers; painters; composers; musical instruments; sports; board games; hobbies; jobs;
    school subjects; programming languages; kitchen tools; garden tools; pieces of furniture; kinds of
    weather; colors; shapes; emotions; parts of the body; healthy snacks; breakfast dishes; desserts;
    drinks; soups; spices; kinds of bread; kinds of cheese; trees; flowers; gemstones; metals; sources of
    energy; means of transport; holidays; languages; dances; kinds of music; books; movies for families;
    good habits; study techniques; ways to relax; ways to say thank you; gifts for a friend; reasons to
    exercise; reasons to read; benefits of sleep; benefits of trees; uses of water; uses of a computer;
    rules for a classroom; rules for safe driving; qualities of a good leader; qualities of a good teacher;
    questions for an interview; ideas for a story; names for a cat; names for a dog; titles for a book about
    the sea; slogans for a bakery; adjectives that describe a forest; verbs of movement; words that rhyme
    with "day"; things in a kitchen; things in an office; things to do on a rainy day; things to see in a
    museum; items for a first aid kit; items for a hike; topics for a speech; causes of pollution; effects
    of climate change; famous buildings
""")

TASKS = _split("""
    adds two numbers; finds the largest number in a list; finds the smallest number in a list; reverses a
    string; reverses a list; counts the vowels in a string; counts the words in a sentence; checks if a
    number is even; checks if a number is prime; checks if a word is a palindrome; computes the factorial of
    a number; computes the average of a list; computes the median of a list; sorts a list of numbers; sorts
    words by length; removes duplicates from a list; merges two lists; merges two dictionaries; finds common
    elements of two lists; converts Celsius to Fahrenheit; converts miles to kilometers; converts minutes to
    hours; reads a text file; writes a line to a file; counts the lines of a file; parses a CSV file; loads
    a JSON file; prints the numbers from 1 to 10; prints a triangle of stars; prints a countdown; computes
    the area of a circle; computes the area of a rectangle; computes compound interest; generates a random
    password; rolls two dice; picks a random word; checks if a year is a leap year; prints the current date;
    computes an age from a birth year; swaps two variables; squares every number in a list; filters the even
    numbers of a list; sums the digits of a number; computes the greatest common divisor; prints the
    Fibonacci numbers; does a binary search; does a bubble sort; does a linear search; capitalizes every
    word; replaces spaces with underscores; counts letters with a dictionary; asks the user for a name;
    checks a password; draws a multiplication table; implements a stack; implements a queue; defines a class
    for a bank account; defines a class for a dog; defines a class for a rectangle; handles a division by
    zero; validates an email address; flattens a nested list; transposes a matrix; multiplies two matrices;
    finds the second largest number; checks if two words are anagrams; counts down with a while loop; zips
    two lists into a dictionary; computes powers of two; converts a number to binary; removes punctuation
""")

CODE_TOPICS = _split("""
    a for loop; a while loop; a list; a dictionary; a tuple; a set; a function; a return value; an argument;
    a class; an object; inheritance; a module; a package; an exception; recursion; a list comprehension; a
    lambda function; a decorator; a generator; string formatting; slicing; indexing; a boolean; an if
    statement; a variable; an integer; a float; a string; a file; a unit test; a virtual environment; a git
    commit; a git branch; an API; an HTTP request; a JSON file; a regular expression; a hash table; a linked
    list; a binary tree; a stack; a queue; sorting; Big O; an SQL query; a primary key; a join; an HTML tag;
    a CSS selector; a JavaScript function; an array; a pointer; a thread; a debugger; a code comment; a
    constant; a global variable; a default argument; type hints; an operator
""")

QUESTIONS = _split("""
    the capital of {country}; the official language of {country}; the currency of {country}; the largest
    city of {country}; a famous dish from {country}; a famous landmark in {country}; the population of
    {country}; the climate of {country}; the flag of {country}; the history of {country}; a neighbor of
    {country}; a famous person from {country}; a river in {country}
""")
COUNTRIES = _split("""
    France; Germany; Italy; Portugal; Greece; Poland; Sweden; Norway; Finland; Denmark; Ireland; Austria;
    Switzerland; Belgium; the Netherlands; Hungary; Romania; Turkey; Russia; Ukraine; Egypt; Morocco; Kenya;
    Nigeria; South Africa; Ethiopia; Ghana; India; China; Japan; South Korea; Thailand; Vietnam; Indonesia;
    the Philippines; Australia; New Zealand; Canada; Mexico; Brazil; Argentina; Chile; Peru; Colombia; Cuba;
    Iran; Iraq; Israel; Saudi Arabia
""")

# The openings leave room for a sentence about who asks, as people write it.
WHO = _split("""
    I am ten years old.; I am a student.; I teach third grade.; I am new to this.; This is for my homework.;
    I have an exam tomorrow.; We discussed this in class.; I am writing an article.; I am curious.; Hello!;
    Hi there.; Good morning.; My friend asked me this.; I only have a minute.; I am preparing a talk.; I
    read about it yesterday.; I never learned this.; My daughter wants to know.; English is not my first
    language.; Thanks for helping me.
""")

EXPLAIN = _split("""
    What is {thing}?; What exactly is {thing}?; Explain {thing}.; Explain {thing} to a child.; Explain
    {thing} briefly.; Explain {thing} step by step.; Describe {thing}.; Describe {thing} in two sentences.;
    Define {thing}.; Tell me about {thing}.; Tell me something interesting about {thing}.; Tell me three
    facts about {thing}.; Write a paragraph about {thing}.; Write a short text about {thing}.; Write an
    introduction to {thing}.; Write a short story about {thing}.; Write a poem about {thing}.; Write a
    dialogue about {thing}.; Give me an overview of {thing}.; Give a simple definition of {thing}.; Give me
    an example of {thing}.; Summarize what people should know about {thing}.; Summarize {thing} in one
    paragraph.; Why is {thing} important?; Why do people care about {thing}?; How does {thing} work?; How
    would you describe {thing} to a beginner?; What do we know about {thing}?; What makes {thing} special?;
    What are the main features of {thing}?; What role does {thing} play in daily life?; What is the history
    of {thing}?; What is the purpose of {thing}?; Can you explain {thing}?; Can you tell me more about
    {thing}?; Could you explain what {thing} is?; Could you describe {thing} in plain words?; Please explain
    {thing}.; Please describe {thing} in detail.; Please write a few lines about {thing}.; I want to learn
    about {thing}.; I do not understand {thing}.; I would love to hear about {thing}.; Teach me about
    {thing}.; Talk about {thing}.; Discuss {thing}.; Compare {thing} and {other}.; What is the difference
    between {thing} and {other}?; How are {thing} and {other} related?; Which is more useful, {thing} or
    {other}?; Is {thing} dangerous?; Is {thing} still important today?; Do I need to know about {thing}?;
    Imagine a world without {thing}.; What would happen without {thing}?; Let us talk about {thing}.;
    Introduce {thing} to new students.; Create a short lesson about {thing}.; Make a short quiz about
    {thing}.; Prepare a summary about {thing}.
""")
HOW_TO = _split("""
    How do I {do}?; How can I {do}?; How should I {do}?; How to {do}?; What is the best way to {do}?; What
    do I need to {do}?; What is the first step to {do}?; Give me tips to {do}.; Give me some advice. I want
    to {do}.; Explain how to {do}.; Describe how to {do}.; Tell me how to {do}.; Show me how to {do}.; Teach
    me to {do}.; Write instructions to {do}.; Write a guide on how to {do}.; Write a short email about how
    to {do}.; List the steps to {do}.; Please explain how to {do}.; Please give me a plan to {do}.; Can you
    help me {do}?; Can I {do} without help?; I want to {do}.; I have to {do}. Where do I start?; I tried to
    {do}, but I failed.; Why should I {do}?; Is it hard to {do}?; Is it a good idea to {do}?; What mistakes
    do people make when they {do}?; Create a checklist to {do}.; Make a weekly plan to {do}.; Suggest three
    ways to {do}.; My goal is to {do}.
""")
LIST = _split("""
    List {n} {things}.; Name {n} {things}.; Give me {n} {things}.; Give {n} examples of {things}.; Write
    down {n} {things}.; What are {n} {things}?; What are some {things}?; Which {things} do you know?; Tell
    me {n} {things}.; Make a list of {n} {things}.; Create a list of {things}.; Make a numbered list of
    {things}.; Suggest {n} {things}.; Recommend {n} {things}.; Please list {n} {things}.; Please name {n}
    {things} and say why.; Can you list {n} {things}?; Can you name {n} {things}?; Could you give me {n}
    {things}?; Think of {n} {things}.; Show me {n} {things}.; I need {n} {things}.; I am looking for
    {things}.; Describe {n} {things}.; List {n} {things} with a short explanation.; Write a bulleted list of
    {things}.; Find {n} {things}.; Help me think of {n} {things}.; Choose {n} {things} for a class.
""")
CODE = _split("""
    Write a Python function that {task}.; Write a Python program that {task}.; Write code that {task}.;
    Write a function in JavaScript that {task}.; Write a short script that {task}.; Create a Python function
    that {task}.; Create a program that {task}.; Implement a function that {task}.; Show me Python code that
    {task}.; Show a function that {task}.; Give me a Python function that {task}.; Give an example of code
    that {task}.; Can you write a function that {task}?; Can you write Python code that {task}?; Could you
    write a program that {task}?; Please write a Python function that {task}.; Please write code that {task}
    and explain it.; I want a program that {task}.; How do I write a function that {task}?; How can I write
    Python code that {task}?; Make a Python script that {task}.; Define a Python function that {task}.; Code
    a small program that {task}.; Write a class with a method that {task}.; Write a Java method that
    {task}.; Write a C function that {task}.; Explain a program that {task}.
""")
CODE_WHAT = _split("""
    What is {topic}?; What is {topic} in programming?; Explain {topic} with an example.; Explain {topic} in
    Python.; How do I use {topic}?; How does {topic} work?; When should I use {topic}?; Show me an example
    of {topic}.; Give an example of {topic} in Python.; Write an example that uses {topic}.; Why do
    programmers use {topic}?; Can you explain {topic}?; Please explain {topic} to a beginner.; Tell me about
    {topic}.; Describe {topic} with code.; What are the advantages of {topic}?; What are common errors with
    {topic}?; I do not understand {topic}.
""")
ASK = _split("""
    What is {it}?; Tell me {it}.; Can you tell me {it}?; Please tell me {it}.; What do you know about {it}?;
    Name {it}.; Describe {it}.; Write one sentence about {it}.; Give me a fact about {it}.; Explain {it}.; I
    want to know {it}.; Could you tell me about {it}?; Do you remember {it}?; Which facts describe {it}?;
    Write a paragraph about {it}.; Question: what is {it}?
""")
REWRITE = _split("""
    Rewrite this sentence: {s}; Rewrite this in the past tense: {s}; Rewrite this in the future tense: {s};
    Rewrite the sentence as a question: {s}; Make this sentence more polite: {s}; Make this more formal:
    {s}; Make this sentence shorter: {s}; Make this sentence longer: {s}; Correct the grammar: {s}; Correct
    this: {s}; Fix the spelling: {s}; Turn this into a question: {s}; Turn this into a poem: {s}; Change the
    tone to friendly: {s}; Paraphrase this: {s}; Paraphrase: {s}; Translate into simple English: {s}; Say
    this in other words: {s}; Improve this sentence: {s}; Summarize: {s}; Write the opposite: {s}; Replace
    the verb: {s}; Edit this text: {s}; Can you rewrite this? {s}; Can you improve this text? {s}; Could you
    make this clearer? {s}; Please correct this: {s}; Please rewrite this for a child: {s}; Write this in a
    professional style: {s}; Express this more kindly: {s}; Continue this story: {s}; Write the next
    sentence: {s}; Explain this sentence: {s}; What does this mean? {s}
""")
SUBJECTS = _split("""
    The teacher; My neighbor; The old man; A young girl; Our manager; The dog; The children; The company; My
    sister; The doctor; The tourists; A student; The farmer; The train; The cook; Our team; The visitors;
    The king; The cat; Everybody
""")
VERBS = _split("""
    likes; buys; forgets; sees; loses; brings; cleans; repairs; sells; wants; finds; paints; watches; opens;
    carries; needs
""")
OBJECTS = _split("""
    the red book; a new car; the old house; the letter; the heavy bag; fresh bread; the broken window; a
    good answer; the garden; the report; two tickets; the blue coat; the last piece of cake; a quiet place;
    the long road; the key
""")
WHEN = _split("""
    every morning; on Monday; after lunch; in the evening; before the meeting; because it is raining; with
    great care; without any help; when nobody looks; as soon as possible; during the holidays; in the city
""")
NAMES = _split(
    "Anna; Ben; Clara; David; Emma; Felix; Grace; Henry; Ivy; James; Kate; Leo; Maria; Noah; Olivia; Paul"
)
GOODS = _split(
    "apples; pencils; cookies; marbles; books; stickers; coins; cards; flowers; eggs; candles; stamps"
)
SUMS = _split("""
    What is {a} plus {b}?; What is {a} times {c}?; What is {b} minus {c}?; Calculate {a} + {b}.; Calculate
    {a} * {c}.; Compute {a} minus {c}.; Add {a} and {b}.; Multiply {a} by {c}.; Divide {d} by {c}.; How much
    is {a} plus {b}?; {name} has {a} {goods} and buys {b} more. How many {goods} are there now?; {name} has
    {b} {goods} and gives away {c}. How many {goods} are left?; {name} buys {c} boxes with {a} {goods} each.
    How many {goods} is that?; {name} shares {d} {goods} among {c} friends. How many does each friend get?;
    A box holds {a} {goods}. How many {goods} are in {c} boxes?; If {c} {goods} cost {d} dollars, what does
    one cost?; A train travels {a} kilometers in one hour. How far does it travel in {c} hours?; A ticket
    costs {c} dollars. How much do {a} tickets cost?; What is {c} percent of {b}?; Solve for x: x + {c} =
    {b}; Which number is larger, {a} or {b}?; Write the number {b} in words.; Round {b}.{c} to the nearest
    whole number.; Find the average of {a}, {b} and {c}.; Is {a} an even number?; Count from {c} to {a}.;
    Explain how to add {a} and {b}.
""")


def _explanation(pick: random.Random) -> str:
    if pick.random() < 0.35:
        return pick.choice(HOW_TO).format(do=pick.choice(ACTIVITIES))
    thing, other = pick.sample(THINGS, 2)
    return pick.choice(EXPLAIN).format(thing=thing, other=other)


def _lists(pick: random.Random) -> str:
    number = pick.choice(["three", "four", "five", "six", "ten", "3", "5"])
    return pick.choice(LIST).format(n=number, things=pick.choice(PLURALS))


def _code(pick: random.Random) -> str:
    if pick.random() < 0.4:
        return pick.choice(CODE_WHAT).format(topic=pick.choice(CODE_TOPICS))
    return pick.choice(CODE).format(task=pick.choice(TASKS))


def _qa(pick: random.Random) -> str:
    subject = pick.choice(QUESTIONS).format(country=pick.choice(COUNTRIES))
    return pick.choice(ASK).format(it=subject)


def _rewriting(pick: random.Random) -> str:
    words = (pick.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, WHEN))
    sentence = " ".join(words) + "."
    return pick.choice(REWRITE).format(s=f'"{sentence}"' if pick.random() < 0.3 else sentence)


def _arithmetic(pick: random.Random) -> str:
    return pick.choice(SUMS).format(
        a=pick.randint(2, 99),
        b=pick.randint(20, 400),
        c=pick.randint(2, 12),
        d=pick.randint(2, 12) * 12,
        name=pick.choice(NAMES),
        goods=pick.choice(GOODS),
    )


# share of each domain, in hundredths
DOMAINS: dict[str, tuple[int, Callable[[random.Random], str]]] = {
    "explanation": (34, _explanation),
    "code": (20, _code),
    "lists": (16, _lists),
    "rewriting": (12, _rewriting),
    "arithmetic": (10, _arithmetic),
    "qa": (8, _qa),
}


def opening(prompt: str) -> tuple[str, ...]:
    """First words of a prompt in lower case: what makes it worded like another."""
    return tuple(prompt.casefold().split()[:OPENING_WORDS])


def draw_prompts(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Yields `count` distinct prompts, {"id", "domain", "prompt"} each.

    Raises:
        ValueError: more are asked for than `MOST`.
    """
    if not 1 <= count <= MOST:
        raise ValueError(f"--count {count}: ask for 1 to {MOST} prompts")
    pick = random.Random(seed)
    with HELD_OUT.open(encoding="utf-8") as lines:
        held_out = {opening(json.loads(line)["prompt"]) for line in lines}
    names, shares = list(DOMAINS), [share for share, _ in DOMAINS.values()]
    seen: set[str] = set()
    while len(seen) < count:
        domain = pick.choices(names, shares)[0]
        bare = DOMAINS[domain][1](pick)
        prompt = f"{pick.choice(WHO)} {bare}" if pick.random() < 0.15 else bare
        if prompt not in seen and not {opening(bare), opening(prompt)} & held_out:
            seen.add(prompt)
            yield {"id": f"many-{len(seen):06}", "domain": domain, "prompt": prompt}


def main(argv: list[str] | None = None) -> int:
    """Writes the file; an existing one is replaced."""
    parser = argparse.ArgumentParser(description="write training prompts, wordings times topics")
    parser.add_argument("--count", type=int, default=40_000, help="how many (40000)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSONL")
    args = parser.parse_args(argv)
    try:
        lines = [json.dumps(prompt) + "\n" for prompt in draw_prompts(args.count, args.seed)]
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("".join(lines), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(lines)} prompts: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
