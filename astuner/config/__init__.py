"""Typed configuration.

Each key is declared once, with `section.key`, in a section: `data`, `rollout`, `trainer`, `timing`, `services`, `root`.
The declarations determine the checks and notices (`checks`), the values of verl's and Trinity's configuration
(`trainer_mapping`), and the default YAML and the docs' tables (`docs_tables`).

`loading` creates a `RunConfig` from YAML files and the command line: `hydra_composition`, `hydra_files` and `overrides`
merge them with Hydra, `aliases` replaces older names, `validation` checks types and bounds. `to_yaml` writes a
`RunConfig`.
"""
