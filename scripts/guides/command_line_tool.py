"""A command-line tool: each run is a short process that finds the running worker, or starts the shared one.

    python scripts/guides/command_line_tool.py notes.db add "buy tea"
    python scripts/guides/command_line_tool.py notes.db list

The shared worker ends 5 seconds after the last run, so the next run in a row finds it warm. Any number of runs may
go on at once: none of them meets "database is locked".
"""

import argparse
import sys

import storage_worker as sw

TIMEOUT_SECONDS = 10.0
EXIT_FAILED = 1
EXIT_UNKNOWN = 2


def add(client: sw.Client, text: str, key: str | None) -> None:
    """Store a note and print its number."""
    client.execute("create table if not exists notes(id integer primary key, text text)")
    written = client.execute("insert into notes(text) values (?)", (text,), request_key=key)
    print(written.last_insert_rowid)


def show(client: sw.Client) -> None:
    """Print all notes, page by page: no list of all of them is ever in memory."""
    for page in client.pages("select id, text from notes order by id", key=("id",)):
        for number, text in page:
            print(number, text)


def parse() -> argparse.Namespace:
    """What the user wants."""
    parser = argparse.ArgumentParser(description="Keeps notes.")
    parser.add_argument("database")
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="store a note")
    adding.add_argument("text")
    adding.add_argument("--key", help="a request key: repeated with it, the note is stored once")
    commands.add_parser("list", help="print all notes")
    return parser.parse_args()


def main() -> int:
    """Do it; the exit status tells a shell what to do next."""
    wanted = parse()
    try:
        with sw.connect(wanted.database, timeout=TIMEOUT_SECONDS) as client:
            if wanted.command == "add":
                add(client, wanted.text, wanted.key)
            else:
                show(client)
    except sw.StorageError as error:
        # The message is written for people; code and outcome are for programs.
        print(f"error: {error.message}", file=sys.stderr)
        if error.outcome == "unknown":
            print("whether it was stored is not known: run it again with the same --key", file=sys.stderr)
            return EXIT_UNKNOWN
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
