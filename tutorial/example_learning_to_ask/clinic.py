"""A reception desk of a clinic: complaints, the questions that matter for each, and simulated patients.

The rules are invented for this example. They are not medical advice.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from astuner import ModelTuner


@dataclass(frozen=True)
class Topic:
    """Something that the desk can ask about.

    Attributes:
        pattern: Regular expression for the beginnings of words by which a question is recognised.
        question: A question about the topic.
        yes: The patient's words if the fact is true.
        no: The patient's words if it is false.
    """

    pattern: str
    question: str
    yes: str
    no: str


TOPICS = {
    "fever": Topic("fever|temperature", "Do you have a fever?", "I have a fever.", "I have no fever."),
    "accident": Topic(
        "accident|injur|fall|fell|hit", "Did you have an accident?", "I had an accident.", "I had no accident."
    ),
    "duration": Topic(
        "how long|since when|when did|start|began|begin|weeks",
        "How long have you had it?",
        "I have had it for weeks.",
        "It began today.",
    ),
    "travel": Topic("travel|abroad|trip", "Have you been abroad?", "I have been abroad.", "I have not been abroad."),
    "tablets": Topic("tablet|medic|pill", "Do you take any tablets?", "I take tablets.", "I take no tablets."),
    "age": Topic(
        "how old|your age|years old|child|adult", "How old are you?", "I am 9 years old.", "I am 40 years old."
    ),
}

Rule = str | tuple[str, "Rule", "Rule"]
"""A department; or a topic, the rule if its fact is true, and the rule if it is false."""

RULES: Mapping[str, Rule] = {
    "a headache": ("accident", "emergency", ("duration", "neurology", "general practice")),
    "a cough": ("duration", "pulmonology", ("fever", "infectious diseases", "general practice")),
    "a rash": ("tablets", "allergology", ("age", "pediatrics", "dermatology")),
    "back pain": ("accident", "emergency", ("duration", "orthopedics", "general practice")),
    "stomach ache": ("travel", "tropical medicine", ("age", "pediatrics", "general practice")),
    "dizziness": ("tablets", "general practice", ("accident", "emergency", "neurology")),
    "a sore throat": ("fever", ("age", "pediatrics", "general practice"), "otology"),
    "diarrhea": ("travel", ("fever", "tropical medicine", "general practice"), "general practice"),
    "an earache": ("age", "pediatrics", "otology"),
    "a sore knee": ("accident", "emergency", "orthopedics"),
    "chest pain": "emergency",
}

Facts = Mapping[str, bool]
"""Whether the fact of a topic is true, by topic."""


def department(complaint: str, facts: Facts) -> str:
    """Return the department for a patient, all of whose facts are known."""
    (found,) = departments(RULES[complaint], facts)
    return found


def departments(rule: Rule, facts: Facts) -> set[str]:
    """Return the departments that are possible if only some facts are known."""
    if isinstance(rule, str):
        return {rule}
    topic, if_true, if_false = rule
    branches = [if_true if facts[topic] else if_false] if topic in facts else [if_true, if_false]
    return set().union(*(departments(branch, facts) for branch in branches))


def needed_topics(rule: Rule, facts: Facts, known: Facts) -> list[str]:
    """Return the topics to ask a patient about, in order, if `known` of the `facts` are known."""
    if isinstance(rule, str) or len(departments(rule, known)) == 1:
        return []
    topic, if_true, if_false = rule
    rest = needed_topics(if_true if facts[topic] else if_false, facts, known)
    return rest if topic in known else [topic, *rest]


def describe(rule: Rule) -> str:
    """Return a rule in words."""
    if isinstance(rule, str):
        return rule
    topic, if_true, if_false = rule
    return f'if "{TOPICS[topic].yes}" {describe(if_true)}, else {describe(if_false)}'


def statement(topic: str, is_true: bool) -> str:
    """Return the words in which a patient states a fact."""
    return TOPICS[topic].yes if is_true else TOPICS[topic].no


def topics_of(question: str) -> list[str]:
    """Return the topics that a question is about."""
    return [name for name, topic in TOPICS.items() if re.search(rf"\b(?:{topic.pattern})", question, re.IGNORECASE)]


def count_questions(text: str) -> int:
    """Return how many questions a message asks: at least one, and one for each question mark and each topic."""
    return max(1, text.count("?"), len(topics_of(text)))


class Patient(ABC):
    """A simulated user with a hidden profile, who answers questions."""

    @abstractmethod
    async def answer(self, question: str) -> str:
        """Return the answer to a message of the desk."""


class RuleBasedPatient(Patient):
    """States the facts that a question is about, and nothing else."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    async def answer(self, question: str) -> str:
        """Return the facts of the topics that are recognised in the question."""
        stated = [statement(topic, self._facts[topic]) for topic in topics_of(question)]
        return " ".join(stated) or "I do not know."


class LlmPatient(Patient):
    """An LLM in the role of the patient: the frozen model of the target `patient`."""

    def __init__(self, complaint: str, facts: Facts, model_tuner: ModelTuner) -> None:
        self._model = model_tuner.for_agent("patient", target_tag="patient")
        known = " ".join(statement(topic, is_true) for topic, is_true in facts.items())
        prompt = (
            f"You are a patient at the reception desk of a clinic. You have {complaint}. {known} "
            "Answer the question in one short sentence. State only what you are asked about. "
            "If these facts do not answer it, say that you do not know."
        )
        self._messages: list[dict] = [{"role": "system", "content": prompt}]

    async def answer(self, question: str) -> str:
        """Return the model's answer."""
        self._messages.append({"role": "user", "content": question})
        answer = await self._model.chat(self._messages)
        self._messages.append(answer.message)
        return answer.text
