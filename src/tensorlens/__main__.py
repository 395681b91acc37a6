"""`python -m tensorlens`."""

from tensorlens.app.cli import main

if __name__ == "__main__":
    main()
