"""The tables of a backbone's page that a mapping.yaml makes: what becomes of each key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from astuner.backbone.key_mapping import PLAIN, Entry, KeyMapping, bare
from astuner.config.keys import dotted, parts
from astuner.config.reference import Parts, table
from astuner.config.support import REFUSALS


@dataclass(frozen=True, slots=True)
class MappingReference:
    """A mapping as tables.

    Attributes:
        mapping: a mapping.yaml.
        rules: by name; the first line of a rule's docstring says what it gives.
        title: the trainer's name as its page writes it.
    """

    mapping: KeyMapping
    rules: Mapping[str, Callable[..., object]]
    title: str

    def parts(self) -> Parts:
        """What makes each generated part, by name."""
        return {"mapping": self._mapping, "handled": self._handled, "refused": self._refused, "owned": self._owned}

    def of_rule(self, rule: str) -> str:
        """The first line of a rule's docstring."""
        said = (self.rules[rule].__doc__ or "").partition("\n")[0]
        return said[0].lower() + said[1:].removesuffix(".")

    def _mapping(self) -> str:
        """Keys that the trainer's configuration has."""
        rows = (row for entry in self.mapping.entries.values() if entry.trainer_keys for row in self._rows(entry))
        return table(("key", f"{self.title}'s key", "value", "honoured by"), rows)

    def _rows(self, entry: Entry) -> Iterator[tuple[str, ...]]:
        for index, (key, rule) in enumerate(entry.trainer_keys.items()):
            name = "" if index else f"`{_short(entry)}`"
            value = "as it is" if rule == PLAIN else self.of_rule(rule)
            yield name, f"`{bare(key)}`", value, self.title if key in entry.sets else "astuner"

    def _handled(self) -> str:
        """Keys that the trainer's configuration has no place for."""
        entries = [entry for entry in self.mapping.entries.values() if entry.kind == "astuner"]
        return table(("key or section", "how"), ((f"`{_short(entry)}`", entry.text) for entry in entries))

    def _refused(self) -> str:
        """What this backbone does not offer."""
        rows = [
            (
                f"`{refusal.key.removeprefix('astuner.')}`",
                "anything but the default" if refusal.values is None else ", ".join(f"`{v}`" for v in refusal.values),
                refusal.why,
            )
            for refusal in REFUSALS
            if self.mapping.trainer in refusal.backbones
        ]
        unused = [entry for entry in self.mapping.entries.values() if entry.kind == "unused"]
        rows += [(f"`{_short(entry)}`", "set aside with a notice", entry.text) for entry in unused]
        return table(("key or section", "value", "why, and what to do"), rows)

    def _owned(self) -> str:
        """What the section that is handed through cannot have."""
        mapping = self.mapping
        rows = [(f"`{key}`", f"`{json.dumps(fixed.value)}`", fixed.why) for key, fixed in mapping.fixed.items()]
        rows += [(f"`{key}`", self.of_rule(rule), "a fact of the run") for key, rule in mapping.facts.items()]
        rows += [(f"`{key}`", "", why) for key, why in mapping.own.items()]
        return table((f"{self.title}'s key or section", "value", "why"), rows)


def _short(entry: Entry) -> str:
    """The key without the section that all have in common."""
    return dotted(entry.path[1:] if entry.path[:1] == parts("astuner") else entry.path)
