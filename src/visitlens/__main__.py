"""`python -m visitlens`: the same as the console script."""

from visitlens.app.cli import main

if __name__ == "__main__":
    main()
