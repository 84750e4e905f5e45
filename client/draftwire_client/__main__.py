"""`python -m draftwire_client` is the command `draftwire`."""

from draftwire_client.cli import main

if __name__ == "__main__":
    main()
