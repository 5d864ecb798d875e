"""`python -m storage_worker`: the `storage-worker` command."""

from .cli import main

if __name__ == "__main__":
    main()
