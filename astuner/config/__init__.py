"""Typed configuration.

`root` and its sections (`data`, `rollout`, `trainer`) are the schema; `loading` makes a `RunConfig` of YAML files and
the command line, `changing` changes one from Python, `dumping` writes one. The rest serves these: `aliases` (older
spellings), `support` (what each backbone can honour), `consistency` (keys that must fit together), `default_yaml`.
"""
