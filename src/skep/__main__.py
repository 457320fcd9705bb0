"""Run the command line as `python -m skep`."""

from skep.cli import main

if __name__ == "__main__":
    main()
