"""``python -m spear_training`` is ``spear train``."""

from spear_envs.cli import main

if __name__ == "__main__":
    import sys

    main(["train", *sys.argv[1:]])
