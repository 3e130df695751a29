"""The families of demo prompts: each is a few templates, crossed with a word list of ``prompt_words.py``."""

from __future__ import annotations

from dataclasses import dataclass

from specforge.data.demo import prompt_words as words


@dataclass(frozen=True)
class Family:
    """One kind of request: ``templates`` hold ``{x}`` (and perhaps ``{n}``); each word gets ``per_word`` of them."""

    name: str
    slots: tuple[str, ...]
    templates: tuple[str | tuple[str, str], ...]
    per_word: int


FAMILIES = (
    Family(
        "explain",
        words.CONCEPTS,
        (
            "Explain {x} in simple terms.",
            "Can you explain {x} to a ten year old?",
            "How would you describe {x} to a beginner?",
            "Explain {x} in two or three sentences.",
            "Give a simple explanation of {x} with an example.",
            "What should everyone know about {x}?",
        ),
        2,
    ),
    Family(
        "definition",
        words.CONCEPTS,
        ("What is {x}?", "Give a short definition of {x}.", 'What does the term "{x}" mean?', "Define {x} in one sentence."),
        1,
    ),
    Family(
        "facts",
        words.FACT_SUBJECTS,
        (
            "Tell me {n} interesting facts about {x}.",
            "What are some fun facts about {x}?",
            "Give me {n} short facts about {x}.",
            "What makes {x} special?",
        ),
        2,
    ),
    Family(
        "list",
        words.LIST_THINGS,
        ("List {n} {x}.", "Give me {n} {x}.", "What are some {x}?", "Can you suggest {n} {x}?", "I need a list of {x}."),
        3,
    ),
    Family(
        "story",
        words.STORY_SUBJECTS,
        (
            "Write a short story about {x}.",
            "Tell me a story about {x}.",
            "Write a bedtime story about {x}.",
            "Write a very short story about {x} with a happy ending.",
            "Write the first paragraph of a story about {x}.",
        ),
        3,
    ),
    Family(
        "email",
        words.EMAIL_SUBJECTS,
        ("Write a short email to {x}.", "Help me write a polite email to {x}.", "Draft an email to {x}.", "Write a formal email to {x}."),
        3,
    ),
    Family(
        "compare",
        words.PAIRS,
        (
            "Compare {x}.",
            "What is the difference between {x}?",
            "What are the main differences between {x}?",
            "How are {x} alike and how are they different?",
        ),
        2,
    ),
    Family(
        "steps",
        words.TASKS,
        ("How do I {x}?", "Give me step by step instructions to {x}.", "What are the steps to {x}?", "Explain how to {x} in {n} steps."),
        3,
    ),
    Family(
        "advice",
        words.PROBLEMS,
        ("{X}. What should I do?", "{X}. Can you give me some advice?", "Please help me. {X}.", "{X}. Do you have {n} tips for me?"),
        3,
    ),
    Family(
        "poem",
        words.POEM_SUBJECTS,
        (
            "Write a short poem about {x}.",
            "Write a four line poem about {x}.",
            "Write a rhyme about {x}.",
            "Write one line of poetry about {x}.",
            "Write a haiku about {x}.",
        ),
        2,
    ),
    Family(
        "rewrite",
        words.SENTENCES,
        (
            "Rewrite this sentence in other words: {x}",
            "Make this sentence more formal: {x}",
            "Make this sentence shorter: {x}",
            "Rewrite the following sentence for a child: {x}",
            "Turn this sentence into a question: {x}",
        ),
        2,
    ),
    Family(
        "summarise",
        words.PARAGRAPHS,
        (
            "Summarize this text in one sentence: {x}",
            "What is the main idea of this text? {x}",
            "Give a title to this text: {x}",
            "Write a short summary. {x}",
        ),
        3,
    ),
    Family(
        "product",
        words.PRODUCTS,
        (
            "Write a product description for {x}.",
            "Write a short advertisement for {x}.",
            "Describe {x} for an online store.",
            "Write a catchy slogan for {x}.",
        ),
        3,
    ),
    Family(
        "python",
        words.FUNCTIONS,
        (
            "Write a Python function that {x}.",
            "Write a short Python function that {x} and explain it.",
            "How do I write a function in Python that {x}?",
            "Show me Python code for a function that {x}.",
        ),
        3,
    ),
    Family(
        "recipe",
        words.DISHES,
        (
            "Give me a simple recipe for {x}.",
            "How do I make {x}?",
            "Write a short recipe for {x}.",
            "What ingredients do I need for {x}?",
            "What goes well with {x}?",
        ),
        3,
    ),
    Family(
        "travel",
        words.PLACES,
        (
            "Give me {n} travel tips for {x}.",
            "What should I see in {x}?",
            "Plan a weekend trip to {x}.",
            "What is the best time to visit {x}?",
            "What food should I try in {x}?",
        ),
        3,
    ),
    Family(
        "pros_cons",
        words.DECISIONS,
        (
            "What are the pros and cons of {x}?",
            "List the advantages and disadvantages of {x}.",
            "Is {x} a good idea?",
            "Give me {n} reasons for {x}.",
        ),
        3,
    ),
    Family(
        "dialogue",
        words.SPEAKERS,
        ("Write a short dialogue between {x}.", "Write a funny conversation between {x}.", "Write a polite dialogue between {x}."),
        2,
    ),
    Family(
        "quiz",
        words.QUIZ_TOPICS,
        ("Write {n} quiz questions about {x}.", "Make a short quiz about {x} with answers.", "Ask me {n} easy questions about {x}."),
        2,
    ),
    Family("why", words.WHY_FACTS, ("Explain why {x}.", "Why is it that {x}?", "In one paragraph, explain why {x}."), 2),
    Family(
        "people",
        words.PEOPLE,
        ("Who was {x}?", "What is {x} known for?", "Write a short biography of {x}.", "Tell me about the life of {x} in a few sentences."),
        3,
    ),
    Family(
        "country",
        words.COUNTRIES,
        (
            "What is the capital of {x}?",
            "Which languages are spoken in {x}?",
            "Describe {x} in three sentences.",
            "What is {x} famous for?",
            "On which continent is {x}?",
        ),
        3,
    ),
    Family(
        "vocabulary",
        words.VOCABULARY,
        (
            'What does the word "{x}" mean?',
            'Use the word "{x}" in a sentence.',
            'Give me three synonyms for "{x}".',
            'What is the opposite of "{x}"?',
        ),
        2,
    ),
    Family(
        "business",
        words.BUSINESSES,
        (
            "Suggest {n} names for {x}.",
            "Write a slogan for {x}.",
            "Give me {n} marketing ideas for {x}.",
            "Write a short business plan for {x}.",
        ),
        3,
    ),
    Family(
        "sentiment",
        words.REVIEWS,
        (
            "Is this review positive or negative? {x}",
            "Write a polite answer to this review: {x}",
            "Classify the sentiment of this sentence: {x}",
        ),
        2,
    ),
    Family(
        "grammar",
        words.WRONG_SENTENCES,
        (
            "Correct the grammar of this sentence: {x}",
            "Fix the mistakes: {x}",
            "Rewrite this sentence correctly and explain the error: {x}",
        ),
        2,
    ),
    Family(
        "jobs",
        words.JOBS,
        (
            "What does {x} do?",
            "Write {n} interview questions for {x}.",
            "What skills does {x} need?",
            "Write a short job description for {x}.",
            "Describe a typical day of {x}.",
        ),
        3,
    ),
    Family("plan", words.PLANS, ("Make a plan for {x}.", "Write a simple schedule for {x}.", "Give me a checklist for {x}."), 2),
    Family(
        "thanks",
        words.THANKS,
        ("Write a thank you note for {x}.", "Write a short message to say thank you for {x}.", "How can I say thank you for {x}?"),
        2,
    ),
    Family(
        "two_turn_concept",
        words.CONCEPTS,
        (
            ("What is {x}?", "Can you give me an example?"),
            ("Explain {x} in one sentence.", "Now explain it in more detail."),
            ("Tell me about {x}.", "Why does it matter?"),
        ),
        1,
    ),
    Family(
        "two_turn_task",
        words.TASKS,
        (
            ("How do I {x}?", "How long does it take?"),
            ("What do I need to {x}?", "What is the most common mistake?"),
        ),
        1,
    ),
    Family(
        "two_turn_dish",
        words.DISHES,
        (
            ("Give me a recipe for {x}.", "What can I serve with it?"),
            ("How do I make {x}?", "Can I make it the day before?"),
        ),
        1,
    ),
)
