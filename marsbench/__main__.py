"""`python -m marsbench` is the same as `marsbench`."""

from marsbench.cli import main

if __name__ == "__main__":
    main()
