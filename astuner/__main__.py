"""Entry point of `astuner` and `python -m astuner`."""

from astuner.system.signals import print_stack_on_usr1


def main() -> None:
    """Run the command and exit; see `astuner.cli.main`."""
    print_stack_on_usr1()
    from astuner.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
