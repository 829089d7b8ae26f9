"""`python -m visitlens`: the same as the console script."""

from visitlens.probe.cli import main

if __name__ == "__main__":
    main()
