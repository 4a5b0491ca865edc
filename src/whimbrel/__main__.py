"""`python -m whimbrel` is the command `whimbrel`."""

from whimbrel.cli.main import main

if __name__ == "__main__":
    main()
