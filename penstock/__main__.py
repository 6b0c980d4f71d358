"""`python -m penstock`: the command line."""

from penstock.commands.cli import main

if __name__ == "__main__":
    main()
