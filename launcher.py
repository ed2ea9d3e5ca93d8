"""Runs the `astuner` command, for editors that start a file: python launcher.py --conf agent.yaml --backbone=debug."""

from astuner.__main__ import main

if __name__ == "__main__":
    main()
