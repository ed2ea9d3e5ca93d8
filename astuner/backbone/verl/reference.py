"""Write the generated parts of its page: `python -m astuner.backbone.verl.reference docs/en/backbone_verl.md`."""

from __future__ import annotations

import json

from astuner.backbone.key_mapping import bare
from astuner.backbone.mapping_reference import MappingReference
from astuner.backbone.verl.mapping import machine_mapping, verl_mapping
from astuner.backbone.verl.rules import RULES
from astuner.config.reference import Parts, main, table

_REFERENCE = MappingReference(verl_mapping(), RULES, "verl")


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
    rows += [(f"`{bare(key)}`", _REFERENCE.of_rule(rule), own) for key, rule in machine.own_ray_facts.items()]
    return table(("verl's key", "value", "when"), rows)


PARTS: Parts = {**_REFERENCE.parts(), "machine": _machine}


if __name__ == "__main__":
    main(parts=PARTS)
