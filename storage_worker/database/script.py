"""Where the statements of a text end."""

import re
from collections.abc import Iterator

_START, _NORMAL, _EXPLAIN, _CREATE, _TRIGGER, _SEMICOLON, _END = range(7)
"""Before a statement; in one; behind EXPLAIN; behind CREATE; in a trigger, behind a semicolon and an END there."""

# The automaton of SQLite's sqlite3_complete (its complete.c). To ask that function at each semicolon would
# cost the square of the text.
_ELSE = {
    _START: _NORMAL,
    _NORMAL: _NORMAL,
    _EXPLAIN: _EXPLAIN,
    _CREATE: _NORMAL,
    _TRIGGER: _TRIGGER,
    _SEMICOLON: _TRIGGER,
    _END: _TRIGGER,
}
_NEXT = {
    (_START, ";"): _START,
    (_START, "explain"): _EXPLAIN,
    (_START, "create"): _CREATE,
    (_NORMAL, ";"): _START,
    (_EXPLAIN, ";"): _START,
    (_EXPLAIN, "create"): _CREATE,
    (_CREATE, ";"): _START,
    (_CREATE, "temp"): _CREATE,
    (_CREATE, "temporary"): _CREATE,
    (_CREATE, "trigger"): _TRIGGER,
    (_TRIGGER, ";"): _SEMICOLON,
    (_SEMICOLON, ";"): _SEMICOLON,
    (_SEMICOLON, "end"): _END,
    (_END, ";"): _START,
}

_TOKEN = re.compile(
    r"""
      (?P<space> [ \t\n\f\r]+ | --[^\n]* | /\*.*?(?:\*/|\Z) )
    | (?P<word> [A-Za-z0-9_$\x80-\U0010ffff]+ )
    | '[^']*(?:'|\Z) | "[^"]*(?:"|\Z) | `[^`]*(?:`|\Z) | \[[^\]]*(?:\]|\Z)
    | .
    """,
    re.VERBOSE | re.DOTALL,
)


def split(text: str) -> Iterator[str]:
    """The statements of a text with the semicolons that end them, and the rest behind the last one."""
    state, begin = _START, 0
    for token in _TOKEN.finditer(text):
        if token["space"] is None:
            word = token[0].lower()
            state = _NEXT.get((state, word), _ELSE[state])
            if word == ";" and state == _START:
                yield text[begin : token.end()]
                begin = token.end()
    if begin < len(text):
        yield text[begin:]
