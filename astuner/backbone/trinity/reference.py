"""Write the generated parts of its page: `python -m astuner.backbone.trinity.reference docs/en/backbone_trinity.md`."""

from __future__ import annotations

import json

from astuner.backbone.mapping_reference import MappingReference
from astuner.backbone.trinity.mapping import machine_mapping, trinity_mapping
from astuner.backbone.trinity.rules import RULES
from astuner.config.reference import Parts, main, table

_REFERENCE = MappingReference(trinity_mapping(), RULES, "Trinity")


def _machine() -> str:
    """What Trinity's configuration has by what the run is on."""
    machine, service = machine_mapping(), "with a Tinker service"
    groups = ((machine.everywhere, "always"), (machine.tinker, service), (machine.gpus, "on GPUs"))
    rows = [(f"`{key}`", f"`{json.dumps(value)}`", when) for group, when in groups for key, value in group.items()]
    rows += [(f"`{key}`", _REFERENCE.of_rule(rule), service) for key, rule in machine.tinker_facts.items()]
    return table(("Trinity's key", "value", "when"), rows)


PARTS: Parts = {**_REFERENCE.parts(), "machine": _machine}


if __name__ == "__main__":
    main(parts=PARTS)
