"""`python -m stovetop` is the command `stovetop`."""

from stovetop.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
