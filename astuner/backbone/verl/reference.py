"""Write the generated parts of its page: `python -m astuner.backbone.verl.reference docs/en/backbone_verl.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from astuner.backbone.verl.mapping import PLAIN, Entry, bare, machine_mapping, verl_mapping
from astuner.backbone.verl.rules import RULES
from astuner.config.keys import dotted, parts
from astuner.config.reference import Parts, main, table
from astuner.config.support import REFUSALS


def _mapping() -> str:
    """Keys that verl's configuration has."""
    entries = verl_mapping().entries.values()
    rows = (row for entry in entries if entry.verl_keys for row in _rows(entry))
    return table(("key", "verl's key", "value", "honoured by"), rows)


def _rows(entry: Entry) -> Iterator[tuple[str, ...]]:
    for index, (key, rule) in enumerate(entry.verl_keys.items()):
        name = "" if index else f"`{_short(entry)}`"
        value = "as it is" if rule == PLAIN else _of_rule(rule)
        yield name, f"`{bare(key)}`", value, "verl" if key in entry.sets else "astuner"


def _handled() -> str:
    """Keys that verl's configuration has no place for."""
    entries = [entry for entry in verl_mapping().entries.values() if entry.kind == "astuner"]
    return table(("key or section", "how"), ((f"`{_short(entry)}`", entry.text) for entry in entries))


def _refused() -> str:
    """What this backbone does not offer."""
    rows = [
        (
            f"`{refusal.key.removeprefix('astuner.')}`",
            "anything but the default" if refusal.values is None else ", ".join(f"`{v}`" for v in refusal.values),
            refusal.why,
        )
        for refusal in REFUSALS
        if "verl" in refusal.backbones
    ]
    unused = [entry for entry in verl_mapping().entries.values() if entry.kind == "unused"]
    rows += [(f"`{_short(entry)}`", "set aside with a notice", entry.text) for entry in unused]
    return table(("key or section", "value", "why, and what to do"), rows)


def _owned() -> str:
    """What the `verl:` section cannot have."""
    mapping = verl_mapping()
    rows = [(f"`{key}`", f"`{json.dumps(fixed.value)}`", fixed.why) for key, fixed in mapping.fixed.items()]
    rows += [(f"`{key}`", _of_rule(rule), "a fact of the run") for key, rule in mapping.facts.items()]
    rows += [(f"`{key}`", "", why) for key, why in mapping.own.items()]
    return table(("verl's key or section", "value", "why"), rows)


def _machine() -> str:
    """What verl's configuration has by what the run is on."""
    machine = machine_mapping()
    own = "on a CPU, unless a Ray is joined (`trainer_common.ray_address`, `--with-ray`)"
    groups = (
        (machine.everywhere, "always"),
        (machine.without_flash_attention, "where flash-attention does not import, and on a CPU"),
        (machine.cpu, "on a CPU"),
        (machine.own_ray, own),
    )
    rows = [
        (f"`{bare(key)}`", f"`{json.dumps(value)}`", when) for group, when in groups for key, value in group.items()
    ]
    rows += [(f"`{bare(key)}`", _of_rule(rule), own) for key, rule in machine.own_ray_facts.items()]
    return table(("verl's key", "value", "when"), rows)


def _of_rule(rule: str) -> str:
    """The first line of a rule's docstring."""
    said = (RULES[rule].__doc__ or "").partition("\n")[0]
    return said[0].lower() + said[1:].removesuffix(".")


def _short(entry: Entry) -> str:
    """The key without the section that all have in common."""
    return dotted(entry.path[1:] if entry.path[:1] == parts("astuner") else entry.path)


PARTS: Parts = {"mapping": _mapping, "handled": _handled, "refused": _refused, "owned": _owned, "machine": _machine}


if __name__ == "__main__":
    main(parts=PARTS)
