"""Typed configuration.

Each key is declared once, with `section.key`, in a section: `data`, `rollout`, `trainer`, `timing`, `services`, `root`.
The declarations determine the checks and notices, the values of verl's and Trinity's configuration
(`trainer_mapping`), and the default YAML and the docs' tables (`docs/key_tables.py`).

`loading.load_config` creates a `RunConfig` in steps, each of which returns a new value: `composition` reads the YAML
files (`yaml_file`) and the command line, both with canonical names (`canonical`), and merges them with Hydra,
`validation` checks types and bounds, `consistency` compares keys with each other, and `loading` with the backbone.
`yaml_file.to_yaml` writes a `RunConfig`.
"""
