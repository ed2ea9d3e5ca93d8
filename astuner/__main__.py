"""The `astuner` command, and `python -m astuner`."""

from astuner.signals import answer_usr1


def main() -> None:
    """Run the command and exit; see `astuner.cli.main`."""
    answer_usr1()
    from astuner.cli import main as run

    run()


if __name__ == "__main__":
    main()
