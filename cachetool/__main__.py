"""``python -m cachetool`` is the command ``cachetool``."""

from cachetool.cli.app import main

if __name__ == "__main__":
    main()
