"""Prompts of our own, and prose of any length.

Knows patterns that make many different prompts, so that no prompt has to repeat. Does not know
tokens: lengths are characters.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_TASKS = (
    "Explain {topic} to a curious twelve-year-old.",
    "Write a short story in which {topic} changes somebody's day.",
    "List seven facts about {topic}, one a line, numbered.",
    "Compare {topic} with {other} in a table of five rows.",
    "Write a Python function that models {topic}; give it a docstring and an example.",
    "Write an email that invites colleagues to a talk about {topic}.",
    "What are the three hardest questions about {topic}, and how would you begin to answer them?",
    "Write a dialogue between an expert on {topic} and an expert on {other}.",
    "Turn what you know about {topic} into JSON with the keys name, purpose and examples.",
    "Describe {topic} step by step, as for a manual.",
    "Write a poem of eight lines about {topic}.",
    "Give arguments for and against {topic}, then decide.",
    "Summarise the history of {topic} in five sentences.",
    "Plan a lesson of one hour about {topic}, minute by minute.",
    "Which mistakes do beginners make with {topic}? Explain how to avoid each.",
    "Write an SQL schema for a collection of records about {topic}, with comments.",
)
_TOPICS = (
    "tides",
    "a lighthouse",
    "sourdough bread",
    "binary search",
    "a city's water supply",
    "chess openings",
    "the postal service",
    "photosynthesis",
    "train timetables",
    "compound interest",
    "bird migration",
    "a hash table",
    "garden soil",
    "the printing press",
    "night shifts",
    "rainbows",
    "version control",
    "mountain rescue",
    "the metric system",
    "jazz improvisation",
    "a weather station",
    "public libraries",
    "beekeeping",
    "error messages",
    "glass blowing",
    "ocean currents",
    "unit tests",
    "a neighbourhood market",
    "solar panels",
    "map projections",
    "knitting patterns",
    "volcanoes",
    "traffic lights",
    "message queues",
    "old bridges",
    "vaccination",
    "paper folding",
    "starlight",
    "team meetings",
    "a bicycle workshop",
)
_SUBJECTS = (
    "The harbour office",
    "A small bakery",
    "The night train",
    "Our research group",
    "The town archive",
    "A retired engineer",
    "The school orchestra",
    "The weather service",
    "An apprentice",
    "The museum",
)
_VERBS = (
    "keeps a record of",
    "has long argued about",
    "measures",
    "repairs",
    "once lost",
    "compares every spring",
    "teaches visitors about",
    "publishes figures on",
    "depends on",
    "is proud of",
)
_CLAUSES = (
    "because nobody else would do it",
    "although the budget is small",
    "and the results are written down by hand",
    "which surprised the committee",
    "so that the next winter is easier",
    "while the neighbours watch",
    "as the law has asked since the reform",
    "but only on the second Monday of the month",
)
_QUESTIONS = (
    "Summarise the notes above in three sentences.",
    "Which of the notes above contradict one another? Explain.",
    "Write a letter to the editor that uses three of the notes above.",
    "List every subject named above with what it does.",
    "Continue the notes above with one more paragraph in the same manner.",
)


def prompts(seed: int) -> Iterator[str]:
    """Different prompts in an order drawn with `seed`, over 600 of them."""
    pairs = [(task, topic) for task in range(len(_TASKS)) for topic in range(len(_TOPICS))]
    random.Random(f"prompts {seed}").shuffle(pairs)
    for task, topic in pairs:
        other = _TOPICS[(topic + 1 + task) % len(_TOPICS)]
        yield _TASKS[task].format(topic=_TOPICS[topic], other=other)


def prose(characters: int, seed: str) -> str:
    """About so many characters of notes and a question about them; the same for the same seed.

    Never longer than asked for, and never empty.
    """
    rng = random.Random(seed)
    question = rng.choice(_QUESTIONS)
    room = characters - len(question) - 2
    parts: list[str] = []
    length = 0
    while length < room:
        sentence = (
            f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_TOPICS)} "
            f"{rng.choice(_CLAUSES)}, in its {rng.randrange(2, 99)}th year."
        )
        parts.append(sentence)
        length += len(sentence) + 1
    if not parts:
        return question[: max(1, characters)]
    return f"{' '.join(parts)[:room]}\n\n{question}"


def warm_up(index: int) -> str:
    """A prompt that no data set has, so that warming up fills no prefix that is measured."""
    return f"Warming up, number {index}: count slowly from {index} to {index + 20}."
